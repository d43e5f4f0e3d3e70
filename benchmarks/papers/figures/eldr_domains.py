"""ELDR on observed routes: which domains gain and which lose, by mix of domains.

A trace with several of LANGUAGES has a workload of these, and one of its tasks; any other is one workload.
Domains with fewer than FEW requests are left out; those with fewer than FEW_SIMULATED in a run are neither
its worst nor its best.

A run fits its table to one half of each domain's requests, and simulates requests drawn from the other half.
`locality-band, even table` has a table fitted to as many requests of each domain, as `eldr calibrate
--balanced` draws them. The other tables are fitted to requests in the mix of the traffic, as the signature
pool samples them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    change_pct,
    each_seed,
    requests_at_batch,
    summarise_seeds,
)
from benchmarks.papers.figures.eldr import COST, TASKS
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.scheduling import StepCost, make_policy
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Experts
from offline.simulation.run import simulate

Index = NDArray[np.int64]
TRACES = "calibration traces with routes, or published routes"
WORKERS = (8,)
LANGUAGE_WORKERS = (16,)  # as in the paper; `domain` cannot divide 8 among 8 languages in proportion
PER_WORKER = 150  # requests
FEW, FEW_SIMULATED = 4, 10
# Shares in chat traffic: of LANGUAGES, then of other domains, those with the most requests first. Further
# domains get the last share.
CHAT = (58.2, 16.6, 8.1, 4.6, 3.2, 2.1, 1.5, 1.5, 0.4)
LANGUAGES = ("en", "zh", "ru", "fr", "es", "de", "ar", "ja")
MIXES = ("even", "as recorded", "chat")
REFERENCE = "shortest-queue"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    REFERENCE: ("shortest-queue", {}),
    "domain": ("domain", {}),
    "locality-band": ("locality-band", {}),
    "locality-band, even table": ("locality-band", {}),
    "marginal-cost": ("marginal-cost", {}),
    "marginal-cost, affinity 0": ("marginal-cost", {"affinity": 0.0}),
}
_COSTS = {  # costs on an H100: by the bytes that it reads, and fitted to NVIDIA's times (gpu_cost.json)
    "deepseek-v2-lite": StepCost(
        fixed_s=2.0e-3, per_request_s=6.0e-6, per_kv_token_s=1.0e-8, per_expert_s=5.7e-6
    ),
    "gpt-oss-20b": StepCost(
        fixed_s=2.56e-3, per_request_s=1.44e-5, per_kv_token_s=7.9e-9, per_expert_s=4.75e-6
    ),
}


def cost_of(options: Options, trace: CalibrationTrace) -> StepCost:
    """Return the step cost given, that of a known model on a GPU, or that of the demo model on a CPU."""
    return options.cost or _COSTS.get(trace.model, COST)


def halves(trace: CalibrationTrace, seed: int) -> tuple[Index, Index]:
    """Split the requests of each domain at random: one half to fit to, one to simulate."""
    order = np.random.default_rng(seed).permutation(len(trace.ids))
    parts = [order[[trace.domains[i] == name for i in order]] for name in sorted(set(trace.domains))]
    if small := [trace.domains[part[0]] for part in parts if len(part) < 2]:
        raise UserInputError(
            f"the trace has one request of {small[0]}; a domain needs two, to fit and to run"
        )
    return np.concatenate([part[::2] for part in parts]), np.concatenate([part[1::2] for part in parts])


def shares(trace: CalibrationTrace, mix: str) -> dict[str, float]:
    """Return the share of each domain's requests, summing to 1."""
    names, counts = np.unique(trace.domains, return_counts=True)
    place = np.array([[*LANGUAGES, name].index(name) for name in names.tolist()])
    order = np.lexsort((-counts, place)) if mix == "chat" else np.argsort(-counts, kind="stable")
    weights = {
        "even": np.ones(len(names)),
        "as recorded": counts[order].astype(float),
        "chat": np.array([CHAT[min(n, len(CHAT) - 1)] for n in range(len(names))]),
    }[mix]
    return dict(zip(names[order].tolist(), (weights / weights.sum()).tolist(), strict=True))


def draw_requests(
    trace: CalibrationTrace, among: Index, mix: str, number: int, rng: np.random.Generator
) -> Index:
    """Draw requests of `among` with replacement, each domain by its share."""
    by_domain = shares(trace, mix)
    domains = np.array(trace.domains)[among]
    chosen = rng.choice(list(by_domain), number, p=list(by_domain.values()))
    kinds = np.zeros(number, np.int64)
    for name in by_domain:
        kinds[chosen == name] = rng.choice(among[domains == name], int((chosen == name).sum()))
    return kinds


