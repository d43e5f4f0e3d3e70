"""The running application over engines that compute nothing, and requests to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from benchmarks.lib.client import Answer
from benchmarks.lib.cluster import local_ray, wait_ready
from benchmarks.lib.fakes.names import APPLICATION, MODEL

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# A stopping replica need not stay until a load balancer has noticed, because only Serve watches the replicas.
NO_DRAINING = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
_WORD = " token"  # an engine's output at each step
T = TypeVar("T")


def run_in_process(work: Callable[..., T], *arguments: Any) -> T:
    """Run work(*arguments) in a new process, since Ray and Serve read their settings at import."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


@contextmanager
def serve_fake(port: int, *, use_ingress_port: bool, **options: Any) -> Iterator[str]:
    """Run `fake_application`, and yield its URL: Serve's `port` or the ingress's, `port` + 1."""
    with local_ray(http_port=port):
        from ray import serve

        from benchmarks.lib.fakes.application import fake_application

        application = fake_application(own_port=port + 1 if use_ingress_port else None, **options)
        serve.run(application, name=APPLICATION, route_prefix="/")
        url = f"http://127.0.0.1:{port + use_ingress_port}"
        wait_ready(url)
        yield url


def request_body(tokens: int, gap_ms: float) -> dict[str, Any]:
    """Return a completion request that a fake engine answers with a token every `gap_ms`."""
    return {"model": MODEL, "prompt": "a prompt " * 20, "max_tokens": tokens, "gap_ms": gap_ms}


def check_text(answer: Answer, tokens: int) -> None:
    """Store an error in the answer unless it has every token exactly once."""
    if answer.error is None and answer.timing.text != _WORD * tokens:
        answer.error = f"{answer.timing.text.count(_WORD)} tokens of {tokens}"
