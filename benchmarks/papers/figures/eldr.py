"""ELDR's evaluation at the paper's scale, simulated with real routes (paper, section 6).

A run has 8 prefill workers and K decode workers, Poisson arrivals, and requests that use the experts of
observed requests (a calibration trace with routes). Without a fitted cost, step costs are those of a CPU core
with experts of 1 MB, by `eldr bench decode_replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    bar_plot,
    change_pct,
    each_seed,
    line_plot,
    mean,
    own_figure,
)
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.scheduling import StepCost
from offline.scenario import (
    Poisson,
    PolicyChoice,
    Scenario,
    ScenarioInputs,
    read_calibration_trace,
    routes_of,
)
from offline.simulation.cluster import Cluster, Decode, Prefill
from offline.simulation.outcome import Outcome
from offline.simulation.run import OperatorChange, simulate

TASKS = ("code", "math", "medical", "legal")
RATES = (20, 40, 60, 80, 100)  # requests/s per 16 decode workers, as in the paper
BALANCERS = ("random", "round-robin", "shortest-queue", "power-of-two", "least-tokens")
LOCALITY = ("domain", "locality-band", "marginal-cost")
COST = StepCost(fixed_s=4.9e-3, per_request_s=2.9e-4, per_kv_token_s=2.4e-7, per_expert_s=6.9e-5)
PREFILL = Prefill(workers=8, fixed_s=5e-3, per_token_s=1e-4)
OUTPUT_TOKENS = 128
SECONDS = 60.0  # duration of arrivals in a run
CHANGED = ("shortest-queue", "locality-band, no refit", "locality-band, refit", "marginal-cost")
HALVES = ("before_tpot_p50", "after_tpot_p50", "after_tpot_p99")  # columns of a run that changes midway


def rates(options: Options) -> Rows:
    """Compare all policies at 8P16D over the paper's rates."""
    return _sweep(options, [16], RATES, (*BALANCERS, *LOCALITY))


def pool_size(options: Options) -> Rows:
    """Compare policies with round-robin, for pools of 8 to 1,024 decode workers, in means over the rates."""
    policies = ("round-robin", "shortest-queue", "locality-band", "marginal-cost")
    all_rows = []
    for k in (8, 16, 24, 64, 256, 1024):
        rows = _sweep(options, [k], (60,) if k > 64 else RATES, policies)
        for workload, policy in product(dict.fromkeys(row["workload"] for row in rows), policies[2:]):
            means = mean([r for r in rows if r["workload"] == workload and r["policy"] == policy])
            row = {"workload": workload, "decode_workers": k, "policy": policy}
            changes = (f"{q}_change_pct" for q in ("tpot_p50", "tpot_p99", "active_experts"))
            all_rows.append(row | {change: means[change] for change in changes})
    return all_rows


def prefix_cache(options: Options) -> Rows:
    """Compare repeated prompts with and without prefix caches in the prefill workers."""
    workload = next(iter(workloads(_observed(options))))

    def run(case: tuple[bool, str], seed: int) -> dict[str, Any]:
        cached, policy = case
        prefill = PREFILL.model_copy(update={"cache_blocks": 4000 if cached else 0, "block_tokens": 16})
        scenario, inputs = _case(options, workload, 16, 100, seed, prefill)
        return _outcome(_set_blocks(inputs), scenario, policy, seed).summary()

    cases = product((False, True), ("round-robin", "locality-band", "marginal-cost"))
    rows = [
        {"prefix_cache": cached, "policy": policy} | mean(runs)
        for (cached, policy), runs in each_seed(options, cases, run)
    ]
    for cached in (False, True):
        group = [row for row in rows if row["prefix_cache"] == cached]
        _add_changes(group, "policy", "round-robin", ("tpot_p50", "tpot_p99"))
    return rows


