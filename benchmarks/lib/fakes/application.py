"""An application over engines that compute nothing, to measure the serving layer alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application

from benchmarks.lib.fakes.names import APPLICATION, MODEL
from benchmarks.lib.synthetic import prompt_counts, random_spec, table_near
from eldr_serve.engine.fake import FakeConfig, FakeEngine
from eldr_serve.ingress.deployment import EldrIngress, decode_directory, prefill_directory
from eldr_serve.ingress.http_application import application as http_application
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.replicas.servers import DecodeServer, EngineServer, PrefillServer
from eldr_serve.router.actor import actor_name
from eldr_serve.router.settings import RouterSettings
from examples.demo_model import WEIGHTS

_PROMPT_TOKENS = 300
_STEP_S = 0.03


def fake_application(
    *,
    decode_replicas: int,
    prefill_s: float,
    seed: int,
    own_port: int | None = None,
    ingresses: int = 1,
    prefill_replicas: int = 1,
    engine_options: Mapping[str, Any] = {},
    ingress_options: Mapping[str, Any] = {},
) -> Application:
    """Return eldr_serve's ingress, router actor and channels over engines that compute nothing.

    `engine_options` and `ingress_options` are additional deployment options of Serve.
    """
    name, options = APPLICATION, PathOptions()
    prompts = prompt_counts(32, np.random.default_rng(seed))
    config = FakeConfig(prompts, prompt_tokens=_PROMPT_TOKENS, prefill_s=prefill_s, step_s=_STEP_S)

    def deploy(server: type[EngineServer], directory_name: str, replicas: int, **arguments: Any) -> Any:
        router = RequestRouterConfig(
            request_router_class="eldr_serve.fleet.replica_publisher.ReplicaPublisher",
            request_router_kwargs={"directory_name": directory_name},
        )
        return serve.deployment(
            server,
            name=f"Fake{server.__name__}",
            num_replicas=replicas,
            request_router_config=router,
            **{"ray_actor_options": {"num_cpus": 0.1}} | dict(engine_options),
        ).bind(config, start_engine=FakeEngine.start, stall_timeout_s=options.stall_timeout_s, **arguments)

    rng = np.random.default_rng(seed)
    table = table_near(prompt_counts(decode_replicas, rng), decode_replicas, rng, spec=random_spec(rng))
    ingress_limits = IngressOptions(port=own_port)
    table_bytes = replace(table, model=MODEL).to_bytes()
    ingress = serve.deployment(
        serve.ingress(http_application)(EldrIngress),
        name="EldrIngress",
        num_replicas=ingresses,
        max_ongoing_requests=2 * ingress_limits.max_in_flight,
        **{"ray_actor_options": {"num_cpus": 0.1}} | dict(ingress_options),
    )
    return ingress.bind(
        prefill=deploy(PrefillServer, prefill_directory(name), prefill_replicas),
        decode=deploy(DecodeServer, decode_directory(name), decode_replicas, router_name=actor_name(name)),
        tokenizer=str(WEIGHTS),
        model_cards=[{"id": MODEL, "object": "model"}],
        openapi={},
        application=name,
        router_settings=RouterSettings(model_id=MODEL, policy="locality-band", table=table_bytes),
        options=ingress_limits,
        path_options=options,
        prefill_options=PrefillRouterOptions(),
    )
