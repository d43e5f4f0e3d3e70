"""METRO's evaluation on real routes: which replicas a batch activates, and what that costs by `LayerCost`.

Experts are replicated and placed by EPLB on the decode routes of one half of the requests, seed by seed;
batches are drawn from the other half, each request at a random step. Nothing here ran on GPUs: times are
those of a test bed's constants (`BEDS`), whose derivation stands beside each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.artifacts import CalibrationTrace
from eldr_serve.experts import eplb_placement, hosts_of, route_even, route_optimal
from eldr_serve.experts.cost import LayerCost, LayerWork
from eldr_serve.experts.replica_routing import MetroPlan
from offline.cli import BadInput
from offline.figures.common import Figure, Options, Rows, Steps, change_pct
from offline.plots import bars, lines
from offline.scenario import observed, routes_of

Ints = NDArray[np.int64]
RANKS = 8
RATIOS = (1.0, 1.125, 1.25, 1.5)
BATCHES = 40  # drawn a seed
QWEN3_30B_EXPERT = 3 * 2048 * 768  # weights of an expert
QWEN3_235B_EXPERT = 3 * 4096 * 1536
BEDS = {
    # 2 bytes a weight at 1.555 TB/s, and 2 FLOP a weight and token at 312 TFLOP/s, both at 40 %, which makes
    # the FFN as long as in Figure 6 (281 to 370 us); the rest of a layer so that the 81 us of FFN that METRO
    # saves in Figure 11, less its 29 us, are about 10 % of a layer.
    "qwen3-30b on a100": LayerCost(
        fixed_s=180e-6,
        per_expert_s=2 * QWEN3_30B_EXPERT / (0.4 * 1.555e12),
        per_token_s=2 * QWEN3_30B_EXPERT / (0.4 * 312e12),
    ),
    # 1 byte a weight at 8 TB/s, 4.5 PFLOP/s, both at 60 %; a layer's rest in proportion to bandwidth.
    "qwen3-235b on b200": LayerCost(
        fixed_s=35e-6,
        per_expert_s=QWEN3_235B_EXPERT / (0.6 * 8e12),
        per_token_s=2 * QWEN3_235B_EXPERT / (0.6 * 4.5e15),
    ),
    # The demo model's 6 layers on one core with experts of 1 MB, by benchmarks.decode_replay.
    "demo on cpu": LayerCost(fixed_s=4.9e-3 / 6, per_expert_s=6.9e-5, per_token_s=2.9e-4 / (6 * 4)),
}
DECIDE_S = 26e-6  # the paper's kernel; ours was not timed on a GPU
TP_S = 12e-6  # an all-reduce among the ranks that share an expert, over NVLink; twice a layer


@dataclass(frozen=True)
class Source:
    """A trace in two halves: loads of one, decode routes of the other."""

    name: str
    trace: CalibrationTrace
    fit: Ints
    test: Ints

    @classmethod
    def read(cls, path: Path, seed: int) -> Source:
        """The halves are drawn anew for each seed; BadInput if the file holds no routes."""
        trace = observed(routes_of(path))
        if trace.routes is None:
            raise BadInput(f"{path} holds no routes")
        order = np.random.default_rng(seed).permutation(len(trace.ids))
        return cls(trace.model, trace, order[: len(order) // 2], order[len(order) // 2 :])

    @cached_property
    def experts(self) -> int:
        return self.trace.decode_counts.shape[2]

    @cached_property
    def ratios(self) -> tuple[float, ...]:
        """Slots an expert, those of `RATIOS` rounded to whole slots a rank."""
        return tuple(sorted({self._slots(ratio, RANKS) / self.experts for ratio in RATIOS}))

    def _slots(self, ratio: float, ranks: int) -> int:
        return max(1, round(self.experts * ratio / ranks)) * ranks

    def plan(self, ratio: float, ranks: int = RANKS) -> MetroPlan:
        """Of EPLB's placement with that many slots an expert."""
        load = self.trace.decode_counts[self.fit].sum(axis=0, dtype=np.int64)
        placed = eplb_placement(load, self._slots(ratio, ranks), groups=1, nodes=1, ranks=ranks)
        return MetroPlan.of(hosts_of(placed, self.experts, ranks))

    def batches(self, size: int, number: int, seed: int) -> Ints:
        """int[n, L, E] tokens of each expert in batches of `size` held-out requests."""
        assert self.trace.routes is not None
        assert self.trace.route_offsets is not None
        rng = np.random.default_rng([seed, size])
        steps = self.trace.decode_steps.astype(np.int64)
        able = self.test[steps[self.test] > 0]
        chosen = rng.choice(able, (number, size))
        step = self.trace.route_offsets[chosen] + rng.integers(steps[chosen])
        routes = self.trace.routes[step].astype(np.int64)  # [n, B, L, k]
        layers = routes.shape[2]
        cell = (np.arange(number)[:, None, None, None] * layers + np.arange(layers)[:, None]) * self.experts
        counts = np.bincount((cell + routes).reshape(-1), minlength=number * layers * self.experts)
        return counts.reshape(number, layers, self.experts)

    def prompt_imbalance(self, plan: MetroPlan) -> float:
        """Most prompt tokens on a rank over the mean, EPLB's even spread, all held-out prompts together."""
        counts = self.trace.prefill_counts[self.test].sum(axis=0, dtype=np.int64)
        spread = route_even(counts, plan.shares >= 0).sum(axis=1)
        return float((spread.max(axis=1) / spread.mean(axis=1)).mean())


