"""TPOT of every policy on K workers, without contention (counterpart of the paper's Figures 11-13).

    python -m benchmarks.decode_replay --prompts DIR

What it is, and what is simulated in it: see benchmarks/harness/replay.py. `marginal-cost, true decode` is
that policy fed with the decode activations that the request will really have: what a perfect
prediction would gain. `share_of_true_gain` in the notes compares the two. `affinity 0` weighs only the
requests that are there.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.replay import Arm, experts_by_batch
from benchmarks.harness.replay_command import Replayed, against, replay_command
from loadgen.figures import BASELINES
from tools.cli import run
from tools.plots import lines
from tools.results import publish

TRUE = "marginal-cost, true decode"
ARMS = [
    *(Arm(name, name) for name in BASELINES),
    Arm("domain", "domain"),
    Arm("locality-band", "locality-band"),
    Arm("marginal-cost", "marginal-cost"),
    Arm("marginal-cost, affinity 0", "marginal-cost", {"affinity": 0.0}),
    Arm(TRUE, "marginal-cost", true_decode=True),
]


def _share(rows: list[dict[str, Any]]) -> str:
    """How much of the gain of perfect prediction the prefill signature gives."""
    found = {(r["workload"], r["workers"], r["arm"]): r["p50_change_pct"] for r in rows}
    shares = [
        f"{group} K={k}: {100 * found[group, k, 'marginal-cost'] / gain:.0f} %"
        for (group, k, arm), gain in found.items()
        if arm == TRUE and gain < 0
    ]
    return "gain of prefill signatures as share of that of true decode activations: " + ", ".join(shares)


def report(run: Replayed) -> None:
    """The policies against the load balancers, and active experts by batch size (Figure 13)."""
    against(BASELINES, _share)(run)
    shown = ["round-robin", "shortest-queue", "locality-band", "marginal-cost"]
    steps = [row for case in run.cases for row in experts_by_batch(case, shown)]
    path = publish(
        "active_experts", steps, inputs=run.inputs, seed=run.seed,
        notes="the steps of decode_replay: mean distinct experts of a MoE layer by batch size (Figure 13)",
        out=run.out and run.out.with_name(f"{run.out.stem}_active_experts.json"),
    )  # fmt: skip
    lines(steps, "batch_from", [f"{label}: active_experts" for label in shown], path.with_suffix(".png"))


decode_replay = replay_command(
    "decode_replay",
    ARMS,
    report,
    default_workers="8,16",
    default_groups="all,language,task",
    default_per_worker=48,
    default_intermediate=1536,  # as live has it
)

if __name__ == "__main__":
    run(decode_replay)