def drift(options: Options) -> Rows:
    """Replace half of the domains by the others in a run. Compare the old table, a refit and no table."""
    trace = _observed(options)
    workload, domains = next(iter(workloads(trace).items()))
    mixes = domains[: len(domains) // 2], domains[len(domains) // 2 :]
    if not mixes[0]:
        raise UserInputError(f"{options.traces[0]} has one domain; a drift needs two")

    def run(case: str, seed: int) -> dict[str, float]:
        policy = case.partition(",")[0]
        scenario, inputs = _case(options, workload, 16, 60, seed)
        first = _table(trace, mixes[0], 16, seed)
        second = _table(trace, mixes[1], 16, seed) if case.endswith(", refit") else None
        n = len(inputs.requests)
        rng = np.random.default_rng([seed, 1])
        kinds = [
            rng.choice(np.flatnonzero(np.isin(trace.domains, domains)), size)
            for domains, size in zip(mixes, (n // 2, n - n // 2), strict=True)
        ]
        inputs.requests = replace(inputs.requests, kind=np.concatenate(kinds))
        changes = [OperatorChange(float(inputs.requests.arrival_s[n // 2]), table=second)]
        return _halves(_outcome(inputs, scenario, policy, seed, first, changes))

    rows = [{"case": case} | mean(runs) for case, runs in each_seed(options, CHANGED, run)]
    return _add_changes(rows, "case", "shortest-queue", HALVES)


def scaling(options: Options) -> Rows:
    """Change 16 decode workers to 24 or 8 in a run. Compare the old table, a refit and no table."""
    trace = _observed(options)
    workload, domains = list(workloads(trace).items())[-1]

    def run(sizes: tuple[int, int], case: str, seed: int) -> dict[str, float]:
        (before, after), policy = sizes, case.partition(",")[0]
        most = max(sizes)
        scenario, inputs = _case(options, workload, most, 40 * 16 / most, seed)
        changed_s = float(inputs.requests.arrival_s[len(inputs.requests) // 2])
        refit = _table(trace, domains, after, seed) if case.endswith(", refit") else None
        changes = [OperatorChange(0.0, workers=before), OperatorChange(changed_s, workers=after, table=refit)]
        return _halves(
            _outcome(inputs, scenario, policy, seed, _table(trace, domains, before, seed), changes)
        )

    rows: Rows = []
    for sizes in ((16, 24), (16, 8)):
        change = f"{sizes[0]} to {sizes[1]} workers"
        group = [
            {"workload": change, "case": case} | mean(runs)
            for case, runs in each_seed(options, CHANGED, partial(run, sizes))
        ]
        rows += _add_changes(group, "case", "shortest-queue", HALVES)
    return rows


def _sweep(options: Options, sizes: Sequence[int], rates_: Sequence[int], policies: Sequence[str]) -> Rows:
    """Return one row per workload, pool size, rate and policy: means over the seeds."""

    def run(case: tuple[str, int, int], seed: int) -> dict[str, dict[str, Any]]:
        scenario, inputs = _case(options, *case, seed)
        return {policy: _outcome(inputs, scenario, policy, seed).summary() for policy in policies}

    rows: Rows = []
    for case, runs in each_seed(options, product(workloads(_observed(options)), sizes, rates_), run):
        rows += _rows_of_case(*case, {policy: mean([run[policy] for run in runs]) for policy in policies})
    return rows


def _rows_of_case(workload: str, k: int, rate: float, means: dict[str, dict[str, Any]]) -> Rows:
    times = ("tpot_p50_ms", "tpot_p99_ms")
    best = {key: min(means[p][key] for p in means if p in BALANCERS) for key in times}
    rows = []
    for policy, figures in means.items():
        row = {"workload": workload, "decode_workers": k, "rate_per_s": rate * k / 16, "policy": policy}
        row |= {key: figures[key] for key in (*times, "ttft_p50_ms", "batch_size", "active_experts")}
        for key in (*times, "active_experts"):
            row[f"{key.removesuffix('_ms')}_change_pct"] = change_pct(figures[key], means["round-robin"][key])
        for q, key in zip(("p50", "p99"), times, strict=True):
            row[f"{q}_vs_best_balancer_pct"] = change_pct(figures[key], best[key])
        rows.append(row)
    return rows


def scenario_of(
    options: Options,
    domains: tuple[str, ...],
    *,
    prefill: Prefill,
    decode_workers: int,
    rate_per_s: float,
    requests: int,
    output_tokens: int,
    seed: int,
) -> Scenario:
    """Return Poisson arrivals of requests from these domains of the single trace."""
    return Scenario(
        cluster=Cluster(
            prefill=prefill,
            decode=Decode(workers=decode_workers, cost=options.cost or COST),
            handover_fixed_s=5e-3,
        ),
        arrivals=Poisson(
            kind="poisson",
            rate_per_s=rate_per_s,
            requests=options.requests or requests,
            output_tokens=output_tokens,
        ),
        experts=routes_of(options.traces[0], domains=domains),
        policies=(PolicyChoice(name="round-robin"),),
        seeds=(seed,),
    )


def _case(
    options: Options, workload: str, k: int, rate: float, seed: int, prefill: Prefill = PREFILL
) -> tuple[Scenario, ScenarioInputs]:
    """Return a scenario and its inputs. `rate` is for 16 workers, requests/s."""
    trace = _observed(options)
    per_s = rate * k / 16
    workers = max(prefill.workers, round(prefill.workers * k / 16))
    scenario = scenario_of(
        options,
        workloads(trace)[workload],
        prefill=prefill.model_copy(update={"workers": workers}),
        decode_workers=k,
        rate_per_s=per_s,
        requests=max(200, round(per_s * SECONDS)),
        output_tokens=OUTPUT_TOKENS,
        seed=seed,
    )
    return scenario, ScenarioInputs(scenario, seed)


def workloads(trace: CalibrationTrace) -> dict[str, tuple[str, ...]]:
    """Return the domains of each workload: the paper's two, or all domains if the trace lacks one of them."""
    others = tuple(sorted(set(trace.domains) - set(TASKS)))
    if set(TASKS) <= set(trace.domains) and others:
        return {"task": TASKS, "language": others}
    return {"all": tuple(sorted(set(trace.domains)))}


def _observed(options: Options) -> CalibrationTrace:
    return read_calibration_trace(options.trace("a calibration trace with routes, or published routes"))


def _outcome(
    inputs: ScenarioInputs,
    scenario: Scenario,
    policy: str,
    seed: int,
    table: RoutingTable | None = None,
    changes: Sequence[OperatorChange] = (),
) -> Outcome:
    parameters = {"mix": inputs.mix} if policy == "domain" else {}
    router_policy = inputs.policy(PolicyChoice(name=policy, parameters=parameters), scenario.cluster)
    if table is not None:
        router_policy = router_policy.set_table(table)
    return simulate(
        inputs.requests,
        router_policy,
        scenario.cluster,
        experts=inputs.experts,
        seed=seed,
        changes=list(changes),
    )


def _table(trace: CalibrationTrace, domains: Sequence[str], workers: int, seed: int) -> RoutingTable:
    index = np.flatnonzero(np.isin(trace.domains, domains))
    return fit_table(trace.subset_without_routes(index), workers, seed=seed)[0]


def _set_blocks(inputs: ScenarioInputs) -> ScenarioInputs:
    """Return the inputs with one prompt for all requests of a kind."""
    kinds, lengths = inputs.requests.kind.tolist(), inputs.requests.prompt_tokens.tolist()
    blocks = (range(1000 * k, 1000 * k + tokens // 16) for k, tokens in zip(kinds, lengths, strict=True))
    inputs.requests = replace(inputs.requests, blocks=tuple(map(tuple, blocks)))
    return inputs


def _halves(outcome: Outcome) -> dict[str, float]:
    """Return TPOT before and after the middle request, without the first tenth of each half."""
    middle = len(outcome.tpot_s) // 2
    before, after = outcome.tpot_s[middle // 10 : middle], outcome.tpot_s[middle + middle // 10 :]
    return {
        f"{name}_tpot_p{q}_ms": 1e3 * float(np.nanpercentile(tpot, q))
        for name, tpot in (("before", before), ("after", after))
        for q in (50, 99)
    }


def _add_changes(rows: Rows, key: str, reference: str, columns: Sequence[str]) -> Rows:
    base = next(row for row in rows if row[key] == reference)
    for row in rows:
        for column in columns:
            row[f"{column}_change_pct"] = change_pct(row[f"{column}_ms"], base[f"{column}_ms"])
    return rows


_CHANGES = bar_plot("case", "after_tpot_p50_change_pct")
FIGURES = {
    "rates": PaperFigure(
        "TPOT and TTFT against rate at 8P16D (Figures 11, 12, 13)",
        "locality-band against the best load balancer: median TPOT -7.0 to -13.9 % (task), -5.9 to -10.0 % "
        "(language); p99 -3.4 to -6.0 % (task), -6.2 to +1.5 % (language); active experts -22 % against "
        "round-robin (task, Qwen3-30B-A3B)",
        rates,
        line_plot("rate_per_s", "tpot_p50_ms", by="policy"),
    ),
    "pool-size": PaperFigure(
        "Decode pool size, mean over rates against round-robin (Table 2)",
        "language, 8P8D / 8P16D / 8P24D: median -8.0 / -9.8 / -10.2 %, p99 -2.5 / -0.8 / -1.1 %",
        pool_size,
        line_plot("decode_workers", "tpot_p50_change_pct", by="policy"),
    ),
    "prefix-cache": PaperFigure(
        "Prefix cache on and off at 8P16D, 100 requests/s, task (Figure 17)",
        "locality-band against round-robin: median about -13 %, p99 -5 %, with the cache and without",
        prefix_cache,
    ),
    "drift": own_figure("The mix of domains changes in mid-run, with and without a refit", drift, _CHANGES),
    "scaling": own_figure(
        "Decode workers come and go in mid-run, with and without a refit", scaling, _CHANGES
    ),
}