def domains(options: Options) -> Rows:
    """Compare TPOT with shortest-queue's by policy and mix: of all, of the worst and of the best domain."""
    paths = options.all_traces(TRACES)

    def run(case: tuple[Path, str, int, str], seed: int) -> dict[str, dict[str, Any]]:
        path, workload, workers, mix = case
        trace = select_workload(read_calibration_trace(path), workload)
        outcomes, names = simulate_policies(options, trace, workers, mix, seed)
        return {
            label: {
                "all": _times(outcome.summary()) | {"active_experts": outcome.summary()["active_experts"]}
            }
            | {
                row["domain"]: _times(row)
                for row in outcome.summarise_domains(names)
                if row["requests"] >= FEW_SIMULATED
            }
            for label, outcome in outcomes.items()
        }

    cases = [
        (path, *case)
        for path in paths
        for workload in split_workloads(read_calibration_trace(path))
        for case in product([workload], LANGUAGE_WORKERS if workload == "language" else WORKERS, MIXES)
    ]
    rows: Rows = []
    for (path, workload, workers, mix), runs in each_seed(options, cases, run):
        # A rare domain can lack requests in one of the runs.
        parts = [part for part in runs[0][REFERENCE] if all(part in r[REFERENCE] for r in runs)]
        means = {
            label: {
                part: {
                    key: float(np.mean([r[label][part][key] for r in runs])) for key in runs[0][label][part]
                }
                for part in parts
            }
            for label in POLICIES
        }
        model = read_calibration_trace(path).model
        for label in POLICIES:
            row = {"model": model, "workload": workload, "workers": workers, "mix": mix, "policy": label}
            rows.append(row | _row(means[label], means[REFERENCE], runs, label))
    return rows


def split_workloads(trace: CalibrationTrace) -> dict[str, tuple[str, ...]]:
    """Return the domains of each workload: languages, and tasks beside them, or all domains."""
    languages, tasks = (
        tuple(name for name in names if name in trace.domains) for names in (LANGUAGES, TASKS)
    )
    if len(languages) < 2:
        return {"all": tuple(sorted(set(trace.domains)))}
    return ({"task": tasks} if tasks else {}) | {"language": languages}


def select_workload(trace: CalibrationTrace, workload: str) -> CalibrationTrace:
    """Return the requests of the workload, with routes, without domains that have fewer than FEW requests."""
    count = Counter(trace.domains)
    chosen = [name for name in split_workloads(trace)[workload] if count[name] >= FEW]
    index = np.flatnonzero(np.isin(trace.domains, chosen))
    if not len(index):
        raise UserInputError(f"no domain of the trace has {FEW} requests of the workload {workload!r}")
    offsets = np.concatenate([[0], np.cumsum(trace.decode_steps[index], dtype=np.int64)])
    return replace(
        trace.subset_without_routes(index), routes=trace.decode_routes(index), route_offsets=offsets
    )


def simulate_policies(
    options: Options, trace: CalibrationTrace, workers: int, mix: str, seed: int
) -> tuple[dict[str, Outcome], list[str]]:
    """Return the outcome of each of POLICIES with the same requests, and the requests' domains."""
    cost, experts = cost_of(options, trace), Experts.from_trace(trace)
    fit, test = halves(trace, seed)
    rng = np.random.default_rng([seed, workers])
    kinds = draw_requests(trace, test, mix, options.requests or PER_WORKER * workers, rng)
    requests = requests_at_batch(trace, experts, kinds, workers, cost, rng)
    samples = {name: draw_requests(trace, fit, name, len(fit), rng) for name in dict.fromkeys(("even", mix))}
    tables = {n: fit_table(_repeat_requests(trace, s), workers, seed=seed)[0] for n, s in samples.items()}
    mix_of_table = dict(Counter(trace.domains[request] for request in samples[mix]))
    cluster = Cluster(decode=Decode(workers=workers, cost=cost))
    outcomes = {}
    for label, (name, parameters) in POLICIES.items():
        all_parameters = parameters | ({"mix": mix_of_table} if name == "domain" else {})
        policy = make_policy(name, **all_parameters).set_table(tables["even" if "even" in label else mix])
        policy.update_cost_model(cost)
        outcomes[label] = simulate(requests, policy, cluster, experts=experts, seed=seed)
    return outcomes, [trace.domains[kind] for kind in kinds]


def _repeat_requests(trace: CalibrationTrace, index: Index) -> CalibrationTrace:
    """Return the requests at `index`, where one may occur several times, each with an id of its own."""
    return trace.subset_without_routes(index, ids=[str(n) for n in range(len(index))])


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {key: row[key] for key in ("tpot_p50_ms", "tpot_p99_ms")}


def _row(
    figures: dict[str, dict[str, float]],
    reference: dict[str, dict[str, float]],
    runs: list[dict[str, dict[str, Any]]],
    label: str,
) -> dict[str, Any]:
    """Return the policy's times and their changes, with those of the worst and of the best domain."""
    row: dict[str, Any] = dict(figures["all"])
    for q in ("p50", "p99"):
        key = f"tpot_{q}_ms"
        each = [change_pct(r[label]["all"][key], r[REFERENCE]["all"][key]) for r in runs]
        row |= summarise_seeds(f"{q}_change_pct", each)
        by_domain = {
            name: change_pct(figures[name][key], reference[name][key]) for name in reference if name != "all"
        }
        for which, choose in (("worst", max), ("best", min)) if by_domain else ():
            name = choose(by_domain, key=by_domain.__getitem__)
            row |= {f"{which}_{q}_domain": name, f"{which}_{q}_change_pct": by_domain[name]}
    return row


FIGURES = {
    "domains": PaperFigure(
        "TPOT against shortest-queue by policy and mix: of all, of the worst and of the best domain",
        "languages in the mix of chat: median -5.9 to -10.0 %, p99 -6.2 to +1.5 % against the best balancer",
        domains,
    )
}
