"""A separate Ray on this machine, which leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
# Read when ray is imported. Ray's workers default to niceness 15; next to a load generator at 0, that
# difference would dominate the measurement.
RAY_ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def unwind_on_sigterm() -> None:
    """Make SIGTERM end this process like an interrupt, so that it stops its children first."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH for processes that import this checkout and `folders`, then its current value."""
    return os.pathsep.join(filter(None, [*map(str, (ROOT, *folders)), os.environ.get("PYTHONPATH")]))


@contextmanager
def local_ray(
    *, http_port: int | None = None, metrics_port: int | None = None, environment: Mapping[str, str] = {}
) -> Iterator[None]:
    """Start Ray with this environment, and Serve if a port is given. Stop both, even when interrupted."""
    before = dict(os.environ)
    os.environ |= {**RAY_ENV, **environment}
    os.environ["PYTHONPATH"] = python_path()
    import ray
    from ray import serve

    for noisy in ("ray", "ray.serve", "vllm", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    options = {} if metrics_port is None else {"_metrics_export_port": metrics_port}
    try:
        ray.init(
            "local",
            num_cpus=8,
            log_to_driver=False,
            logging_level="error",
            include_dashboard=False,
            object_store_memory=300_000_000,
            namespace="serve",
            **options,
        )
        if http_port is not None:
            serve.start(http_options={"host": "127.0.0.1", "port": http_port})
        yield
    finally:
        with ExitStack() as stack:  # in reverse order; each step runs even if one before it raises
            stack.callback(_restore_environment, before)
            stack.callback(ray.shutdown)
            if http_port is not None and ray.is_initialized():
                stack.callback(serve.shutdown)


def _restore_environment(before: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ |= before


def wait_ready(url: str, seconds: float = 60.0) -> None:
    """Wait until every pair of engines of the application is warm. Raise TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(httpx.TransportError):  # it does not listen yet
            status = httpx.get(f"{url}/eldr/status", timeout=30)
            if status.status_code == 200 and status.json()["ingress"]["all_warm"]:
                return
        time.sleep(0.5)
    raise TimeoutError(f"the application was not ready within {seconds:.0f} s")
