"""What was tried to better marginal-cost, in simulation: changes that did not pay stay in here.

    python -m benchmarks.marginal_variants --prompts DIR

Each variant places the same arrivals on simulated workers with real decode routes, for several seeds.
`change` columns are means over seeds against shortest-queue, with the standard error beside them; a
variant is better only if it is so by more than that. `true decode` is what perfect prediction gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV

from benchmarks.harness import options
from benchmarks.harness.capture import Captured, captured
from benchmarks.harness.replay import Load, loads_of
from eldr_serve.routing import Loads, MarginalCost, PlacementRequest, Policy, StepCost, make_policy
from eldr_serve.routing.activation import UNIT, ExpectedActivation, Levels, levels_of, probability
from eldr_serve.routing.marginal import Known
from eldr_serve.routing.policies import worker_similarity
from offline.fitting import fit_table
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate
from tools.cli import run
from tools.plots import bars
from tools.results import publish
from tools.trace import CalibrationTrace

# A decode step of the demo model with experts of 1,024 neurons on one CPU core, by replay.
COST = StepCost(fixed_s=5.0e-3, per_request_s=3.0e-4, per_kv_token_s=3e-7, per_expert_s=7.0e-5)
TRUE = "marginal-cost, true decode"


class _Sharper(ExpectedActivation):
    """Probabilities raised to a power: above 1, weak experts count less."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self._power = power

    def levels(self, handoff: PlacementRequest) -> Levels | None:
        levels = super().levels(handoff)
        return None if levels is None else levels_of(np.minimum(probability(levels) ** self._power, 0.98))


class _LookAhead(ExpectedActivation):
    """Half of the weight on mates to come, who are expected to be like those placed there of late."""

    def __init__(self, memory: float) -> None:
        super().__init__()
        self._keep = 1 - 1 / memory
        self._past: dict[int, tuple[NDArray[np.float64], float]] = {}

    def on_assigned(self, handoff: PlacementRequest, worker: int, levels: Levels | None) -> None:
        super().on_assigned(handoff, worker, levels)
        squares = self.held[handoff.request_id][1].astype(np.float64) ** 2
        total, weight = self._past.get(worker, (np.zeros(len(squares)), 0.0))
        self._past[worker] = (self._keep * total + squares, self._keep * weight + 1)
        present = self.depth[worker].astype(np.float64)
        batch = sum(w == worker for w, _ in self.held.values())
        total, weight = self._past[worker]
        expected = 0.5 * present + 0.5 * total / weight * batch
        self.idle[worker] = np.exp(-UNIT * expected)


class _Learned(ExpectedActivation):
    """Probabilities of decode foretold from those of prefill by ridge regression on other requests."""

    def __init__(self, fitted_on: CalibrationTrace) -> None:
        super().__init__()
        requests = len(fitted_on.ids)
        prefill = fitted_on.prefill_counts / fitted_on.prompt_tokens[:, None, None]
        self._map = RidgeCV(alphas=np.logspace(-2, 2, 9)).fit(
            prefill.reshape(requests, -1), fitted_on.decode_probability.reshape(requests, -1)
        )

    def levels(self, handoff: PlacementRequest) -> Levels | None:
        if handoff.signature is None:
            return super().levels(handoff)
        prefill = handoff.signature.reshape(1, -1) / handoff.prompt_tokens
        decode = np.clip(self._map.predict(prefill), 0, 0.98).reshape(handoff.signature.shape)
        return super().levels(replace(handoff, signature=decode * handoff.prompt_tokens))


class _ByCentroids(MarginalCost):
    """Profiles are the centroids of a table; they cost `strength` times the distance to the nearest."""

    def __init__(self, strength: float) -> None:
        super().__init__(affinity=0)
        self._strength = strength

    def _price(
        self, workers: NDArray[np.int64], loads: Loads, known: Known, cells: int
    ) -> NDArray[np.float64]:
        price = super()._price(workers, loads, known, cells)
        assert known.request.similarity is not None
        own = worker_similarity(known.request.similarity, len(loads))[workers].astype(np.float64)
        dearer: NDArray[np.float64] = price * (1 + self._strength * (own.max() - own))
        return dearer


def _with(active: ExpectedActivation) -> MarginalCost:
    policy = MarginalCost()
    policy.active = active
    return policy


