"""The systems in the comparison of whole replicas: eldr_serve, and vllm-router over plain servers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import typer

from benchmarks.lib.client import Send, completion_sender
from benchmarks.lib.engines import vllm_router, vllm_servers
from benchmarks.lib.live import serve_shortest_queue_without_pool
from benchmarks.lib.prometheus import total
from benchmarks.lib.whole.report import SERVER_TIMES, STEPS
from eldr_serve.commands.client import OperatorClient
from loadgen.figures import BASELINES

AFFINITY = "benchmarks.papers.prefix_policies:LongestPrefix"
POLICIES = {name: name for name in (*BASELINES, "marginal-cost")} | {"prefix-affinity": AFFINITY}
_SETTLE_S = 1.0  # time for plain servers to drop cancelled requests
# A function that selects a policy, and one that reads the totals so far.
SystemControls = tuple[Callable[[str], Send], Callable[[], dict[str, float]]]


@contextmanager
def _serve_eldr(arguments: dict[str, Any], predictor: bytes, port: int) -> Iterator[SystemControls]:
    """Run eldr_serve's application. Selecting a policy resets what the policy has learnt."""
    with serve_shortest_queue_without_pool(arguments, port=port) as client:
        client.swap_predictor(predictor)

        def select_policy(name: str) -> Send:
            client.wait_idle()
            client.set_policy("random")  # setting the same policy again would keep its state
            client.set_policy(POLICIES[name])
            return completion_sender(client.url)

        yield select_policy, partial(_step_totals, client)
        typer.echo(f"predictor: {client.status()['predictor']}")


@contextmanager
def _serve_behind_vllm_router(
    arguments: dict[str, Any], venv: Path, names: Iterable[str], port: int
) -> Iterator[SystemControls]:
    """Run plain servers behind a vllm-router for each of the policies."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(vllm_servers(arguments, port=port, logs=logs))["decode"]
        servers = ["--worker-urls", *urls]
        fronts = {
            policy: stack.enter_context(vllm_router(venv, policy, number, servers, port=port, logs=logs))
            for number, policy in enumerate(names)
        }

        def select_policy(name: str) -> Send:
            time.sleep(_SETTLE_S)
            return completion_sender(fronts[name])

        yield select_policy, partial(_server_times, urls)


def _server_times(urls: Sequence[str]) -> dict[str, float]:
    """Return the plain servers' sums of seconds so far on vLLM's own clock, and their requests."""
    pages = "\n".join(httpx.get(f"{url}/metrics", timeout=30).text for url in urls)
    return {
        f"{name}_{part}": total(pages, f"vllm:{metric}_seconds_{part}")
        for name, metric in SERVER_TIMES.items()
        for part in ("sum", "count")
    }


def _step_totals(service: OperatorClient) -> dict[str, float]:
    """Return the sums of eldr_serve's engines over decode steps so far, and the number of steps."""
    service.wait_idle()
    totals = service.wait_for_final_totals(at_rest=True) or {}
    return {key: float(totals[key]) for key in ("steps", *STEPS.values()) if key in totals}


@dataclass(frozen=True)
class Engines:
    """Settings to start both sets of engines."""

    arguments: dict[str, Any]
    predictor: bytes
    venv: Path | None
    port: int

    def start(self, side: str, names: Iterable[str]) -> AbstractContextManager[SystemControls]:
        """Start the engines and the routers of one side, for these policies."""
        if side == "eldr":
            return _serve_eldr(self.arguments, self.predictor, self.port)
        assert self.venv is not None
        return _serve_behind_vllm_router(self.arguments, self.venv, names, self.port + 20)