def served(routing: str, plan: MetroPlan, tokens: Ints) -> Ints:
    """int[n, L, E, G] tokens of each expert on each rank.

    Args:
        routing: even: EPLB's; metro; greedy: the paper's Algorithm 1, experts in the order of their ids;
            optimum.
        plan: of the placement's L layers.
        tokens: int[n, L, E].
    """
    hosts = plan.shares >= 0
    if routing == "greedy":
        ids = np.broadcast_to(np.arange(hosts.shape[1]), hosts.shape[:2])
        plan = replace(plan, shares=np.where(hosts, 0, -1), order=ids)
    route: dict[str, Callable[[ArrayLike], Ints]] = {
        "even": partial(route_even, hosts=hosts),
        "optimum": partial(route_optimal, hosts=hosts),
        "metro": plan.route,
        "greedy": plan.route,
    }
    choice = np.stack([route[routing](batch) for batch in tokens])
    if routing == "even":
        return choice
    return np.where(choice[..., None] == np.arange(hosts.shape[2]), tokens[..., None], 0)


def worst(work: LayerWork) -> float:
    """Most activated experts on a rank, mean over batches and layers."""
    return float(work.activated.max(axis=-1).mean())


def figure_4(options: Options) -> Rows:
    """8 experts on 8 GPUs, each on two, 2 tokens each: what balancing tokens does."""
    hosts = (np.eye(8) + np.roll(np.eye(8), 1, axis=1))[None] > 0
    tokens = np.full((1, 1, 8), 2)
    rows: Rows = []
    for routing, paper in (("even", 2), ("metro", 1), ("optimum", 1)):
        work = LayerWork.gathered(served(routing, MetroPlan.of(hosts), tokens))
        rows.append(
            {
                "routing": routing,
                "most_tokens_of_a_rank": int(work.tokens.max()),
                "most_activated_of_a_rank": int(work.activated.max()),
                "paper_most_activated": paper,
            }
        )
    return rows


