"""Time one placement decision in process, including reading the counts.

    python -m benchmarks.serving.route_decision

The shape is Qwen3-30B-A3B's (48 MoE layers, 128 experts, top-8). Every request waits p50_us between prefill
and decode, in addition to one call to the router actor.
"""

from __future__ import annotations

import os
from typing import Annotated

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a Ray actor has the same settings

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.synthetic import EXPERTS, LAYERS, TOP_K, prompt_counts, random_spec, table_near
from eldr_serve.commands.run import run
from eldr_serve.scheduling import Loads, PlacementRequest, make_policy
from loadgen.results import p50_p99_us, publish, time_calls

BENCHMARKS = {"route_decision": "default"}


def route_decision(
    calls: Annotated[int, typer.Option(min=100, help="Timed decisions.")] = 5000,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time decisions of shortest-queue, locality-band and marginal-cost for K = 4 ... 1024 workers."""
    rng = np.random.default_rng(seed)
    spec, prompts = random_spec(rng), prompt_counts(64, rng)
    rows = []
    for k in (4, 16, 64, 256, 1024):
        table = table_near(prompts, k, rng, spec=spec)
        loads = Loads.from_counts(rng.integers(0, 20, k))
        for name in ("shortest-queue", "locality-band", "marginal-cost"):
            policy = make_policy(name).set_table(table)
            for i in range(4 * k):
                request = PlacementRequest(f"held{i}", 300, 64, expert_counts=prompts[i % 64])
                policy.on_assigned(request, i % k)
            seconds = time_calls(
                lambda call: policy.select(  # noqa: B023
                    PlacementRequest("r", 300, 64, expert_counts=prompts[call % 64]),
                    loads,  # noqa: B023
                    rng,
                ),
                calls=calls,
            )
            rows.append({"policy": name, "workers": k, **p50_p99_us(seconds)})
    publish(
        "route_decision",
        rows,
        inputs={"L": LAYERS, "E": EXPERTS, "top_k": TOP_K, "calls": calls},
        seed=seed,
        notes="One thread. The times include the encoding of the counts.",
        out=out,
    )


if __name__ == "__main__":
    run(route_decision)
