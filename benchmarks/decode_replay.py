"""TPOT of every policy on K workers, without contention (counterpart of the paper's Figures 11-13).

    python -m benchmarks.decode_replay --prompts DIR

What it is, and what is simulated in it: see benchmarks/rig/replay.py. `marginal-cost, true decode` is
that policy fed with the decode activations that the request will really have: what a perfect
prediction would gain. `share_of_true_gain` in the notes compares the two.
"""

from __future__ import annotations

from typing import Any

from benchmarks.rig.options import (
    PROMPTS,
    WORK,
    BatchOption,
    CapturedOption,
    GroupsOption,
    IntermediateOption,
    OutOption,
    OutputOption,
    PerWorkerOption,
    PromptsOption,
    SeedOption,
    WorkersOption,
    WorkOption,
)
from benchmarks.rig.replay import Arm, Bench, experts_by_batch, loads_of, rows_of
from loadgen.figures import BASELINES
from offline.cli import run
from offline.plots import bars, lines
from offline.results import publish

TRUE = "marginal-cost, true decode"
ARMS = [
    *(Arm(name, name) for name in BASELINES),
    Arm("domain", "domain"),
    Arm("locality-band", "locality-band"),
    Arm("marginal-cost", "marginal-cost"),
    Arm(TRUE, "marginal-cost", true_decode=True),
]


def decode_replay(
    prompts: PromptsOption = PROMPTS,
    workers: WorkersOption = "8,16",
    groups: GroupsOption = "all,language,task",
    per_worker: PerWorkerOption = 48,
    batch: BatchOption = "16",
    output_tokens: OutputOption = 64,
    intermediate: IntermediateOption = 1024,
    requests: CapturedOption = 2400,
    work: WorkOption = WORK,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Compare policies on K workers, each worker's schedule measured alone on one engine."""
    loads = loads_of(groups, workers, batch, per_worker)
    bench = Bench(
        prompts,
        requests=requests,
        output_tokens=output_tokens,
        intermediate=intermediate,
        work=work,
        seed=seed,
    )
    cases = bench.compare(loads, ARMS)
    rows = [row for case in cases for row in rows_of(case, BASELINES, seed)]
    inputs = bench.inputs | {"per_worker": per_worker, "batch": batch}
    path = publish(
        "decode_replay", rows, inputs=inputs, seed=seed, out=out,
        notes="placed in simulation, steps measured on one real engine, one worker at a time; changes "
        "against the best balancer at that percentile, 95 % intervals by bootstrap over requests; "
        + _share(rows),
    )  # fmt: skip
    bars(rows, "arm", "p50_change_pct", path.with_suffix(".png"), interval=("p50_low_pct", "p50_high_pct"))
    shown = ["round-robin", "shortest-queue", "locality-band", "marginal-cost"]
    steps = [row for case in cases for row in experts_by_batch(case, shown)]
    path = publish(
        "active_experts", steps, inputs=inputs, seed=seed,
        notes="the steps of decode_replay: mean distinct experts of a MoE layer by batch size (Figure 13)",
        out=out and out.with_name(f"{out.stem}_active_experts.json"),
    )  # fmt: skip
    lines(steps, "batch_from", [f"{label}: active_experts" for label in shown], path.with_suffix(".png"))


def _share(rows: list[dict[str, Any]]) -> str:
    """How much of the gain of perfect prediction the prefill signature gives."""
    found = {(r["workload"], r["workers"], r["arm"]): r["p50_change_pct"] for r in rows}
    shares = [
        f"{group} K={k}: {100 * found[group, k, 'marginal-cost'] / gain:.0f} %"
        for (group, k, arm), gain in found.items()
        if arm == TRUE and gain < 0
    ]
    return "gain of prefill signatures as share of that of true decode activations: " + ", ".join(shares)


if __name__ == "__main__":
    run(decode_replay)
