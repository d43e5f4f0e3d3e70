"""Expert locality and KV balance in one comparison of all policies, with and without the step barrier.

There are 16 decode workers. Requests use the experts of observed requests of all domains. Lengths and arrival
times are those of a recorded trace, at a load with free slots and at a load with waiting requests. With the
barrier (data-parallel attention under expert parallelism) a step of all workers takes as long as the slowest
worker's, and the workers divide the experts that the requests of all activate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.lib.active_experts import active_experts
from benchmarks.papers.figures.common import Options, Rows, bar_plot, each_seed, mean, own_figure
from benchmarks.papers.figures.eldr import COST
from benchmarks.papers.figures.traffic import Traffic
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.scheduling import make_policy
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts
from offline.simulation.run import simulate

WORKERS = 16
SLOTS = 32
LOADS = (0.85, 1.2)  # loads relative to slot capacity
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("shortest-queue", {}),
    ("least-tokens", {}),
    ("locality-band", {}),
    ("marginal-cost", {}),
    ("balance-route", {"slots": SLOTS}),
    ("balance-route-horizon", {"slots": SLOTS}),
    ("balance-band", {"slots": SLOTS}),
)
RANKS = 4


class IndependentRanks(MarginalCost):
    """`marginal-cost` as if the ranks of a replica did not wait for each other."""

    name = "marginal-cost, independent ranks"

    def on_workers_changed(self, workers: Sequence[str | None]) -> None:
        """Ignore which workers are ranks of one replica."""


RANK_POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("shortest-queue", {}),
    (f"{__name__}:IndependentRanks", {}),
    ("marginal-cost", {}),
    ("balance-route", {"slots": SLOTS}),
)
BETTER = {"tpot_p50_ms": 1, "tpot_p99_ms": 1, "output_tokens_per_s": -1, "imbalance_tokens": 1}


def policies(options: Options) -> Rows:
    """Compare policies by load and barrier. `dominated_by` lists policies better in all of BETTER."""
    return _compare(options, product(LOADS, (1, WORKERS)), POLICIES)


def ranks(options: Options) -> Rows:
    """Compare forms of marginal-cost and balancers on replicas of RANKS data-parallel ranks."""
    return _compare(options, product(LOADS, (RANKS,)), RANK_POLICIES)


def _compare(
    options: Options, cases: Iterable[tuple[float, int]], arms: Sequence[tuple[str, dict[str, Any]]]
) -> Rows:
    """Compare policies, given with their parameters, by (load, ranks of a replica)."""
    experts_path, trace_path = options.two_traces()
    trace = read_calibration_trace(experts_path)
    traffic = Traffic(trace_path)
    experts = Experts.from_trace(trace)

    def run(case: tuple[float, int], seed: int) -> dict[str, dict[str, Any]]:
        load, num_ranks = case
        cost = options.cost or COST
        cluster = Cluster(decode=Decode(workers=WORKERS, max_batch=SLOTS, ranks=num_ranks, cost=cost))
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(trace.ids))
        fit, held_out = np.split(order, [round(0.4 * len(order))])
        table, _ = fit_table(trace.subset_without_routes(fit), WORKERS, seed=seed)
        requests = _requests(traffic, experts, options, load, num_ranks, seed)
        requests = replace(requests, kind=rng.choice(held_out, len(requests)))
        summaries = {}
        for name, parameters in arms:
            policy: Any = make_policy(name, **parameters).set_table(table)
            policy.update_cost_model(cost)
            if hasattr(policy, "length_predictor"):
                traffic.teach(policy.length_predictor)
            summaries[policy.name] = simulate(requests, policy, cluster, experts=experts, seed=seed).summary()
        return summaries

    rows: Rows = []
    for (load, num_ranks), runs in each_seed(options, cases, run):
        means = {name: mean([run[name] for run in runs]) for name in runs[0]}
        barrier = {1: "no barrier", WORKERS: "barrier"}.get(num_ranks, f"{num_ranks} ranks a replica")
        rows += _rows(f"load {load:g}, {barrier}", means)
    return rows


def _rows(workload: str, means: dict[str, dict[str, Any]]) -> Rows:
    keys = (*BETTER, "spread_tokens", "ttft_p50_ms", "ttft_p99_ms", "active_experts", "batch_size")
    rows = []
    for name, values in means.items():
        better_policies = [
            other
            for other, other_values in means.items()
            if all(sign * other_values[key] < sign * values[key] for key, sign in BETTER.items())
        ]
        row = {"workload": workload, "policy": name} | {key: values[key] for key in keys}
        rows.append(row | {"dominated_by": ", ".join(better_policies) or None})
    return rows


def _requests(
    traffic: Traffic, experts: Experts, options: Options, load: float, num_ranks: int, seed: int
) -> Any:
    cost = options.cost or COST
    kinds = np.arange(len(experts.offset) - 1)
    active = active_experts(experts, kinds, num_ranks * SLOTS, np.random.default_rng(0), draws=32) / num_ranks
    step_s = float(cost.seconds(SLOTS, SLOTS * traffic.running_kv_tokens, active))
    rate = load * WORKERS * SLOTS / (traffic.mean_output_tokens * step_s)
    number = options.requests or 16 * WORKERS * SLOTS
    return traffic.requests(number, rate, start=seed / len(options.seeds))


FIGURES = {
    "policies": own_figure(
        "TPOT, throughput and imbalance of every policy, by load, with and without the step barrier",
        policies,
        bar_plot("policy", "tpot_p50_ms"),
    ),
    "ranks": own_figure(
        f"The same on replicas of {RANKS} data-parallel ranks, with marginal-cost for independent ranks too",
        ranks,
        bar_plot("policy", "tpot_p50_ms"),
    ),
}
