"""The systems of the comparison of whole replicas: our application, and vllm-router before plain servers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import typer

from benchmarks.lib.client import Answer, complete
from benchmarks.lib.engines import process, vllm_servers, wait_http
from benchmarks.lib.live import KEY, serving
from benchmarks.lib.prometheus import total
from benchmarks.lib.whole_report import SERVER_TIMES, STEPS
from eldr_serve.client import Client
from loadgen.figures import BASELINES

AFFINITY = "benchmarks.papers.prefix_policies:LongestPrefix"
POLICIES = {name: name for name in (*BASELINES, "marginal-cost")} | {"prefix-affinity": AFFINITY}
_SETTLE_S = 1.0  # for plain servers to drop what was cut off
Send = Callable[[Any, dict[str, Any]], Awaitable[Answer]]
Opened = tuple[Callable[[str], Send], Callable[[], dict[str, float]]]


@contextmanager
def _ours(arguments: dict[str, Any], predictor: bytes, port: int) -> Iterator[Opened]:
    """Run our application; its sender sets the policy, without what the policy has learnt."""
    url = f"http://127.0.0.1:{port}"
    with serving(arguments, port=port):
        client = Client(url, KEY)
        client.swap_predictor(predictor)

        def chosen(name: str) -> Send:
            client.wait_idle()
            client.set_policy("random")  # one that is set again goes on with what it knows
            client.set_policy(POLICIES[name])
            return partial(_complete, url)

        yield chosen, partial(_step_totals, client)
        typer.echo(f"predictor: {client.status()['predictor']}")


@contextmanager
def _theirs(arguments: dict[str, Any], venv: Path, names: Iterable[str], port: int) -> Iterator[Opened]:
    """Run plain servers behind a vllm-router for each of the policies."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(vllm_servers(arguments, port=port, logs=logs))["decode"]
        fronts: dict[str, str] = {}
        for number, policy in enumerate(names):
            fronts[policy] = f"http://127.0.0.1:{port + 60 + number}"
            command = [
                str(venv / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port + 60 + number),
                "--policy", policy, "--prometheus-port", str(port + 80 + number), "--worker-urls", *urls,
            ]  # fmt: skip
            log = logs / f"vllm_router_{number}.log"
            router = stack.enter_context(process(command, env={}, log=log))
            wait_http(f"{fronts[policy]}/health", router, log, 60)

        def chosen(name: str) -> Send:
            time.sleep(_SETTLE_S)
            return partial(_complete, fronts[name])

        yield chosen, partial(_server_times, urls)


def _server_times(urls: Sequence[str]) -> dict[str, float]:
    """Return the plain servers' sums so far by vLLM's own clock, s, and their requests."""
    pages = "\n".join(httpx.get(f"{url}/metrics", timeout=30).text for url in urls)
    return {
        f"{ours}_{part}": total(pages, f"vllm:{theirs}_seconds_{part}")
        for ours, theirs in SERVER_TIMES.items()
        for part in ("sum", "count")
    }


def _step_totals(service: Client) -> dict[str, float]:
    """Return our engines' sums over decode steps so far, and the number of steps."""
    service.wait_idle()
    found = service.settled_totals(at_rest=True) or {}
    return {key: float(found[key]) for key in ("steps", *STEPS.values()) if key in found}


def _complete(url: str, http: Any, body: dict[str, Any]) -> Awaitable[Answer]:
    return complete(http, url, body)


@dataclass(frozen=True)
class Engines:
    """How both sets of engines are started."""

    arguments: dict[str, Any]
    predictor: bytes
    venv: Path | None
    port: int

    def start(self, side: str, names: Iterable[str]) -> AbstractContextManager[Opened]:
        """Start a side's engines and what serves them, for these policies."""
        if side == "eldr":
            return _ours(self.arguments, self.predictor, self.port)
        assert self.venv is not None
        return _theirs(self.arguments, self.venv, names, self.port + 20)
