"""ELDR's evaluation at the paper's scale, simulated over real routes (paper, section 6).

A run has 8 prefill workers and K decode workers, Poisson arrivals, and requests that use the experts of
observed ones (a calibration trace with routes). Step costs are those of a CPU core with experts of
1 MB, by `benchmarks.decode_replay`, unless a fitted cost is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.artifacts import RoutingTable
from eldr_serve.routing import StepCost
from offline.fitting import fit_table
from offline.scenario import Poisson, PolicyChoice, Scenario, Work, observed, routes_of
from offline.simulation.cluster import Cluster, Decode, Prefill
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Requests
from offline.simulation.run import Change, simulate
from studies.figures.common import Figure, Options, Rows, Steps, change_pct
from tools.cli import BadInput
from tools.plots import bars, lines
from tools.trace import CalibrationTrace

TASKS = ("code", "math", "medical", "legal")
RATES = (20, 40, 60, 80, 100)  # requests/s at 16 decode workers, as in the paper; in proportion elsewhere
BALANCERS = ("random", "round-robin", "shortest-queue", "power-of-two", "least-tokens")
LOCALITY = ("domain", "locality-band", "marginal-cost")
COST = StepCost(fixed_s=4.9e-3, per_request_s=2.9e-4, per_kv_token_s=2.4e-7, per_expert_s=6.9e-5)
PREFILL = Prefill(workers=8, fixed_s=5e-3, per_token_s=1e-4)
OUTPUT_TOKENS = 128
SECONDS = 60.0  # of arrivals in a run


def rates(options: Options) -> Rows:
    """Every policy at 8P16D over the paper's rates."""
    return _swept(options, [16], RATES, (*BALANCERS, *LOCALITY))


def pool_size(options: Options) -> Rows:
    """Means over the rates for pools of 8 to 1,024 decode workers, against round-robin."""
    sizes = [8, 16, 24, 64, 256, 1024]
    found = []
    for k in sizes:
        few = k > 64
        rows = _swept(
            options,
            [k],
            (60,) if few else RATES,
            ("round-robin", "shortest-queue", "locality-band", "marginal-cost"),
        )
        for workload in ("task", "language"):
            for policy in ("locality-band", "marginal-cost"):
                mine = [r for r in rows if r["workload"] == workload and r["policy"] == policy]
                found.append(
                    {
                        "workload": workload,
                        "decode_workers": k,
                        "policy": policy,
                        **{
                            f"{q}_change_pct": float(np.mean([r[f"{q}_change_pct"] for r in mine]))
                            for q in ("tpot_p50", "tpot_p99", "active_experts")
                        },
                    }
                )
    return found


def prefix_cache(options: Options) -> Rows:
    """Prompts that come again, with prefix caches in the prefill workers and without."""
    rows: Rows = []
    policies = ("round-robin", "locality-band", "marginal-cost")
    with Steps(2 * len(policies) * len(options.seeds)) as steps:
        for cached in (False, True):
            prefill = PREFILL.model_copy(update={"cache_blocks": 4000 if cached else 0, "block_tokens": 16})
            for policy in policies:
                summaries = []
                for seed in options.seeds:
                    scenario, work = _case(options, "task", 16, 100, (policy,), seed, prefill)
                    summaries.append(_outcome(_with_blocks(work), scenario, policy, seed).summary())
                    steps.done(f"cache {'on' if cached else 'off'}, {policy}")
                rows.append({"prefix_cache": cached, "policy": policy} | _mean(summaries))
    for row in rows:
        reference = next(
            r for r in rows if r["prefix_cache"] == row["prefix_cache"] and r["policy"] == "round-robin"
        )
        row["tpot_p50_change_pct"] = change_pct(row["tpot_p50_ms"], reference["tpot_p50_ms"])
        row["tpot_p99_change_pct"] = change_pct(row["tpot_p99_ms"], reference["tpot_p99_ms"])
    return rows


