"""Let Serve scale prefill and decode engines under load, from one of each to three and back.

    python -m benchmarks.serving.scaling

Both kinds of real engines have an `autoscaling_config`, and clients stream one answer after another. A few
clients send requests first, then many clients until there are three engines of each kind, then a few until
there is one engine of each kind again. Each row is such a phase, with the results of its requests and
`after_s`, the seconds until the number of engines was reached. The first phase begins with that number. New
engines start on the serving cores, so a phase's times include that cost. The exit status is 1 if a request
fails, if a greedy text differs from that of the first engines, or if a phase does not get its engines in
time.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.lib import options
from benchmarks.lib.client import (
    Answer,
    allow_open_files,
    count_failures,
    open_session,
    request_completion,
    summarise_answers,
)
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.engines import our_arguments
from benchmarks.lib.prompts import bodies
from eldr_serve.commands.client import OperatorClient, ServiceError
from eldr_serve.commands.run import run
from eldr_serve.errors import ServiceFailedError
from examples.demo_model import WEIGHTS
from loadgen import application
from loadgen.results import publish

BENCHMARKS = {"scaling": "all"}
_KEY = "scaling"
_TIMEOUT_S = 120.0  # slower requests count as failed
_PROMPTS = 8
_STEADY_S = 20.0  # duration of the load after a phase has its engines
_MAX_SCALING_S = 480.0  # time limit of a phase to get its engines; four start on the serving cores
_TARGETS = {"prefill_config": 0.05, "decode_config": 4.0}  # requests in flight per engine; prefills are short
_DELAYS = {"upscale_delay_s": 2, "downscale_delay_s": 10, "look_back_period_s": 5, "metrics_interval_s": 1}


class _Service:
    """The running application, and its clients' results."""

    def __init__(self, client: OperatorClient, work: list[dict[str, Any]]) -> None:
        self._client, self._work = client, work
        self.texts: dict[str, str] = {}  # required text of each prompt
        self.answers: list[Answer] = []
        self.wrong = 0

    def engines(self) -> tuple[int, int]:
        """Return the numbers of ready prefill and decode engines, zeros while an ingress does not answer."""
        try:
            status = self._client.status()
            return len(status["ingress"]["prefill_in_flight"]), len(status.get("workers", ()))
        except ServiceError:
            return 0, 0

    async def ask(self, body: dict[str, Any]) -> None:
        """Send one request over its own connection."""
        async with open_session(_TIMEOUT_S) as http:
            answer = await request_completion(http, self._client.url, body)
        self.answers.append(answer)
        if answer.error is None:
            expected = self.texts.setdefault(body["prompt"], answer.timing.text)
            self.wrong += answer.timing.text != expected

    async def load(self, clients: int, engines: int, timeout_s: float) -> dict[str, Any]:
        """Send load until this many engines of each kind are ready, and a little longer. Return a row."""
        self.answers, self.wrong = [], 0
        start_s, over = time.perf_counter(), asyncio.Event()

        async def user(number: int) -> None:
            rng = random.Random(number)
            while not over.is_set():
                await self.ask(rng.choice(self._work))

        users = [asyncio.create_task(user(number)) for number in range(clients)]
        after_s: float | None = None
        last_engines: tuple[int, int] | None = None
        while after_s is None and time.perf_counter() - start_s < timeout_s:
            await asyncio.sleep(0.5)
            engines_now = await asyncio.to_thread(self.engines)
            if engines_now != last_engines and all(engines_now):
                last_engines = engines_now
                typer.echo(
                    f"{clients} clients, {time.perf_counter() - start_s:.0f} s: {engines_now}", err=True
                )
            if engines_now == (engines, engines):
                after_s = time.perf_counter() - start_s
        await asyncio.sleep(_STEADY_S)
        over.set()
        await asyncio.gather(*users)
        gaps = [max(answer.timing.chunk_gaps_s, default=0.0) for answer in self.answers]
        prefill, decode = await asyncio.to_thread(self.engines)
        return (
            {"clients": clients, "prefill_engines": prefill, "decode_engines": decode, "after_s": after_s}
            | summarise_answers(self.answers)
            | {"wrong_texts": self.wrong, "longest_gap_s": max(gaps), "errors": count_failures(self.answers)}
        )


async def _run_phases(
    service: _Service, work: list[dict[str, Any]], few_clients: int, many_clients: int, max_engines: int
) -> list[dict[str, Any]]:
    """Send load of few, many and again few clients. Return a row for each phase.

    Raises:
        ServiceFailedError: a request failed whose text is required of later engines.
    """
    for body in work:
        await service.ask(body)
    if failures := count_failures(service.answers):
        raise ServiceFailedError(f"the reference requests failed: {failures}")
    return [
        await service.load(clients, engines, _MAX_SCALING_S)
        for clients, engines in ((few_clients, 1), (many_clients, max_engines), (few_clients, 1))
    ]


def scaling(
    few: Annotated[int, typer.Option(min=1, help="Clients for which one engine of each kind is enough.")] = 1,
    many: Annotated[int, typer.Option(min=2, help="Clients that need all engines.")] = 16,
    engines: Annotated[int, typer.Option(min=2, help="Maximum engines of each kind.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 96,
    prompts: options.Prompts = options.PROMPTS,
    max_prompt_tokens: options.Longest = 512,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    port: Annotated[int, typer.Option(help="HTTP port; Serve's proxy uses the next.")] = 8370,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Scale engines up and down under load.

    Exit with status 1 if a request fails, its text differs, or a phase does not get its engines in time.
    """
    unwind_on_sigterm()
    allow_open_files(8192)
    application.check_port(port)
    os.environ |= {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    arguments = our_arguments(deployment, WEIGHTS)
    for role, target in _TARGETS.items():
        scaled = arguments[role]["deployment_config"]
        scaled.pop("num_replicas", None)
        scaled["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": engines,
            "target_ongoing_requests": target,
        } | _DELAYS
    work = bodies(
        prompts, count=_PROMPTS, max_tokens=max_tokens, max_prompt_tokens=max_prompt_tokens, seed=seed
    )
    try:
        client, _ = application.start(
            arguments, port, _KEY, dashboard=False, log=lambda line: typer.echo(line, err=True)
        )
        rows = asyncio.run(_run_phases(_Service(client, work), work, few, many, engines))
    finally:
        application.stop()
    publish(
        "scaling",
        rows,
        inputs={
            "engines": engines,
            "max_tokens": max_tokens,
            "prompts": prompts.name,
            "max_prompt_tokens": max_prompt_tokens,
            "deployment": deployment.stem,
            "target_ongoing_requests": _TARGETS,
            "delays": _DELAYS,
        },
        seed=seed,
        out=out,
        notes="Closed loop, greedy. The client and starting engines share the cores with serving engines.",
    )
    if any(row["failures"] or row["wrong_texts"] or row["after_s"] is None for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(scaling)
