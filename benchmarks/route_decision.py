"""Time of one placement decision in process, the reading of the counts included.

    python -m benchmarks.route_decision

At the shape of Qwen3-30B-A3B (48 MoE layers, 128 experts, top-8). Read p50_us: it is added to every
request between prefill and decode, beside one call to the router actor.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # as in a Ray actor

import numpy as np
import typer

from eldr_serve.artifacts import RoutingTable
from eldr_serve.routing import Loads, PlacementRequest, Policy, WorkerLoad, make_policy
from eldr_serve.signature import SignatureSpec
from tools.cli import run
from tools.results import publish, time_calls

L, E, K_TOP = 48, 128, 8


def route_decision(
    calls: Annotated[int, typer.Option(min=100, help="Decisions timed.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of counts and centroids.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; default in benchmarks/results.")] = None,
) -> None:
    """Time decisions of shortest-queue, locality-band and marginal-cost for K = 4 ... 1024 workers."""
    rng = np.random.default_rng(seed)
    spec = SignatureSpec(rng.uniform(0.1, 2, (L, E)).astype(np.float32), np.arange(L))
    prompts = [
        rng.multinomial(300 * K_TOP, rng.dirichlet(np.full(E, 0.1)), size=L).astype(np.uint32)
        for _ in range(64)
    ]
    rows = []
    for k in (4, 16, 64, 256, 1024):
        centroids = spec.encode(
            np.stack([prompts[i % 64] + rng.integers(0, 3, (L, E), dtype=np.uint32) for i in range(k)])
        )
        table = RoutingTable("m", spec, centroids, np.ones(k, np.int64), [""] * k)
        loads = Loads.of([WorkerLoad(int(n), 0) for n in rng.integers(0, 20, k)])
        for name in ("shortest-queue", "locality-band", "marginal-cost"):
            policy = make_policy(name).with_table(table)
            for i in range(4 * k):
                policy.on_assigned(PlacementRequest(f"held{i}", prompts[i % 64], 300, 64), i % k)
            seconds = time_calls(partial(_decide, policy, prompts, loads, rng), calls=calls)
            p50, p99 = np.percentile(seconds, [50, 99])
            rows.append({"policy": name, "workers": k, "p50_us": 1e6 * p50, "p99_us": 1e6 * p99})
    publish(
        "route_decision", rows, inputs={"L": L, "E": E, "top_k": K_TOP, "calls": calls}, seed=seed,
        notes="one thread, encoding of the counts included", out=out,
    )  # fmt: skip


def _decide(
    policy: Policy, prompts: list[np.ndarray], loads: Loads, rng: np.random.Generator, call: int
) -> None:
    policy.choose(PlacementRequest("r", prompts[call % len(prompts)], 300, 64), loads, rng)


if __name__ == "__main__":
    run(route_decision)
