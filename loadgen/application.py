"""An application of eldr-serve on a Ray cluster of its own: its start, its update and its stop."""

from __future__ import annotations

import io
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from typing import Any

from eldr_serve.commands.client import OperatorClient, ServiceError
from eldr_serve.config.ray_settings import QUIET
from eldr_serve.errors import UserInputError

NAME = "eldr"
CPUS, OBJECT_STORE_BYTES = 8, 400_000_000  # resources of the node that runs the engines
_POLL_S = 3.0  # time between checks of the replicas; a check takes 0.3 s of a core on which engines start


def check_port(port: int) -> None:
    """Raise UserInputError if another process listens at this port or the next one."""
    for needed in (port, port + 1):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", needed)) == 0:
                raise UserInputError(f"port {needed} is already in use: give another --port")


def start(
    arguments: dict[str, Any],
    port: int,
    key: str,
    *,
    dashboard: bool,
    log: Callable[[str], None],
    before_deploy: Callable[[], None] = lambda: None,
    start_ray: Callable[[], Any] | None = None,
) -> tuple[OperatorClient, str]:
    """Start a cluster and the application in it; return once the engines are warm.

    Args:
        arguments: arguments of the application in a deployment YAML.
        port: port of the ingress; Serve's proxy uses the next one.
        key: admin key.
        log: called with each line of progress.
        before_deploy: called when the cluster runs; it returns when the application's files exist.
        start_ray: starts a cluster, connects to it and returns Ray's context; None: a cluster of one node.

    Returns:
        A client of the application, and the address of Ray's dashboard.

    Raises:
        UserInputError: the application does not start.
    """
    # Before ray is imported: a cluster of this process alone, which needs no token and reports to nobody.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from ray import serve

    arguments["admin_key"] = key
    arguments["ingress"] = arguments.get("ingress", {}) | {"port": port}
    for noisy in ("ray", "ray.serve", "vllm", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    service = OperatorClient(f"http://127.0.0.1:{port}", key)
    with ThreadPoolExecutor(1) as importing:
        builder = importing.submit(_builder)  # the import runs while Ray starts
        log("starting a private Ray cluster")
        context = start_ray() if start_ray else _start_one_node(arguments, dashboard)
        serve.start(http_options={"host": "127.0.0.1", "port": port + 1})
        log("importing Ray Serve LLM and vLLM")
        builder.result()
    before_deploy()
    deploy(arguments)
    _wait_until_ready(service, log)
    return service, f"http://{context.dashboard_url}"


def _start_one_node(arguments: dict[str, Any], dashboard: bool) -> Any:
    """Start a cluster of one node, connect to it, and return Ray's context."""
    import ray

    return ray.init(
        "local",
        num_cpus=CPUS,
        num_gpus=_gpus(arguments),
        log_to_driver=False,
        logging_level="error",
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=dashboard,
    )


def _wait_until_ready(service: OperatorClient, log: Callable[[str], None]) -> None:
    """Wait until all replicas run and the engines are warm. Raise UserInputError if the application fails."""
    from ray import serve

    while (state := serve.status().applications[NAME]).status != "RUNNING":
        if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise UserInputError(f"the application did not start: {state.message}")
        log(_replicas_up(state.deployments))
        time.sleep(_POLL_S)
    while not (ingress := _ingress_status(service)).get("all_warm"):
        log(f"{ingress.get('warm_pairs', 0)} pairs of engines have exchanged KV blocks")
        time.sleep(0.5)


def deploy(arguments: dict[str, Any]) -> None:
    """Deploy the application, or update it if it runs. Return before that is done."""
    from ray import serve

    target = serve.RunTarget(_builder()(arguments), name=NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


def all_replicas_running() -> bool:
    """Return whether Serve has as many running replicas of each deployment as it wants, and no others."""
    from ray import serve

    state = serve.status().applications[NAME]
    states = [deployment.replica_states for deployment in state.deployments.values()]
    return state.status == "RUNNING" and all(set(counts) == {"RUNNING"} for counts in states)


def stop() -> None:
    """Stop the application and its cluster."""
    import ray
    from ray import serve

    with redirect_stdout(io.StringIO()):  # Ray's error that the controller, which it kills itself, is dead
        serve.shutdown()
        ray.shutdown()


def _gpus(arguments: dict[str, Any]) -> int | None:
    """Return 1 if all engines share one GPU, so that Ray need not look for it, otherwise None."""
    shares = [
        config["deployment_config"].get("ray_actor_options", {}).get("num_gpus", 0)
        * config["deployment_config"].get("num_replicas", 1)
        for name, config in arguments.items()
        if name in ("prefill_config", "decode_config")
    ]
    return 1 if 0 < sum(shares) <= 1 else None


def _ingress_status(service: OperatorClient) -> dict[str, Any]:
    """Return the ingress's part of the status, or {} while the ingress does not listen yet."""
    try:
        ingress: dict[str, Any] = service.status()["ingress"]
    except ServiceError:
        return {}
    return ingress


def _builder() -> Callable[[dict[str, Any]], Any]:
    from eldr_serve.app import build_app

    return build_app


def _replicas_up(deployments: dict[str, Any]) -> str:
    """Describe how many replicas of each deployment run. `deployments` are those of `serve.status()`."""
    parts = []
    for name, deployment in sorted(deployments.items()):
        up, total = deployment.replica_states.get("RUNNING", 0), sum(deployment.replica_states.values())
        parts.append(f"{name.partition(':')[0]} {up} of {total}")
    return f"up: {', '.join(parts)}"
