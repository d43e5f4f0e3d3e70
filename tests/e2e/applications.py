"""Further applications on the suite's cluster beside the demo, one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.cluster import wait_ready
from benchmarks.lib.engines import change_nixl_ports, engine_roles, our_arguments
from benchmarks.lib.ports import free_port
from examples.demo_model import WEIGHTS
from tests.e2e.service import ADMIN_KEY, ROOT, STOP_WAIT_S, Service

_CACHE_BYTES = 2**28  # KV cache per engine, since several applications share the memory


def arguments_of(
    file: str, model: Path = Path(WEIGHTS), *, stop_wait_s: float = STOP_WAIT_S
) -> dict[str, Any]:
    """Return the arguments in a deployment file, for engines that run beside the demo's.

    Args:
        stop_wait_s: wait of a replica that is to stop, before it looks for open requests.
    """
    arguments = our_arguments(ROOT / "deployments" / file, model)
    beside_the_demo(arguments)
    deployments = [arguments[role]["deployment_config"] for role in engine_roles(arguments)]
    for options in (*deployments, arguments["ingress_deployment_config"]):
        options["graceful_shutdown_wait_loop_s"] = stop_wait_s
    return arguments | {"ingress": {"port": free_port()}, "admin_key": ADMIN_KEY}


def beside_the_demo(arguments: dict[str, Any]) -> None:
    """Give the engines of an application small KV caches and ports for NIXL that the demo does not use."""
    arguments.update(change_nixl_ports(arguments))
    for role in engine_roles(arguments):
        config = arguments[role]
        environment = config["runtime_env"]["env_vars"]
        config["runtime_env"] = {
            "env_vars": {k: v for k, v in environment.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
        }
        config["engine_kwargs"] = config["engine_kwargs"] | {"kv_cache_memory_bytes": _CACHE_BYTES}


def deploy(name: str, arguments: dict[str, Any], *, wait: bool = True) -> None:
    """Deploy or redeploy an application. If `wait` is false, return before its replicas run."""
    from ray import serve

    from eldr_serve.app import build_app

    target = serve.RunTarget(build_app(arguments | {"name": name}), name=name, route_prefix=f"/{name}")
    serve.run_many([target], wait_for_applications_running=wait)


@contextmanager
def running(name: str, arguments: dict[str, Any]) -> Iterator[Service]:
    """Deploy an application, yield it when its engines are warm, and delete it at the end."""
    from ray import serve

    try:
        deploy(name, arguments)
        service = Service(f"http://127.0.0.1:{arguments['ingress']['port']}")
        wait_ready(service.url, 200)
        yield service
    finally:
        serve.delete(name)
