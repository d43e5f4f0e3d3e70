"""Time one dispatch of BalanceRoute in process, including the projection of the loads.

    python -m benchmarks.papers.balance_dispatch

`p50_us` is the time that the router adds when a request arrives at or leaves a worker, for any number of
placements. In the case `one slot` a worker has just released a request. In `scarce` each worker has one free
slot, so only stage 2 runs. In `abundant` each worker has two, so both stages run. `progress` is not a
dispatch, but one token report from every running request, with the predictions that fall due.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a Ray actor has the same settings

import numpy as np
import typer

from benchmarks.lib import options
from eldr_serve.commands.run import run
from eldr_serve.scheduling import Loads, PlacementRequest, QueuedPolicy, make_policy
from loadgen.results import p50_p99_us, publish, time_calls

BENCHMARKS = {"balance_dispatch": "default"}
OUTPUT_TOKENS = 250  # mean of the geometric distribution


def balance_dispatch(
    calls: Annotated[int, typer.Option(min=20, help="Timed dispatches per row.")] = 1000,
    slots: Annotated[int, typer.Option(min=1, help="Concurrent requests of a worker.")] = 64,
    pool: Annotated[int, typer.Option(min=1, help="Requests that wait for a worker.")] = 64,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time dispatches of balance-route and balance-route-horizon for 8 ... 144 nearly full workers."""
    rng = np.random.default_rng(seed)
    waiting = [
        PlacementRequest(f"waiting{n}", int(tokens), 4096)
        for n, tokens in enumerate(rng.lognormal(6.5, 1, pool))
    ]
    rows: list[dict[str, Any]] = []
    for workers in (8, 16, 32, 144):
        for name in ("balance-route", "balance-route-horizon"):
            policy = make_policy(name, slots=slots)
            assert isinstance(policy, QueuedPolicy)
            ages = _fill(policy, workers, slots - 1, rng)
            tokens = rng.integers(50_000, 90_000, workers)
            free = {"one slot": (np.arange(workers) == 0).astype(int), "scarce": 1, "abundant": 2}
            states = {
                case: Loads(slots - np.broadcast_to(n, workers), tokens, np.ones(workers, bool))
                for case, n in free.items()
            }
            timed = {
                case: time_calls(lambda _: policy.dispatch(waiting, state, rng), calls=calls)  # noqa: B023
                for case, state in states.items()
            }
            timed["progress"] = time_calls(
                lambda step: policy.on_progress({name: age + step for name, age in ages.items()}),  # noqa: B023
                calls=min(calls, 200),
            )
            rows += [
                {"policy": name, "workers": workers, "case": case, **p50_p99_us(seconds)}
                for case, seconds in timed.items()
            ]
    publish(
        "balance_dispatch",
        rows,
        inputs={"slots": slots, "pool": pool, "calls": calls},
        seed=seed,
        notes="One thread. A progress report covers workers x (slots - 1) requests.",
        out=out,
    )


def _fill(policy: QueuedPolicy, workers: int, each: int, rng: np.random.Generator) -> dict[str, int]:
    """Feed past and running requests to the policy, and return the ages of the running ones."""
    for n, tokens in enumerate(rng.geometric(1 / OUTPUT_TOKENS, 1000).tolist()):
        policy.on_assigned(PlacementRequest(f"ended{n}", 500, 4096), 0)
        policy.on_progress({f"ended{n}": tokens})
        policy.on_finished(f"ended{n}")
    ages = {f"held{n}": int(age) for n, age in enumerate(rng.integers(0, OUTPUT_TOKENS, workers * each))}
    for n, request in enumerate(ages):
        policy.on_assigned(PlacementRequest(request, int(rng.lognormal(6.5, 1)), 4096), n % workers)
    policy.on_progress(ages)
    return ages


if __name__ == "__main__":
    run(balance_dispatch)