def figure_5(options: Options) -> Rows:
    """EPLB's routing by replication and batch: activated experts and a decode step's time."""
    rows: Rows = []
    sources, sizes = _sources(options), (8, 32, 256)
    with Steps(len(sources) * len(sizes)) as steps:
        for name, halves in sources.items():
            for size in sizes:
                first: dict[str, float] = {}
                for ratio in halves[0].ratios:
                    works = _works(options, halves, ratio, size, ("even",))["even"]
                    found = _mean(
                        {"activated": worst(w), "step_us": 1e6 * _step_s("qwen3-30b on a100", w)}
                        for w in works
                    )
                    first = first or found
                    last = ratio == halves[0].ratios[-1]
                    rows.append(
                        {
                            "model": name,
                            "batch_a_rank": size // RANKS,
                            "replication": ratio,
                            "most_activated": found["activated"],
                            "activated_pct": change_pct(found["activated"], first["activated"]),
                            "paper_activated_pct": 30 if last else None,
                            "tpot_pct": change_pct(found["step_us"], first["step_us"]),
                            "paper_tpot_pct": 14 if last else None,
                        }
                    )
                steps.done(f"{name}, {size}")
    return rows


def figure_8(options: Options) -> Rows:
    """Most activated experts on a rank: EPLB's routing, the paper's greedy, ours, the optimum."""
    rows: Rows = []
    sources, sizes = _sources(options), (32, 256)
    with Steps(sum(len(halves[0].ratios) - 1 for halves in sources.values()) * len(sizes)) as steps:
        for name, halves in sources.items():
            for size in sizes:
                for ratio in halves[0].ratios[1:]:
                    works = _works(options, halves, ratio, size, ("even", "greedy", "metro", "optimum"))
                    found = {key: float(np.mean([worst(w) for w in works[key]])) for key in works}
                    rows.append(
                        {"model": name, "batch_size": size, "replication": ratio}
                        | found
                        | {
                            "metro_above_optimum_pct": change_pct(found["metro"], found["optimum"]),
                            "greedy_above_optimum_pct": change_pct(found["greedy"], found["optimum"]),
                            "paper_above_optimum_pct": 10.9,
                            "even_above_optimum_pct": change_pct(found["even"], found["optimum"]),
                            "metro_below_even_pct": 100 * (1 - found["metro"] / found["even"]),
                            "paper_below_even_pct": 42.3,
                        }
                    )
                    steps.done(f"{name}, {size}, {ratio}")
    return rows


def figure_9(options: Options) -> Rows:
    """Decode latency and total throughput by replication, prefill and decode on the same GPUs."""
    mixes = {"decode-heavy": (1024, 2048, -12.9, 15.9), "prefill-heavy": (8192, 512, None, 4.2)}
    bed, batch = "qwen3-30b on a100", 256
    cost = BEDS[bed]
    rows: Rows = []
    for name, halves in _sources(options).items():
        for mix, (prompt, output, paper_tpot, paper_rate) in mixes.items():
            for ratio in halves[0].ratios[1:]:
                works = _works(options, halves, ratio, batch, ("even", "metro"))
                layers, top_k = halves[0].trace.decode_counts.shape[1], halves[0].trace.top_k
                skew = float(np.mean([half.prompt_imbalance(half.plan(ratio)) for half in halves]))
                prefill_s = layers * cost.per_token_s * skew * batch * prompt * top_k / RANKS
                step_s = {
                    routing: float(np.mean([_step_s(bed, w) for w in works[routing]]))
                    + (layers * DECIDE_S if routing == "metro" else 0.0)
                    for routing in works
                }
                rate = {r: batch * (prompt + output) / (prefill_s + output * s) for r, s in step_s.items()}
                shown = ratio == halves[0].ratios[-1]
                rows.append(
                    {
                        "model": name,
                        "mix": mix,
                        "replication": ratio,
                        "even_tpot_ms": 1e3 * step_s["even"],
                        "metro_tpot_ms": 1e3 * step_s["metro"],
                        "tpot_pct": change_pct(step_s["metro"], step_s["even"]),
                        "paper_tpot_pct": paper_tpot if shown else None,
                        "tokens_per_s_pct": change_pct(rate["metro"], rate["even"]),
                        "paper_tokens_per_s_pct": paper_rate if shown else None,
                    }
                )
    return rows