def drift(options: Options) -> Rows:
    """Two domains give way to two others: with the old table, with a refit, and without any table."""
    trace, _ = _observed(options)
    old, new = ("code", "math"), ("medical", "legal")
    cases = {
        "shortest-queue": ("shortest-queue", False),
        "locality-band, no refit": ("locality-band", False),
        "locality-band, refit": ("locality-band", True),
        "marginal-cost": ("marginal-cost", False),
    }
    rows: Rows = []
    with Steps(len(cases) * len(options.seeds)) as steps:
        for label, (policy, refit) in cases.items():
            summaries = []
            for seed in options.seeds:
                scenario, work = _case(options, "task", 16, 60, (policy,), seed)
                first = _table(trace, old, 16, seed)
                second = _table(trace, new, 16, seed) if refit else None
                n = len(work.requests)
                rng = np.random.default_rng([seed, 1])
                kind = np.concatenate(
                    [
                        rng.choice(np.flatnonzero(np.isin(trace.domains, domains)), size)
                        for domains, size in ((old, n // 2), (new, n - n // 2))
                    ]
                )
                changed_s = float(work.requests.arrival_s[n // 2])
                requests = replace(work.requests, kind=kind)
                made = work.policy(PolicyChoice(name=policy), scenario.cluster).with_table(first)
                outcome = simulate(
                    requests, made, scenario.cluster, experts=work.experts, seed=seed,
                    changes=[Change(changed_s, table=second)],
                )  # fmt: skip
                summaries.append(_halves(outcome, n // 2))
                steps.done(label)
            rows.append({"case": label} | _mean(summaries))
    return _against(rows, "case", "shortest-queue", ("before_tpot_p50", "after_tpot_p50", "after_tpot_p99"))


def scaling(options: Options) -> Rows:
    """16 decode workers become 24, or 8, in mid-run: with the old table, with a refit, and without."""
    trace, _ = _observed(options)
    rows: Rows = []
    policies = ("shortest-queue", "locality-band", "marginal-cost")
    cases = [(p, r) for p in policies for r in ((False, True) if p == "locality-band" else (False,))]
    with Steps(2 * len(cases) * len(options.seeds)) as steps:
        for before, after in ((16, 24), (16, 8)):
            for policy, refit in cases:
                summaries = []
                for seed in options.seeds:
                    scenario, work = _case(
                        options, "language", max(before, after), 40 * 16 / max(before, after), (policy,), seed
                    )
                    n = len(work.requests)
                    domains = tuple(d for d in set(trace.domains) if d not in TASKS)
                    made = work.policy(PolicyChoice(name=policy), scenario.cluster).with_table(
                        _table(trace, domains, before, seed)
                    )
                    changed_s = float(work.requests.arrival_s[n // 2])
                    changes = [
                        Change(0.0, workers=before),
                        Change(
                            changed_s,
                            workers=after,
                            table=_table(trace, domains, after, seed) if refit else None,
                        ),
                    ]
                    outcome = simulate(
                        work.requests,
                        made,
                        scenario.cluster,
                        experts=work.experts,
                        seed=seed,
                        changes=changes,
                    )
                    summaries.append(_halves(outcome, n // 2))
                    steps.done(f"{before} to {after}, {policy}")
                label = policy + (", refit" if refit else ", no refit" if policy == "locality-band" else "")
                rows.append({"workload": f"{before} to {after} workers", "case": label} | _mean(summaries))
    found: Rows = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        group = [row for row in rows if row["workload"] == name]
        found += _against(
            group, "case", "shortest-queue", ("before_tpot_p50", "after_tpot_p50", "after_tpot_p99")
        )
    return found


# -- the pieces -----------------------------------------------------------------------------------


def _swept(options: Options, sizes: Sequence[int], rates_: Sequence[int], policies: Sequence[str]) -> Rows:
    """One row a workload, pool size, rate and policy: means over the seeds."""
    rows: Rows = []
    with Steps(2 * len(sizes) * len(rates_) * len(policies) * len(options.seeds)) as steps:
        for workload in ("task", "language"):
            for k in sizes:
                for rate in rates_:
                    summaries: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
                    for seed in options.seeds:
                        scenario, work = _case(options, workload, k, rate, policies, seed)
                        for policy in policies:
                            summaries[policy].append(_outcome(work, scenario, policy, seed).summary())
                            steps.done(f"{workload}, {k} workers, {rate} requests/s, {policy}")
                    rows += _compared(workload, k, rate, {p: _mean(s) for p, s in summaries.items()})
    return rows


def _compared(workload: str, k: int, rate: float, means: dict[str, dict[str, Any]]) -> Rows:
    reference = means["round-robin"]
    rows = []
    for policy, mean in means.items():
        row: dict[str, Any] = {"workload": workload, "decode_workers": k, "rate_per_s": rate * k / 16}
        row |= {"policy": policy}
        keys = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "batch_size", "active_experts")
        row |= {key: mean[key] for key in keys}
        for key in ("tpot_p50_ms", "tpot_p99_ms", "active_experts"):
            row[key.removesuffix("_ms") + "_change_pct"] = change_pct(mean[key], reference[key])
        best = {
            key: min(means[p][key] for p in means if p in BALANCERS) for key in ("tpot_p50_ms", "tpot_p99_ms")
        }
        row["p50_vs_best_balancer_pct"] = change_pct(mean["tpot_p50_ms"], best["tpot_p50_ms"])
        row["p99_vs_best_balancer_pct"] = change_pct(mean["tpot_p99_ms"], best["tpot_p99_ms"])
        rows.append(row)
    return rows


def _case(
    options: Options,
    workload: str,
    k: int,
    rate: float,
    policies: Sequence[str],
    seed: int,
    prefill: Prefill = PREFILL,
) -> tuple[Scenario, Work]:
    """`rate` is at 16 workers, requests/s."""
    trace, path = _observed(options)
    domains = TASKS if workload == "task" else tuple(sorted(set(trace.domains) - set(TASKS)))
    per_s = rate * k / 16
    workers = max(prefill.workers, round(prefill.workers * k / 16))
    scenario = Scenario(
        cluster=Cluster(
            prefill=prefill.model_copy(update={"workers": workers}),
            decode=Decode(workers=k, cost=options.cost or COST),
            handoff_fixed_s=5e-3,
        ),
        arrivals=Poisson(
            kind="poisson", rate_per_s=per_s, requests=options.requests or max(200, round(per_s * SECONDS)),
            output_tokens=OUTPUT_TOKENS,
        ),
        experts=routes_of(path, domains=domains),
        policies=tuple(PolicyChoice(name=name) for name in policies),
        seeds=(seed,),
    )  # fmt: skip
    return scenario, Work(scenario, seed)


def _observed(options: Options) -> tuple[CalibrationTrace, Path]:
    path = options.trace("a calibration trace with routes (offline.calibrate --routes)")
    trace = observed(routes_of(path))
    if not set(TASKS) <= set(trace.domains) or set(TASKS) == set(trace.domains):
        raise BadInput(f"{path} needs requests of {', '.join(TASKS)} and of other domains")
    return trace, path


def _outcome(work: Work, scenario: Scenario, policy: str, seed: int) -> Outcome:
    made = work.policy(PolicyChoice(name=policy), scenario.cluster)
    return simulate(work.requests, made, scenario.cluster, experts=work.experts, seed=seed)


def _table(trace: CalibrationTrace, domains: Sequence[str], workers: int, seed: int) -> RoutingTable:
    index = np.flatnonzero(np.isin(trace.domains, domains))
    return fit_table(trace.subset(index), workers, seed=seed)[0]


def _with_blocks(work: Work) -> Work:
    """Requests of one kind have the same prompt."""
    blocks: Iterator[tuple[int, ...]] = (
        tuple(range(1000 * kind, 1000 * kind + tokens // 16))
        for kind, tokens in zip(
            work.requests.kind.tolist(), work.requests.prompt_tokens.tolist(), strict=True
        )
    )
    work.requests = Requests(
        work.requests.arrival_s, work.requests.prompt_tokens, work.requests.output_tokens, work.requests.kind,
        tuple(blocks),
    )  # fmt: skip
    return work


def _halves(outcome: Outcome, middle: int) -> dict[str, float]:
    """TPOT of the requests before and after the middle one, the first tenth of each left out."""
    found = {}
    parts = {
        "before": outcome.tpot_s[middle // 10 : middle],
        "after": outcome.tpot_s[middle + middle // 10 :],
    }
    for name, tpot in parts.items():
        for q in (50, 99):
            found[f"{name}_tpot_p{q}_ms"] = 1e3 * float(np.nanpercentile(tpot, q))
    return found


def _against(rows: Rows, key: str, reference: str, columns: Sequence[str]) -> Rows:
    base = next(row for row in rows if row[key] == reference)
    for row in rows:
        for column in columns:
            row[f"{column}_change_pct"] = change_pct(row[f"{column}_ms"], base[f"{column}_ms"])
    return rows


def _mean(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: float(np.mean([s[key] for s in summaries]))
        for key, value in summaries[0].items()
        if isinstance(value, int | float)
    }


FIGURES = {
    "rates": Figure(
        "TPOT and TTFT against rate at 8P16D (Figures 11, 12, 13)",
        "locality-band against the best load balancer: median TPOT -7.0 to -13.9 % (task), -5.9 to -10.0 % "
        "(language); p99 -3.4 to -6.0 % (task), -6.2 to +1.5 % (language); active experts -22 % against "
        "round-robin (task, Qwen3-30B-A3B)",
        rates,
        lambda rows, path: lines(rows, "rate_per_s", ["tpot_p50_ms"], path, by="policy"),
    ),
    "pool-size": Figure(
        "Decode pool size, mean over rates against round-robin (Table 2)",
        "language, 8P8D / 8P16D / 8P24D: median -8.0 / -9.8 / -10.2 %, p99 -2.5 / -0.8 / -1.1 %",
        pool_size,
        lambda rows, path: lines(rows, "decode_workers", ["tpot_p50_change_pct"], path, by="policy"),
    ),
    "prefix-cache": Figure(
        "Prefix cache on and off at 8P16D, 100 requests/s, task (Figure 17)",
        "locality-band against round-robin: median about -13 %, p99 -5 %, with the cache and without",
        prefix_cache,
    ),
    "drift": Figure(
        "The mix of domains changes in mid-run, with and without a refit",
        "not in the paper",
        drift,
        lambda rows, path: bars(
            [row | {"workload": "after the change"} for row in rows],
            "case",
            "after_tpot_p50_change_pct",
            path,
        ),
    ),
    "scaling": Figure(
        "Decode workers come and go in mid-run, with and without a refit",
        "not in the paper",
        scaling,
        lambda rows, path: bars(rows, "case", "after_tpot_p50_change_pct", path),
    ),
}
