"""BalanceRoute's evaluation in simulation (paper, section 6).

G decode workers with a step barrier serve a queue of prefilled requests under heavy load: more requests of
the trace arrive than the slots can take. A step costs 40 ms, and 0.8 us per KV token of the heaviest worker:
with 32 slots, balance can then save the same share of a step as in the paper's Table 1 (there, TPOT falls by
12 of 89 ms as the imbalance falls by 69,000 tokens with 8 workers). The paper's traces (a proprietary one and
Azure-2024) are not public or not available here. Azure-2023 stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    each_seed,
    line_plot,
    mean,
    with_progress,
)
from benchmarks.papers.figures.traffic import Traffic
from eldr_serve.scheduling import Policy, StepCost, make_policy
from eldr_serve.scheduling.policies.balance_route.balance import BalanceRouteHorizon
from eldr_serve.scheduling.policies.length_predictors import Oracle
from loadgen.plots import save
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Requests
from offline.simulation.run import simulate

SLOTS = 32
LOAD = 1.5  # load relative to slot capacity, so that requests wait even in a lull of the trace
COST = StepCost(fixed_s=0.04, per_request_s=0.0, per_kv_token_s=8e-7, per_expert_s=0.0)
TURNS = 12  # minimum uses of every slot
STEPS = 1000  # minimum decode steps; short answers (28 tokens in Azure's code trace) need many turns

PAPER_WORKERS = 8
TABLE_1_WORKERS = (4, PAPER_WORKERS, 16)
TABLE_2_WORKERS = (*TABLE_1_WORKERS, 32)
PANEL_WORKERS = (PAPER_WORKERS, 16)
# By workers and method: imbalance, TPOT p95 in ms, tokens/s. The paper's imbalance is the largest less the
# least load: `spread`. Table 1 is of Azure-2024, Table 2 of the proprietary trace.
PaperTable = dict[int, dict[str, tuple[int, float, float]]]
PAPER_TABLE_1: PaperTable = {
    PAPER_WORKERS: {
        "random": (146_564, 90.3, 706),
        "round-robin": (110_049, 89.1, 771),
        "power-of-two": (109_033, 89.3, 794),
        "shortest-queue": (104_737, 89.3, 785),
        "balance-route": (54_051, 83.3, 854),
        "balance-route-horizon, oracle": (35_301, 77.3, 957),
        "balance-route-horizon, survival": (44_010, 82.1, 893),
        "balance-route-horizon, prompt-keyed": (38_496, 82.3, 909),
    }
}
PAPER_TABLE_2: PaperTable = {
    4: {
        "random": (80_118, 66.3, 365),
        "round-robin": (68_108, 65.3, 366),
        "power-of-two": (64_012, 65.4, 366),
        "shortest-queue": (75_326, 66.5, 365),
        "balance-route": (9_711, 63.2, 407),
        "balance-route-horizon, oracle": (6_576, 62.5, 415),
    },
    8: {
        "random": (438_225, 85.2, 811),
        "round-robin": (254_798, 83.2, 847),
        "power-of-two": (262_940, 84.0, 836),
        "shortest-queue": (215_110, 83.2, 843),
        "balance-route": (51_927, 79.3, 943),
        "balance-route-horizon, oracle": (23_577, 78.0, 1029),
    },
    16: {
        "random": (638_062, 77.8, 924),
        "round-robin": (616_089, 77.9, 925),
        "power-of-two": (688_283, 77.5, 927),
        "shortest-queue": (675_607, 77.4, 927),
        "balance-route": (215_170, 74.9, 1118),
        "balance-route-horizon, oracle": (117_067, 72.0, 1247),
    },
}
SURVIVAL = "balance-route-horizon, survival"
BASELINES = ("random", "round-robin", "power-of-two", "shortest-queue", "least-tokens")


@dataclass(frozen=True)
class PolicyArm:
    """A policy and its name in the figures."""

    label: str
    policy: str
    parameters: dict[str, Any]
    oracle: bool = False


def arms() -> list[PolicyArm]:
    """Return the baselines, BR-0, and BR-H with each predictor."""
    slots = {"slots": SLOTS}
    horizon = "balance-route-horizon"
    return [
        *(PolicyArm(name, name, {}) for name in BASELINES),
        PolicyArm("balance-route", "balance-route", slots),
        PolicyArm(f"{horizon}, oracle", horizon, slots, oracle=True),
        *(
            PolicyArm(f"{horizon}, {p}", horizon, slots | {"predictor": p})
            for p in ("survival", "prompt-keyed")
        ),
    ]


def table1(options: Options) -> Rows:
    """Compare all methods at G = 4, 8 (the paper's) and 16, for each trace."""
    return _compare(options, TABLE_1_WORKERS, arms())


def table2(options: Options) -> Rows:
    """Compare all methods at G = 4, 8, 16 (the paper's) and 32."""
    return _compare(options, TABLE_2_WORKERS, arms(), PAPER_TABLE_2)


def large(options: Options) -> Rows:
    """Compare all methods, and alpha and gamma, at G = 144, which takes hours."""
    return _compare(options, [144], [*arms(), *_varied_arms()])


def table3(options: Options) -> Rows:
    """Measure how well the predictors tell which requests end within the horizon, and when."""
    from sklearn.metrics import roc_auc_score

    from eldr_serve.scheduling.policies.length_predictors import LENGTH_PREDICTORS, BoostedTrees

    horizon = BalanceRouteHorizon().parameters.horizon
    rows: Rows = []
    for path in _traces(options):
        traffic = Traffic(path)
        played = traffic.played
        rng = np.random.default_rng(options.seeds[0])
        test = [played[i] for i in rng.choice(len(played), min(4000, len(played)), replace=False)]
        ages = np.array([int(rng.integers(r.output_tokens)) for r in test])
        remaining_tokens = np.array([r.output_tokens for r in test]) - ages
        ends = remaining_tokens <= horizon
        for name, predictor_class in LENGTH_PREDICTORS.items():
            # A router fits trees in a background thread; here they are awaited.
            predictor = (
                BoostedTrees(horizon, background=False)
                if predictor_class is BoostedTrees
                else predictor_class(horizon)
            )
            traffic.teach(predictor)
            p, mu = predictor.predict(
                ages, list(traffic.keys(test)), np.array([r.prompt_tokens for r in test])
            )
            row = {"trace": path.name, "predictor": name, "ends_within_horizon_pct": 100 * float(ends.mean())}
            row |= {"auc": float(roc_auc_score(ends, p)), "brier": float(np.mean((p - ends) ** 2))}
            rows.append(row | {"mae_tokens": float(np.abs(mu - remaining_tokens)[ends].mean())})
    return rows


def sensitivity(options: Options) -> Rows:
    """Vary alpha and gamma around (48, 0.9), with the oracle, at G = 8 and 16 as in the paper."""
    queue = PolicyArm("shortest-queue", "shortest-queue", {})
    return _compare(options, [PAPER_WORKERS, 16], [queue, *_varied_arms()])


def _varied_arms() -> list[PolicyArm]:
    """Return BR-H with the oracle, with alpha and gamma around (48, 0.9)."""
    cross = [(a, 0.9) for a in (1, 24, 48, 96)] + [(48, g) for g in (0.5, 0.7, 1.0)]
    return [
        PolicyArm(
            f"alpha {a}, gamma {g}", "balance-route-horizon", {"slots": SLOTS, "alpha": a, "gamma": g}, True
        )
        for a, g in cross
    ]


def forms(options: Options) -> Rows:
    """Compare the paper's F, candidates and countdown with the policies here, with the oracle."""
    changes: dict[str, dict[str, Any]] = {
        "ours": {},
        "s at every step": {"new_requests_end": False},
        "lookahead 10": {"lookahead": 10},
        "lookahead 1000": {"lookahead": 1000},
        "the paper's candidates": {"lookahead": None},
        "countdown from H": {"count_down_from_horizon": True},
        "as in the paper": {"new_requests_end": False, "lookahead": None, "count_down_from_horizon": True},
    }
    variants = [
        PolicyArm(name, "balance-route-horizon", {"slots": SLOTS} | change, oracle=True)
        for name, change in changes.items()
    ]
    return _compare(
        options, [PAPER_WORKERS, 16], [PolicyArm("shortest-queue", "shortest-queue", {}), *variants]
    )


def panels(options: Options) -> Rows:
    """Record the imbalance over time at G = 8 (the paper's) and 16, first trace."""
    traffic = Traffic(_traces(options)[0])
    arms_by_label = {a.label: a for a in arms() if a.label in ("shortest-queue", "balance-route", SURVIVAL)}
    rows: Rows = []
    for g, label in with_progress(product(PANEL_WORKERS, arms_by_label)):
        requests = _requests(traffic, g, options, 0)
        outcome = simulate(requests, _policy(arms_by_label[label], requests, traffic), _cluster(g, options))
        middle = len(outcome.sample_s) // 2
        columns = (outcome.sample_s, outcome.imbalance, outcome.spread)
        for sample in np.stack([column[middle : middle + 600] for column in columns], axis=1).tolist():
            names = ("workers", "method", "time_s", "imbalance_tokens", "spread_tokens")
            rows.append(dict(zip(names, (g, label, *sample), strict=True)))
    return rows


def _compare(
    options: Options,
    sizes: Sequence[int],
    arms_to_compare: Sequence[PolicyArm],
    paper: PaperTable = PAPER_TABLE_1,
) -> Rows:
    traffics = {path: Traffic(path) for path in _traces(options)}

    def run(case: tuple[Path, int], seed: int) -> dict[str, dict[str, Any]]:
        traffic, g = traffics[case[0]], case[1]
        requests = _requests(traffic, g, options, seed)
        policies = {arm.label: _policy(arm, requests, traffic) for arm in arms_to_compare}
        return {
            label: simulate(requests, policy, _cluster(g, options), seed=seed).summary()
            for label, policy in policies.items()
        }

    rows: Rows = []
    for (path, g), runs in each_seed(options, product(traffics, sizes), run):
        means = {arm.label: mean([run[arm.label] for run in runs]) for arm in arms_to_compare}
        rows += _rows(path.name, g, means, paper.get(g, {}))
    return rows


def _rows(
    trace: str, g: int, means: dict[str, dict[str, Any]], paper: dict[str, tuple[int, float, float]]
) -> Rows:
    """Return a row per method, with the paper's result if `paper` has the method."""
    rows = []
    for label, figures in means.items():
        keys = ["imbalance_tokens", "spread_tokens", "tpot_p95_ms", "output_tokens_per_s"]
        keys += ["ttft_p50_ms", "ttft_p99_ms"]
        row: dict[str, Any] = {"trace": trace, "workers": g, "method": label}
        row |= {key: figures[key] for key in keys}
        for measure in ("imbalance", "spread"):
            key = f"{measure}_tokens"
            row[f"{measure}_below_jsq"] = means["shortest-queue"][key] / figures[key]
        columns = ("paper_imbalance", "paper_tpot_p95_ms", "paper_tokens_per_s")
        published = paper.get(label)
        row |= zip(columns, published or (None,) * 3, strict=True)
        row["paper_below_jsq"] = published and paper["shortest-queue"][0] / published[0]
        rows.append(row)
    return rows


def _policy(arm: PolicyArm, requests: Requests, traffic: Traffic) -> Policy:
    """Return the arm's policy. A learning predictor has been fitted to the past."""
    policy: Any = make_policy(arm.policy, **arm.parameters)
    if arm.oracle:
        policy.length_predictor = Oracle({str(j): int(n) for j, n in enumerate(requests.output_tokens)})
    elif arm.policy == "balance-route-horizon":
        traffic.teach(policy.length_predictor)
    typed: Policy = policy
    return typed


def _cluster(g: int, options: Options) -> Cluster:
    return Cluster(decode=Decode(workers=g, max_batch=SLOTS, barrier=True, cost=options.cost or COST))


def _requests(traffic: Traffic, g: int, options: Options, seed: int) -> Requests:
    """Return more requests than the slots can take."""
    turns = max(TURNS, STEPS / traffic.mean_output_tokens)
    number = options.requests or max(len(traffic.played), round(turns * g * SLOTS))
    return requests_at_load(traffic, g, LOAD, number, options, seed)


def requests_at_load(
    traffic: Traffic, g: int, load: float, number: int, options: Options, seed: int
) -> Requests:
    """Return `number` requests at a load relative to the capacity of all slots."""
    cost = options.cost or COST
    step_s = float(cost.seconds(SLOTS, 1.2 * SLOTS * traffic.running_kv_tokens, 0))
    rate = load * g * SLOTS / (traffic.mean_output_tokens * step_s)
    return traffic.requests(number, rate, start=seed / len(options.seeds))


def _traces(options: Options) -> tuple[Path, ...]:
    return options.all_traces("one or more request traces (Azure CSV or Mooncake JSON lines)")


def _draw_panels(rows: Rows, path: Path) -> None:
    sizes = dict.fromkeys(row["workers"] for row in rows)
    picture = Figure(figsize=(8, 4 * len(sizes)), layout="constrained")
    for axes, g in zip(picture.subplots(len(sizes), squeeze=False).flat, sizes, strict=True):
        of_size = [row for row in rows if row["workers"] == g]
        for method in dict.fromkeys(row["method"] for row in of_size):
            time_s, spread = np.array(
                [(row["time_s"], row["spread_tokens"]) for row in of_size if row["method"] == method]
            ).T
            axes.plot(time_s - time_s[0], spread, label=method, linewidth=1)
        axes.set(title=f"{g} workers", xlabel="time, s", ylabel="spread, KV tokens", ylim=(0, None))
        axes.legend()
    save(picture, path)


def _draw_scaling(rows: Rows, path: Path) -> None:
    draw = line_plot("G", "spread_below_jsq", by="method", panels=("trace",))
    draw([row | {"G": row["workers"]} for row in rows if row["method"] != "random"], path)


_ORDER = "every BR row better than every baseline row on imbalance, TPOT p95 and throughput"
FIGURES = {
    "table1": PaperFigure("Imbalance, TPOT p95 and throughput at G = 4, 8 and 16 (Table 1)", _ORDER, table1),
    "table2": PaperFigure(
        "The same at G = 4, 8, 16 and 32 (Table 2, Figure 4)",
        "spread below JSQ's: 7.8, 4.1 and 3.1 times (BR-0), 11.5, 9.1 and 5.8 times (BR-H oracle) on its "
        "proprietary trace at G = 4, 8 and 16",
        table2,
        _draw_scaling,
    ),
    "large": PaperFigure(
        "All methods, and alpha and gamma, at G = 144",
        "not in the paper, whose 144 NPUs are 16 decode workers and their prefill",
        large,
    ),
    "table3": PaperFigure(
        "Predictors: AUC of ending within the horizon, error of the remaining length (Table 3)",
        "Azure-2024: survival 0.993 / 5.4 tokens, prompt-keyed 0.995 / 5.4; proprietary: 0.700 / 20.1 and "
        "0.974 / 2.9",
        table3,
    ),
    "panels": PaperFigure(
        "Imbalance over time at G = 8 and 16 (Figure 3)",
        "BR's bands are a small part of JSQ's",
        panels,
        _draw_panels,
    ),
    "sensitivity": PaperFigure(
        "alpha and gamma, oracle (Tables 6 and 7)",
        "spread 24,706 to 32,304 tokens at G = 8 and 104,229 to 127,207 at G = 16: robust",
        sensitivity,
    ),
    "forms": PaperFigure(
        "The paper's F, candidates and countdown beside ours, oracle",
        "s counts at every step ahead; all requests are compared in stage 1, and 10 in stage 2; the expected "
        "remaining tokens count down from H",
        forms,
    ),
}