def figure_11(options: Options) -> Rows:
    """A layer's time in parts, EPLB's routing against METRO, by replication."""
    bed, batch = "qwen3-30b on a100", 256
    rows: Rows = []
    for name, halves in _sources(options).items():
        for ratio in halves[0].ratios[1:]:
            works = _works(options, halves, ratio, batch, ("even", "metro"))
            ffn = {
                routing: 1e6
                * float(np.mean([BEDS[bed].rank_s(w).max(axis=-1).mean() for w in works[routing]]))
                for routing in works
            }
            for routing in works:
                decide = 1e6 * DECIDE_S if routing == "metro" else 0.0
                rest = 1e6 * BEDS[bed].fixed_s
                total = rest + decide + ffn[routing]
                rows.append(
                    {
                        "model": name,
                        "replication": ratio,
                        "routing": routing,
                        "rest_us": rest,
                        "decide_us": decide,
                        "ffn_us": ffn[routing],
                        "ffn_less_us": ffn["even"] - ffn[routing],
                        "paper_ffn_less_us": 81 if routing == "metro" and ratio == 1.5 else None,
                        "layer_us": total,
                        "layer_pct": change_pct(total, rest + ffn["even"]),
                        "paper_layer_pct": -10 if routing == "metro" and ratio == 1.5 else None,
                    }
                )
    return rows


