"""Compare TPOT on K workers without contention: replay each worker's schedule alone on a real engine.

    python -m benchmarks.engine.replays NAME --prompts DIR

benchmarks/lib/replay/schedule.py describes what is measured and what is simulated. There is no prefill, so
`first_token` is the time from the hand-over to the end of the first decode step. `marginal-cost, true decode`
gets the decode activations that the request will really have, which shows the gain of a perfect prediction.
"""

from __future__ import annotations

from benchmarks.lib.replay.command import ReplayResult, Rows, make_replay_command, report_changes
from benchmarks.lib.replay.rows import experts_by_batch
from benchmarks.lib.replay.schedule import Arm
from eldr_serve.commands.run import run
from eldr_serve.experts.signature import DEFAULT_TRANSFORM, TRANSFORMS
from loadgen.figures import BASELINES
from loadgen.plots import lines
from loadgen.results import publish

BENCHMARKS = {
    "balanced_clusters": "all",
    "band_width": "all",
    "decode_replay": "all",
    "pool_size": "all",
    "rates": "all",
    "signature_transforms": "all",
    "tail_replay": "all",
}

TRUE_DECODE = "marginal-cost, true decode"
ROUND_ROBIN = Arm("round-robin", "round-robin")
LOCALITY, MARGINAL = (Arm(name, name) for name in ("locality-band", "marginal-cost"))
POLICIES = [*(Arm(name, name) for name in (*BASELINES, "domain")), LOCALITY, MARGINAL]


def _band(label: str, band: float = 0.1, *, balanced: bool = True, transform: str = DEFAULT_TRANSFORM) -> Arm:
    return Arm(label, "locality-band", {"band": band}, balanced=balanced, transform=transform)


def _share(rows: Rows) -> str:
    """Describe how much of the gain of perfect prediction the prefill signature achieves."""
    changes = {(r["workload"], r["workers"], r["arm"]): r["p50_change_pct"] for r in rows}
    shares = [
        f"{group} K={k}: {100 * changes[group, k, 'marginal-cost'] / gain:.0f} %"
        for (group, k, arm), gain in changes.items()
        if arm == TRUE_DECODE and gain < 0
    ]
    return "gain of prefill signatures as share of that of true decode activations: " + ", ".join(shares)


def _report_active_experts(replay: ReplayResult) -> None:
    """Report the policies against the load balancers, and active experts by batch size (Figure 13)."""
    report_changes(BASELINES, _share)(replay)
    labels = [
        label
        for label in ("round-robin", "shortest-queue", "locality-band", "marginal-cost")
        if label in replay.cases[0].outcomes
    ]
    steps = [row for case in replay.cases for row in experts_by_batch(case, labels)]
    path = publish(
        "active_experts",
        steps,
        inputs=replay.inputs,
        seed=replay.seed,
        notes="the steps of decode_replay: mean distinct experts of an MoE layer by batch size (Figure 13)",
        out=replay.out and replay.out.with_name(f"{replay.out.stem}_active_experts.json"),
    )
    lines(steps, "batch_from", [f"{label}: active_experts" for label in labels], path.with_suffix(".png"))


# Figures and tables are those of the ELDR paper.
# Figures 11 to 13
decode_replay = make_replay_command(
    "decode_replay",
    [
        *POLICIES,
        Arm("marginal-cost, affinity 0", "marginal-cost", {"affinity": 0.0}),
        Arm(TRUE_DECODE, "marginal-cost", true_decode=True),
    ],
    _report_active_experts,
    default_workers="8,16",
    default_groups="all,language,task",
    default_per_worker=48,
    default_intermediate=1536,  # the live benchmark has the same
)
# Figures 11 and 12, by rate
rates = make_replay_command(
    "rates",
    POLICIES,
    default_batch="4,8,16,24",
    report=report_changes(
        BASELINES,
        draw=lambda rows, path: lines(
            rows, "rate_per_s", ["tpot_p50_ms"], path, by="arm", xlabel="requests/s"
        ),
    ),
)
# Figure 16
band_width = make_replay_command(
    "band_width", [ROUND_ROBIN, *(_band(f"band {band}", band) for band in (0.0, 0.1, 0.2, 0.3))]
)
# Figure 15
balanced_clusters = make_replay_command(
    "balanced_clusters", [ROUND_ROBIN, _band("balanced"), _band("vanilla", balanced=False)]
)
# Figure 14
signature_transforms = make_replay_command(
    "signature_transforms", [ROUND_ROBIN, *(_band(t, transform=t) for t in TRANSFORMS)]
)
# Table 2
pool_size = make_replay_command("pool_size", [ROUND_ROBIN, LOCALITY, MARGINAL], default_workers="4,8,16")
# The price that marginal-cost sets for tails; not in the paper
tail_replay = make_replay_command(
    "tail_replay",
    [
        *(arm for arm in POLICIES if arm.label in BASELINES),
        *(
            Arm(f"marginal-cost, tail power {tail_power}", "marginal-cost", {"tail_power": tail_power})
            for tail_power in (1, 16)
        ),
    ],
    report_changes(BASELINES),
    default_groups="all,language,task",
    default_per_worker=48,
    default_intermediate=1536,
)

if __name__ == "__main__":
    run(decode_replay, rates, band_width, balanced_clusters, signature_transforms, pool_size, tail_replay)
