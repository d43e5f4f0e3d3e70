"""Time the hand-over in parts: from the end of the prefill call to the first decode chunk.

    python -m benchmarks.serving.handover
    python -m benchmarks.serving.handover --rounds 1 --record rounds.jsonl

The engines and the ingress are real. They serve one request in flight (idle) or several (load):

    place       router: score, one call over its channel
    engine      decode replica: from the call's arrival to its first chunk; includes
      admit       until the engine core has the request
      wait        until its first step is scheduled; includes `pull`, NIXL's time to read the KV blocks
      step        the first decode step
    transport   the rest: the call over the channel, and the first chunk's return

The ingress times the hand-over and `place` (/eldr/status). A timed subclass of DecodeServer times the
engine's part. `before_step` has everything except the pull and the step. It includes the return to the
client, which cannot be separated from the way to the engine. It should be below 8 ms idle, and below 5 % of
TTFT at load.

A round starts new engines, with Ray as `make demo` starts it. Rows are medians over rounds, with 95 %
intervals. `--record FILE` keeps each round, so that rounds can be spread over several runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.client import Answer, allow_open_files, closed_loop, open_session, request_completion
from benchmarks.lib.cluster import local_ray, unwind_on_sigterm, wait_ready
from benchmarks.lib.engines import our_arguments
from benchmarks.lib.prompts import MODEL, bodies
from benchmarks.lib.rounds import medians
from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.config.ray_settings import QUIET
from eldr_serve.errors import UserInputError
from eldr_serve.pipeline.context.stage_latencies import WINDOW
from loadgen.journal import Journal
from loadgen.results import publish

BENCHMARKS = {"handover": "all"}
_KEY = "handover"
_WARM_UP = 32  # requests that no figure includes
_WITH_INTERVAL = ("ttft_mean_ms", "handover_mean_ms", "before_step_mean_ms", "before_step_share_of_ttft_pct")


async def _load(url: str, work: Iterator[dict[str, Any]], requests: int, in_flight: int) -> list[Answer]:
    async with open_session() as http:
        return await closed_loop(
            lambda n: request_completion(http, url, next(work)), requests=requests, in_flight=in_flight
        )


def _row(in_flight: int, stages: dict[str, dict[str, float]], answers: list[Answer]) -> dict[str, Any]:
    good = [1000 * a.timing.chunk_times_s[0] for a in answers if a.error is None]
    ttft = float(np.mean(good))
    before_step = stages["handover"]["mean_ms"] - stages["step"]["mean_ms"] - stages["pull"]["mean_ms"]
    row: dict[str, Any] = {"in_flight": in_flight, "failures": len(answers) - len(good), "ttft_mean_ms": ttft}
    for name in ("prefill", "handover", "place", "engine", "admit", "wait", "pull", "step"):
        row |= {f"{name}_{q}_ms": stages[name][f"{q}_ms"] for q in ("mean", "p50", "p99")}
    return row | {
        "transport_mean_ms": stages["first_token"]["mean_ms"] - stages["engine"]["mean_ms"],
        "before_step_mean_ms": before_step,
        "before_step_share_of_ttft_pct": 100 * before_step / ttft,
    }


def _round(
    loads: list[int], requests: int, work: Iterator[dict[str, Any]], arguments: dict[str, Any], port: int
) -> list[dict[str, Any]]:
    """Start engines and return one row per load."""
    rows = []
    with local_ray(http_port=port + 1, environment=QUIET):
        from ray import serve

        from benchmarks.lib.replay.timed_decode import TimedDecodeServer
        from eldr_serve.app import build_app

        with patch("eldr_serve.app.LLMDecodeServer", TimedDecodeServer):
            application = build_app(arguments | {"ingress": {"port": port}, "admin_key": _KEY})
        serve.run(application, name="eldr", route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, 180)
        asyncio.run(_load(url, work, _WARM_UP, 8))
        decode = serve.get_deployment_handle(f"Decode:{MODEL}", "eldr")
        for count in loads:
            answers = asyncio.run(_load(url, work, requests, count))
            stages = OperatorClient(url, _KEY).status()["ingress"]["stages"]
            stages |= decode.stages.remote().result()
            rows.append(_row(count, stages, answers))
    return rows


def handover(
    in_flight: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1,16",
    rounds: Annotated[int, typer.Option(min=0, help="Starts of the engines; 0: only print --record.")] = 3,
    requests: Annotated[int, typer.Option(min=WINDOW, help="Requests per row and round.")] = WINDOW,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 8,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("examples/demo_model/weights"),
    prompts: options.Prompts = options.PROMPTS,
    max_prompt_tokens: options.Longest = 1900,
    record: options.Record = None,
    port: options.Ports = 8320,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time the parts of the hand-over on real engines, idle and under load."""
    unwind_on_sigterm()
    allow_open_files(8192)
    loads = options.numbers("--in-flight", in_flight)
    work = bodies(
        prompts,
        count=_WARM_UP + len(loads) * requests,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
    )
    arguments = our_arguments(deployment, model, decode_replicas=1)
    inputs = {
        "in_flight": loads,
        "requests": requests,
        "max_tokens": max_tokens,
        "prompts": prompts.name,
        "max_prompt_tokens": max_prompt_tokens,
        "deployment": deployment.stem,
        "window": WINDOW,
    }
    journal = Journal(record, inputs) if record else None
    by_round: list[list[dict[str, Any]]] = list(journal.entries.values()) if journal else []
    for _ in range(rounds):
        # No prompt repeats within a round, since its blocks would be cached.
        by_round.append(_round(loads, requests, iter(work), arguments, port))
        if journal:
            journal.put(str(len(by_round)), by_round[-1])
    if not by_round:
        raise UserInputError(
            "there is no round to report: give --rounds 1 or more, or a --record with rounds"
        )
    rows = medians(
        [*chain(*by_round)], keys=("in_flight",), with_interval=_WITH_INTERVAL, summed=("failures",)
    )
    publish(
        "handover",
        rows,
        inputs=inputs | {"each": by_round},
        seed=seed,
        out=out,
        notes=f"One prefill and one decode engine. Times are those of a round's newest {WINDOW} requests. "
        "All engines, Ray and the client share the cores.",
    )


if __name__ == "__main__":
    run(handover)
