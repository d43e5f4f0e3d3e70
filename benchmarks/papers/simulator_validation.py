"""Validate the simulator against a real engine, by TPOT under the same arrivals and placements.

    python -m benchmarks.papers.simulator_validation --prompts DIR

Requests arrive at K workers by a Poisson process, and a policy places them. The simulator runs all workers.
The engine then serves each worker's requests at the same times, one worker after the other, and generates the
captured text again, so that both have the same routes (see benchmarks/lib/replay/schedule.py). A policy's
step cost is fitted to the engine's steps under the other policies. Replays of all policies alternate, so that
all policies see the same machine state. `regret` is the cost of a decision against the best worker in
hindsight, as added decode time per step, with the true activations of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.engine.replays import POLICIES
from benchmarks.lib.replay.command import ReplayResult, make_replay_command
from benchmarks.lib.replay.rows import LAYERS
from benchmarks.lib.replay.schedule import ReplayCase, ReplayExperiment
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling.cost import StepSums
from loadgen.plots import save
from loadgen.results import publish

BENCHMARKS = {"simulator_validation": "all"}


def report(run: ReplayResult) -> None:
    """Report simulated and measured TPOT of every policy, with error, correlation, ranking and regret."""
    cases = [_simulate_with_other_costs(run.experiment, case) for case in run.cases]
    rows = [row for case in cases for row in policy_rows(case, run.experiment.regret(case))]
    path = publish(
        run.name,
        rows,
        seed=run.seed,
        out=run.out,
        inputs=run.inputs,
        notes="The error is that of the simulated value against the measured one. repeats is the range of "
        "the engine's own repeats. mape and pearson are over requests. The ranking is by the policies' "
        "medians. " + "; ".join(_ranking(case) for case in cases),
    )
    _draw(cases, path.with_suffix(".png"))


def _simulate_with_other_costs(experiment: ReplayExperiment, case: ReplayCase) -> ReplayCase:
    """Simulate the same placements with step costs fitted without the policy's own steps."""
    sums = {
        label: StepSums.from_steps(steps.requests, steps.kv_tokens, steps.experts, steps.seconds)
        for label, steps in case.steps.items()
    }
    outcomes = {}
    for label in sums:
        cost = sum(
            (sums_of_other for other, sums_of_other in sums.items() if other != label), StepSums()
        ).fit()
        if cost is None:
            raise UserInputError("the steps fit no cost: raise --per-worker or --output-tokens")
        outcomes[label] = experiment.simulate_again(case, label, cost)
    return replace(case, outcomes=outcomes)


def policy_rows(case: ReplayCase, regret: dict[str, NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Return one row per policy."""
    rows = []
    for label, measured in case.tpot_s.items():
        outcome, steps = case.outcomes[label], case.steps[label]
        simulated = outcome.tpot_s
        row: dict[str, Any] = {"workload": case.load.group, "workers": case.load.workers, "policy": label}
        for q in (50, 99):
            real = float(np.percentile(measured, q))
            row[f"tpot_p{q}_ms"] = 1e3 * real
            row[f"p{q}_error_pct"] = 100 * (float(np.percentile(simulated, q)) / real - 1)
            repeats = np.percentile(case.replayed_tpot_s[label], q, axis=1)
            row[f"p{q}_repeats_pct"] = 100 * float(np.ptp(repeats)) / real
        row["mape_pct"] = 100 * float(np.mean(np.abs(simulated / measured - 1)))
        row["pearson"] = float(np.corrcoef(simulated, measured)[0, 1])
        row["active_experts"] = float(np.mean(steps.experts)) / LAYERS
        row["simulated_active_experts"] = float(outcome.experts.mean()) / LAYERS
        row["regret_mean_us"] = 1e6 * float(regret[label].mean())
        row["best_choices_pct"] = 100 * float((regret[label] <= 1e-9).mean())
        rows.append(row)
    return rows


def _ranking(case: ReplayCase) -> str:
    """Describe how alike the policies are ranked. Medians that differ by less than 2 % are not ranked."""
    labels = list(case.tpot_s)
    real = np.array([np.median(case.tpot_s[label]) for label in labels])
    simulated = np.array([np.median(case.outcomes[label].tpot_s) for label in labels])
    pairs = [
        (simulated[a] < simulated[b]) == (real[a] < real[b])
        for b, a in combinations(range(len(labels)), 2)
        if abs(real[a] / real[b] - 1) >= 0.02
    ]
    rho = float(spearmanr(real, simulated).statistic)
    return (
        f"{case.load.group} K={case.load.workers}: Spearman {rho:.2f}, "
        f"{sum(pairs)} of {len(pairs)} pairs of policies that differ by 2 % or more in the same order"
    )


def _draw(cases: Sequence[ReplayCase], path: Path) -> None:
    figure = Figure(figsize=(5 * len(cases), 5), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False).flat, cases, strict=True):
        for label, measured in case.tpot_s.items():
            axes.scatter(1e3 * measured, 1e3 * case.outcomes[label].tpot_s, s=4, alpha=0.5, label=label)
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color="black", linewidth=0.8)
        axes.set_title(f"{case.load.group}, {case.load.workers} workers")
        axes.set(xlabel="measured TPOT, ms", ylabel="simulated TPOT, ms")
        axes.legend(fontsize=7)
    save(figure, path)


simulator_validation = make_replay_command(
    "simulator_validation",
    POLICIES,
    report,
    default_workers="4",
    default_groups="all,language,task",
    default_per_worker=56,
    default_repeats=3,
)

if __name__ == "__main__":
    run(simulator_validation)