def figure_12(options: Options) -> Rows:
    """Decode throughput against TPOT over batch sizes and mappings of 8 GPUs; METRO's gain at equal TPOT."""
    bed = BEDS["qwen3-235b on b200"]
    sizes = (64, 128, 256, 512, 1024)
    rows: Rows = []
    sources = _sources(options)
    with Steps(len(sources) * len(sizes)) as steps:
        for name, halves in sources.items():
            points: Rows = []
            for size in sizes:
                for ep in (1, 2, 4, 8):
                    for ratio in halves[0].ratios if ep > 1 else (1.0,):
                        routings = ("even", "metro") if ratio > 1 else ("even",)
                        works = _works(options, halves, ratio, size, routings, ranks=ep)
                        for routing in routings:
                            step_s = np.mean(
                                [_mapped_s(bed, w, RANKS // ep, routing) for w in works[routing]]
                            )
                            points.append(
                                {
                                    "model": name,
                                    "routing": routing,
                                    "replication": ratio,
                                    "batch_size": size,
                                    "ep": ep,
                                    "tp": RANKS // ep,
                                    "tpot_ms": 1e3 * float(step_s),
                                    "tokens_per_s": size / float(step_s),
                                }
                            )
                steps.done(f"{name}, {size}")
            for ratio in halves[0].ratios[1:]:
                rows += _gain(points, name, ratio)
    return rows


def _gain(points: Rows, name: str, ratio: float) -> Rows:
    """Both frontiers at a replication, and METRO's throughput at the TPOT of each of EPLB's points."""
    frontier: dict[str, Rows] = {}
    for routing in ("even", "metro"):
        mine = [p for p in points if p["routing"] == routing and p["replication"] == ratio]
        mine += [p for p in points if p["ep"] == 1]  # no EP, nothing to route
        frontier[routing] = sorted(
            (p for p in mine if not any(_beats(q, p) for q in mine)), key=lambda p: p["tpot_ms"]
        )
    rows: Rows = []
    for routing, found in frontier.items():
        for point in found:
            other = [
                p["tokens_per_s"] for p in frontier["even"] if p["tpot_ms"] <= point["tpot_ms"] * (1 + 1e-9)
            ]
            rows.append(
                point
                | {
                    "workload": f"{name}, {ratio}x",
                    "model": name,
                    "routing": routing,
                    "replication": ratio,
                    "times_eplb_at_this_tpot": point["tokens_per_s"] / max(other) if other else None,
                    "paper_times_eplb": "1.98 to 4.11" if routing == "metro" else None,
                }
            )
    return rows


def _beats(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a is not b and a["tpot_ms"] <= b["tpot_ms"] and a["tokens_per_s"] > b["tokens_per_s"]


def _mapped_s(cost: LayerCost, work: LayerWork, tp: int, routing: str) -> float:
    """A step's time with experts split among `tp` GPUs each, mean over batches."""
    layer = cost.fixed_s + cost.rank_s(work).max(axis=-1) / tp
    layer = layer + 2 * TP_S * (tp > 1) + DECIDE_S * (routing == "metro")
    return float(layer.sum(axis=-1).mean())


def _step_s(bed: str, work: LayerWork) -> float:
    """A decode step's MoE layers, s, mean over batches."""
    return float(BEDS[bed].layer_s(work).sum(axis=-1).mean())


def _sources(options: Options) -> dict[str, list[Source]]:
    """By model: its halves, one for each seed."""
    if not options.traces:
        raise BadInput("give --trace: a calibration trace with routes, or GPT-OSS-20B's records; one or more")
    found = {}
    for path in options.traces:
        halves = [Source.read(path, seed) for seed in options.seeds]
        found[halves[0].name] = halves
    return found


def _works(
    options: Options,
    halves: list[Source],
    ratio: float,
    size: int,
    routings: tuple[str, ...],
    ranks: int = RANKS,
) -> dict[str, list[LayerWork]]:
    """By routing: the work of the same batches, one entry for each seed."""
    found: dict[str, list[LayerWork]] = {routing: [] for routing in routings}
    for seed, half in zip(options.seeds, halves, strict=True):
        plan = half.plan(ratio, ranks)
        tokens = half.batches(size, options.requests or BATCHES, seed)
        for routing in routings:
            found[routing].append(LayerWork.gathered(served(routing, plan, tokens)))
    return found


def _mean(rows: Any) -> dict[str, float]:
    listed = list(rows)
    return {key: float(np.mean([row[key] for row in listed])) for key in listed[0]}


def _bars(label: str, value: str) -> Callable[[Rows, Path], None]:
    def plot(rows: Rows, path: Path) -> None:
        panels = [
            row
            | {
                "workload": ", ".join(
                    str(row[k]) for k in ("model", "batch_size", "batch_a_rank", "mix") if k in row
                )
            }
            for row in rows
        ]
        bars(panels, label, value, path)

    return plot


FIGURES = {
    "fig4": Figure(
        "What balancing tokens does to activated experts: the example",
        "2 activated experts a GPU when tokens are balanced, 1 in the ideal",
        figure_4,
    ),
    "fig5": Figure(
        "EPLB's routing by replication and batch, 8 ranks: activated experts, and TPOT by the cost model",
        "Qwen3-30B, 8 A100, 1.5x replication: 30 % more experts activated in a decode batch, TPOT +14 %",
        figure_5,
        _bars("replication", "activated_pct"),
    ),
    "fig8": Figure(
        "Most activated experts on a rank: EPLB's routing, the paper's greedy, METRO here, the optimum",
        "METRO at most 10.9 % above the optimum and up to 42.3 % below EPLB",
        figure_8,
        _bars("replication", "metro_below_even_pct"),
    ),
    "fig9": Figure(
        "METRO against EPLB's routing: TPOT and total throughput by the cost model (figures 9 and 10)",
        "TPOT -12.9 % (-21.8 % on B200), throughput +15.9 % (+21.0 %), prefill-heavy +4.2 %, each at most",
        figure_9,
        _bars("replication", "tpot_pct"),
    ),
    "fig11": Figure(
        "A layer's time in parts by the cost model, the paper's 26 us for the decision",
        "the decision takes up to 26 us and saves up to 81 us of FFN; decode latency falls by up to 10 %",
        figure_11,
        _bars("replication", "ffn_less_us"),
    ),
    "fig12": Figure(
        "Decode throughput against TPOT, Pareto fronts over batch size and EP x TP, by the cost model",
        "1.98 to 4.11 times EPLB's throughput at a fixed TPOT",
        figure_12,
        lambda rows, path: lines(rows, "tpot_ms", ["tokens_per_s"], path, by="routing"),
    ),
}  # fmt: skip