def _variants(fitted_on: CalibrationTrace) -> dict[str, Policy]:
    return {
        "shortest-queue": make_policy("shortest-queue"),
        "locality-band": make_policy("locality-band"),
        "marginal-cost": MarginalCost(),
        TRUE: MarginalCost(),
        "experts count 2 times": MarginalCost(expert_weight=2),
        "experts count 4 times": MarginalCost(expert_weight=4),
        "prior of 8 tokens": MarginalCost(prior_tokens=8),
        "prior of 32 tokens": MarginalCost(prior_tokens=32),
        "p to the power 0.7": _with(_Sharper(0.7)),
        "p to the power 1.5": _with(_Sharper(1.5)),
        "look-ahead, 64 requests": _with(_LookAhead(64)),
        "learned map": _with(_Learned(fitted_on)),
        "affinity 0": MarginalCost(affinity=0),
        "affinity 0.05": MarginalCost(affinity=0.05),
        "affinity 0.1": MarginalCost(affinity=0.1),
        "affinity 0.5": MarginalCost(affinity=0.5),
        "profiles by centroids": _ByCentroids(0.2),
    }


def marginal_variants(
    prompts: options.Prompts = options.PROMPTS,
    workers: options.Workers = "4,8,16",
    groups: options.Groups = "all,language,task",
    per_worker: Annotated[int, typer.Option(min=10, help="Requests a worker.")] = 100,
    seeds: Annotated[int, typer.Option(min=2, help="Repetitions with other prompts and arrivals.")] = 4,
    requests: options.Captured = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare variants of marginal-cost in simulation."""
    data = captured(prompts, work, requests=requests, seed=seed)
    rows: list[dict[str, Any]] = []
    for load in loads_of(groups, workers, "16", per_worker):
        tpot: dict[str, list[tuple[float, float]]] = {}
        for number in range(seeds):
            for name, found in _simulated(data, load, seed + number).items():
                tpot.setdefault(name, []).append(found)
        reference = np.array(tpot["shortest-queue"])
        for name, runs in tpot.items():
            change = 100 * (np.array(runs) / reference - 1)
            mean, error = change.mean(axis=0), change.std(axis=0, ddof=1) / np.sqrt(seeds)
            rows.append(
                {
                    "workload": load.group,
                    "workers": load.workers,
                    "variant": name,
                    "p50_change_pct": float(mean[0]),
                    "p50_error_pct": float(error[0]),
                    "p99_change_pct": float(mean[1]),
                    "p99_error_pct": float(error[1]),
                }
            )
    path = publish(
        "marginal_variants", rows, seed=seed, out=out,
        inputs={
            "per_worker": per_worker, "seeds": seeds, "step_cost": COST.as_dict(), "captured": requests,
        },
        notes="simulated TPOT against shortest-queue; mean and standard error over seeds",
    )  # fmt: skip
    bars(rows, "variant", "p50_change_pct", path.with_suffix(".png"))


def _simulated(data: Captured, load: Load, seed: int) -> dict[str, tuple[float, float]]:
    """TPOT (p50, p99), s, of every variant."""
    rng = np.random.default_rng([seed, load.workers])
    fit, rest = data.split(load.group, 0.4, seed)
    fitted_on = data.trace.subset(fit)
    table, _ = fit_table(fitted_on, load.workers, seed=seed)
    chosen = rng.choice(
        rest, load.workers * load.per_worker, replace=load.workers * load.per_worker > len(rest)
    )
    stay_s = 64 * float(COST.seconds(load.batch, 200 * load.batch, 6 * 28))
    arrival_s = np.cumsum(rng.exponential(stay_s / load.batch / load.workers, len(chosen)))
    found = {}
    observed = {true: Experts.replayed(data.trace, true_decode=true) for true in (False, True)}
    for name, policy in _variants(fitted_on).items():
        policy.with_table(table).update_cost_model(COST)
        experts = observed[name == TRUE]
        requests = Requests(
            arrival_s, experts.count_tokens[chosen], np.diff(experts.offset)[chosen], kind=chosen
        )
        cluster = Cluster(decode=Decode(workers=load.workers, cost=COST))
        outcome = simulate(requests, policy, cluster, experts=experts, seed=seed)
        p50, p99 = np.percentile(outcome.tpot_s, [50, 99])
        found[name] = (float(p50), float(p99))
    return found


if __name__ == "__main__":
    run(marginal_variants)
