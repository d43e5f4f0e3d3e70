"""Compare admission by predicted latency with a limit on requests in flight, under more load than fits.

    python -m benchmarks.serving.objectives

The objective is a multiple of an idle service's latencies. The load that fits is the highest number of
requests in flight of which 95 % meet the objective. Then requests arrive at 1.5 times the rate of that load,
in rounds of two applications in turn. Each has engines of its own, which are idle during the other's rounds.
Prefill engines cache no prefixes, since prompts repeat.

There are two kinds of admission. With `prediction`, requests name their objective in headers. With `count`,
requests name none, and the ingress admits at most as many at once as fit (`ingress.max_in_flight`).
Prediction should refuse within 0.2 s, serve 95 % of the admitted requests within their objective, and give
more goodput (requests/s within the objective) than the count.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.client import (
    Answer,
    allow_open_files,
    closed_loop,
    count_failures,
    open_session,
    request_completion,
    summarise_answers,
)
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.engines import change_nixl_ports, our_arguments
from benchmarks.lib.live import serve_application, start_application, stop_application
from benchmarks.lib.prompts import bodies
from eldr_serve.commands.run import run
from eldr_serve.objective import TPOT_HEADER, TTFT_HEADER
from examples.demo_model import WEIGHTS
from loadgen.arrivals import poisson
from loadgen.results import publish
from loadgen.statistics import LatencyObjective

BENCHMARKS = {"objectives": "all"}

COUNT, PREDICTION = "count", "prediction"
_NEEDED_SHARE = 0.95  # share of requests within their objective
_TTFT_SLACK, _TPOT_SLACK = 5, 3  # objectives over the median times of an idle service
_REQUESTS_PER_CLIENT = 10  # requests of each client in a closed loop
_OVERLOAD = 1.5  # arrivals over the rate that fits
_TIMEOUT_S = 120.0
_REFUSED = ("HTTP 429", "HTTP 503")


@dataclass(frozen=True)
class _Load:
    """A number of requests in flight, and how the service answered them."""

    in_flight: int
    per_s: float  # answers
    share: float  # share of requests within the objective


def is_within(answer: Answer, objective: LatencyObjective) -> bool:
    """Return whether an answer came within the objective."""
    timing = answer.timing
    failed = {} if answer.error is None else {"error": answer.error}
    return objective.is_met_by({"ttft_s": timing.ttft_s, "tpot_s": timing.tpot_s} | failed)


def is_refused(answer: Answer) -> bool:
    """Return whether a request was refused."""
    return answer.error is not None and answer.error.startswith(_REFUSED)


def largest_fitting_load(loads: Iterable[_Load]) -> _Load:
    """Return the largest load that fits, which means that 95 % of its requests meet the objective.

    If no load fits, return the smallest one.
    """
    ordered = sorted(loads, key=lambda load: load.in_flight)
    return next((load for load in reversed(ordered) if load.share >= _NEEDED_SHARE), ordered[0])


async def _send_closed_loop(
    url: str, requests: list[dict[str, Any]], in_flight: int, headers: dict[str, str] | None = None
) -> list[Answer]:
    async with open_session(_TIMEOUT_S) as http:
        return await closed_loop(
            lambda number: request_completion(http, url, requests[number % len(requests)], headers=headers),
            requests=_REQUESTS_PER_CLIENT * in_flight,
            in_flight=in_flight,
        )


def _measure_load(
    url: str, requests: list[dict[str, Any]], in_flight: int, objective: LatencyObjective
) -> _Load:
    """Send a closed loop with this number of requests in flight and return its result."""
    answers = asyncio.run(_send_closed_loop(url, requests, in_flight))
    share = sum(is_within(answer, objective) for answer in answers) / len(answers)
    return _Load(in_flight, summarise_answers(answers)["requests_per_s"], share)


async def send_arrivals(
    url: str,
    requests: Iterable[dict[str, Any]],
    headers: dict[str, str] | None,
    *,
    per_s: float,
    seconds: float,
    seed: int,
) -> list[Answer]:
    """Send requests at random times for `seconds`; return all answers.

    Args:
        requests: bodies of the requests, at least as many as arrive.
    """
    tasks: list[asyncio.Task[Answer]] = []
    start_s = time.perf_counter()
    async with open_session(_TIMEOUT_S) as http:
        due_times = itertools.takewhile(lambda due_s: due_s < seconds, poisson(per_s, seed))
        for due_s, body in zip(due_times, requests, strict=False):
            await asyncio.sleep(start_s + due_s - time.perf_counter())
            tasks.append(asyncio.create_task(request_completion(http, url, body, headers=headers)))
        return list(await asyncio.gather(*tasks))


def send_in_turn(
    services: dict[str, tuple[str, dict[str, str] | None]],
    requests: list[dict[str, Any]],
    *,
    per_s: float,
    rounds: int,
    seconds: float,
    seed: int,
) -> dict[str, list[Answer]]:
    """Send the same arrivals to each service in each round; return the answers of each.

    Args:
        services: URL and headers, by kind of admission.
        seconds: duration of the arrivals of a round, s.
    """
    bodies_of = {admission: itertools.cycle(requests) for admission in services}
    answers: dict[str, list[Answer]] = {admission: [] for admission in services}
    for number in range(rounds):
        for admission in sorted(services, reverse=bool(number % 2)):
            url, headers = services[admission]
            arrivals = send_arrivals(
                url, bodies_of[admission], headers, per_s=per_s, seconds=seconds, seed=seed + number
            )
            answers[admission] += asyncio.run(arrivals)
    return answers


def row(admission: str, answers: list[Answer], objective: LatencyObjective, seconds: float) -> dict[str, Any]:
    """Return the figures of one kind of admission.

    Args:
        seconds: duration of the arrivals in seconds.
    """
    waits_s = [answer.ended_at_s - answer.started_at_s for answer in answers if is_refused(answer)]
    admitted = [answer for answer in answers if not is_refused(answer)]
    good = sum(is_within(answer, objective) for answer in admitted)
    figures = {
        "admission": admission,
        "requests": len(answers),
        "refused_pct": 100 * len(waits_s) / max(len(answers), 1),
        "refusal_p50_s": float(np.median(waits_s)) if waits_s else 0.0,
        "slowest_refusal_s": max(waits_s, default=0.0),
        "within_pct": 100 * good / max(len(admitted), 1),
        "goodput_per_s": good / seconds,
        "answers_per_s": sum(answer.error is None for answer in admitted) / seconds,
    }
    for name in ("ttft", "tpot"):
        values = [getattr(answer.timing, f"{name}_s") for answer in admitted if answer.error is None]
        times_ms = [1000 * value for value in values if value is not None]
        figures[f"{name}_p95_ms"] = float(np.percentile(times_ms, 95)) if times_ms else float("nan")
    return figures | {"failures": sum(answer.error is not None for answer in admitted)}


def objectives(
    in_flight: Annotated[
        str, typer.Option(help="Loads to try, requests in flight, comma-separated.")
    ] = "2,3,4,6,8,12,16,24",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind of admission.")] = 4,
    seconds: Annotated[float, typer.Option(min=5, help="Duration of a round's arrivals, s.")] = 60,
    max_tokens: options.Output = 48,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = WEIGHTS,
    prompts: options.Prompts = options.PROMPTS,
    port: options.Ports = 8370,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare admission by predicted latency and by requests in flight, under more load than fits."""
    unwind_on_sigterm()
    allow_open_files(8192)
    sizes = options.numbers("--in-flight", in_flight)
    requests = bodies(prompts, count=2000, max_tokens=max_tokens, seed=seed)
    arguments = our_arguments(deployment, model)
    arguments["prefill_config"]["engine_kwargs"] |= {"enable_prefix_caching": False}
    with serve_application(arguments, port=port) as client:
        # Idle engines take CPU time too, so the load that fits is measured beside the other application.
        other: dict[str, Any] = {"arguments": change_nixl_ports(arguments), "port": port + 2, "name": COUNT}
        start_application(**other)
        asyncio.run(_send_closed_loop(client.url, requests, sizes[-1]))  # this warms up
        idle = summarise_answers(asyncio.run(_send_closed_loop(client.url, requests, 1)))
        objective = LatencyObjective(_TTFT_SLACK * idle["ttft_p50_ms"], _TPOT_SLACK * idle["tpot_p50_ms"])
        fitting = largest_fitting_load(_measure_load(client.url, requests, size, objective) for size in sizes)
        stop_application(COUNT)
        by_count = start_application(**other, max_in_flight=fitting.in_flight)
        asyncio.run(_send_closed_loop(by_count.url, requests, fitting.in_flight))  # this warms up
        headers = {TTFT_HEADER: f"{objective.ttft_ms:.3f}", TPOT_HEADER: f"{objective.tpot_ms:.3f}"}
        services = {COUNT: (by_count.url, None), PREDICTION: (client.url, headers)}
        # The first margins come from these answers.
        asyncio.run(_send_closed_loop(client.url, requests, fitting.in_flight, headers))
        answers = send_in_turn(
            services, requests, per_s=_OVERLOAD * fitting.per_s, rounds=rounds, seconds=seconds, seed=seed
        )
        predictions = client.status()["ingress"]["objectives"]
    publish(
        "objectives",
        [row(admission, part, objective, rounds * seconds) for admission, part in answers.items()],
        seed=seed,
        out=out,
        inputs={
            "objective_ms": {"ttft": objective.ttft_ms, "tpot": objective.tpot_ms},
            "fits": {"in_flight": fitting.in_flight, "requests_per_s": fitting.per_s},
            "overload": _OVERLOAD,
            "rounds": rounds,
            "seconds": seconds,
            "max_tokens": max_tokens,
            "deployment": deployment.stem,
            "predictions": predictions,
            "errors": {admission: count_failures(part) for admission, part in answers.items()},
        },
        notes="Both applications get the same arrivals, in turn, and each has its own engines. Refused "
        "requests are not sent again. The engines, both applications and the client share the cores.",
    )


if __name__ == "__main__":
    run(objectives)
