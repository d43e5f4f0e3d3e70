"""The application graph of a deployment file, for `serve run deployments/<topology>.yaml`."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from ray import serve
from ray.serve.deployment import Application
from starlette.applications import Starlette

from eldr_serve.config.application import AUTOSCALING_POLICY, CONFIG_OF_ROLE, DRAIN_S, EldrArgs, parse
from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.engine.backend_protocol import EngineSpec
from eldr_serve.engine.protocol import EngineRole
from eldr_serve.errors import ConfigurationError
from eldr_serve.ingress.deployment import EldrIngress, decode_directory, prefill_directory
from eldr_serve.ingress.http_application import application
from eldr_serve.ingress.openapi import openapi_document
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.replicas.llm_servers import LLMDecodeServer, LLMPrefillServer
from eldr_serve.router.actor import actor_name
from eldr_serve.router.settings import RouterSettings
from eldr_serve.signatures.settings import PoolSettings
from eldr_serve.validation import first_problem

_REPLICA_PUBLISHER = "eldr_serve.fleet.replica_publisher.ReplicaPublisher"
_NAME_PREFIX_OF_ROLE = {"prefill": "Prefill:", "decode": "Decode:", "whole": "Decode:"}


@dataclass(frozen=True)
class ApplicationParts:
    """The parts of an application that is ready to be deployed.

    Attributes:
        args: the validated arguments of the file.
        specs: engine specs, in the order in which requests reach the engines.
        application: the Serve application graph, not started.
        deployment_names: names of its deployments.
    """

    args: EldrArgs
    specs: dict[EngineRole, EngineSpec]
    application: Application
    deployment_names: tuple[str, ...]


def build_app(args: dict[str, Any]) -> Application:
    """Build the Ray Serve application: ingress, decode deployment, and prefill deployment if there is one.

    Args:
        args: the application's arguments in the deployment file (EldrArgs).

    Raises:
        ConfigurationError: `args` are invalid.
    """
    return build_parts(args).application


def build_parts(args: dict[str, Any]) -> ApplicationParts:
    """Build the application like build_app and return it with its parts. Ray need not be running.

    Raises:
        ConfigurationError: `args` are invalid.
    """
    BACKEND.check_versions()
    eldr_args = parse(args)
    specs = engine_specs(eldr_args)
    *_, decode_role = specs
    decode_spec = specs[decode_role]
    stall_timeout_s = eldr_args.path.stall_timeout_s
    prefill = None
    if "prefill" in specs:
        with _name_part_in_errors("prefill_config.deployment_config"):
            prefill = specs["prefill"].deployment(
                LLMPrefillServer, name_prefix=_NAME_PREFIX_OF_ROLE["prefill"], stall_timeout_s=stall_timeout_s
            )
    with _name_part_in_errors("decode_config.deployment_config"):
        decode = decode_spec.deployment(
            LLMDecodeServer,
            name_prefix=_NAME_PREFIX_OF_ROLE[decode_role],
            router_name=actor_name(eldr_args.name),
            application=eldr_args.name,
            num_pool_actors=eldr_args.signatures.actors,
            follows_expert_placements=bool(eldr_args.router.expert_placements),
            stall_timeout_s=stall_timeout_s,
        )
    options = {
        "max_ongoing_requests": 2 * eldr_args.ingress.max_in_flight
    } | eldr_args.ingress_deployment_config
    with _name_part_in_errors("ingress_deployment_config"):
        ingress = serve.deployment(_ingress_class(eldr_args.ingress), name="EldrIngress", **options)
    graph = ingress.bind(
        prefill=prefill,
        decode=decode,
        tokenizer=decode_spec.tokenizer,
        model_cards=decode_spec.model_cards,
        openapi=openapi_document(BACKEND.request_types()),
        application=eldr_args.name,
        router_settings=router_settings(eldr_args, decode_spec),
        options=eldr_args.ingress,
        path_options=eldr_args.path,
        prefill_options=eldr_args.prefill_router,
        admin_key_sha256=_admin_key_sha256(eldr_args),
        engine_version=BACKEND.version(),
    )
    engine_names = (f"{_NAME_PREFIX_OF_ROLE[role]}{spec.deployment_name}" for role, spec in specs.items())
    return ApplicationParts(eldr_args, specs, graph, (ingress.name, *engine_names))


def _ingress_class(options: IngressOptions) -> type:
    """Return the class of an ingress replica, with its HTTP application."""
    origins = options.cors_origins  # Ray sends `http` with this value to the replicas

    def http() -> Starlette:
        return application(origins)

    ingress: type = serve.ingress(http)(EldrIngress)
    return ingress


def router_settings(eldr_args: EldrArgs, spec: EngineSpec) -> RouterSettings:
    """Return the settings of the DecodeRouter actor, including those that are set automatically."""
    router_name = actor_name(eldr_args.name)
    pool = PoolSettings(eldr_args.name, router_name, spec.model_id, eldr_args.signatures)
    return eldr_args.router.model_copy(
        update={
            "model_id": spec.model_id,
            "adapters": spec.adapters,
            "adapter_slots": spec.adapter_slots,
            "queue_timeout_s": eldr_args.path.queue_timeout_s,
            "pool": pool if eldr_args.signatures.actors else None,
        }
    )


@contextmanager
def _name_part_in_errors(where: str, content: dict[str, Any] | None = None) -> Iterator[None]:
    """Turn errors of Serve or an engine into a ConfigurationError that names the part of the file.

    Args:
        where: name of the part.
        content: content of the part, see first_problem.
    """
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}.{error}") from error
    except ValidationError as error:
        raise ConfigurationError(first_problem(error, content, where=where)) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{where}: {' '.join(str(error).split())}") from error


def engine_specs(eldr_args: EldrArgs) -> dict[EngineRole, EngineSpec]:
    """Return engine specs in the order in which requests reach the engines; raise ConfigurationError."""
    kv_lease_s = eldr_args.path.kv_lease_s
    decode_name = decode_directory(eldr_args.name)
    if eldr_args.prefill_config is None:
        spec = engine_spec(
            eldr_args.decode_config, "whole", directory_name=decode_name, kv_lease_s=kv_lease_s
        )
        return {"whole": spec}
    prefill = engine_spec(
        eldr_args.prefill_config,
        "prefill",
        directory_name=prefill_directory(eldr_args.name),
        kv_lease_s=kv_lease_s,
    )
    decode = engine_spec(eldr_args.decode_config, "decode", directory_name=decode_name, kv_lease_s=kv_lease_s)
    BACKEND.compare(prefill, decode)
    return {"prefill": prefill, "decode": decode}


def engine_spec(
    llm_config: dict[str, Any],
    role: EngineRole,
    *,
    directory_name: str,
    kv_lease_s: float,
) -> EngineSpec:
    """Return an engine spec, including the deployment options that serving needs (request router, drain)."""
    config = copy.deepcopy(llm_config)
    options = config.get("deployment_config") or {}
    deployment = {name: value for name, value in options.items() if value is not None}
    config["deployment_config"] = deployment
    deployment.setdefault("graceful_shutdown_timeout_s", DRAIN_S)
    if deployment.get("autoscaling_config"):
        deployment["autoscaling_config"].setdefault("policy", {"policy_function": AUTOSCALING_POLICY})
    deployment["request_router_config"] = (deployment.get("request_router_config") or {}) | {
        "request_router_class": _REPLICA_PUBLISHER,
        "request_router_kwargs": {"directory_name": directory_name},
    }
    with _name_part_in_errors(CONFIG_OF_ROLE[role], config):
        return BACKEND.spec(role, config, kv_lease_s=kv_lease_s)


def _admin_key_sha256(args: EldrArgs) -> str | None:
    key = args.admin_key.get_secret_value() if args.admin_key else os.environ.get("ELDR_ADMIN_KEY")
    return hashlib.sha256(key.encode()).hexdigest() if key else None
