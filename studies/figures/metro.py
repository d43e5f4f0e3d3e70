"""METRO's evaluation on real routes: which replicas a batch activates, and what that costs by `LayerCost`.

Experts are replicated and placed by EPLB on the decode routes of one half of the requests, seed by seed;
batches are drawn from the other half, each request at a random step. Nothing here ran on GPUs: times are
those of a test bed's constants, whose derivation stands beside each (`A100`, `B200`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.expert_placement import hosts_of
from eldr_serve.experts.metro import MetroPlan
from offline.placement.cost import LayerCost, LayerWork
from offline.placement.eplb import eplb_placement
from offline.scenario import observed, routes_of
from studies.figures.common import Figure, Options, Rows, bar_plot, change_pct, line_plot, steps
from studies.replica_choice import route_even, route_optimal
from tools.cli import BadInput
from tools.trace import CalibrationTrace

Ints = NDArray[np.int64]
RANKS = 8
RATIOS = (1.0, 1.125, 1.25, 1.5)
BATCHES = 40  # drawn a seed


@dataclass(frozen=True)
class Bed:
    """A model on GPUs, as `LayerCost` sees it: the trace's experts share the weights of one of its layers.

    Attributes:
        experts, top_k: of the model.
        weights: of one expert.
        bytes_per_s, flop_per_s: of a GPU, as far as they are reached; a weight has 2 bytes.
        rest_s: of a layer, whatever the batch: attention's launches, top-k, dispatch and combine, s.
    """

    experts: int
    top_k: int
    weights: int
    bytes_per_s: float
    flop_per_s: float
    rest_s: float

    def cost(self, trace: CalibrationTrace) -> LayerCost:
        """As many bytes a layer and as many FLOP a token as the model has, with the trace's E and k."""
        return LayerCost(
            fixed_s=self.rest_s,
            per_expert_s=2 * self.weights / self.bytes_per_s * self.experts / trace.decode_counts.shape[2],
            per_token_s=2 * self.weights / self.flop_per_s * self.top_k / trace.top_k,
        )


# 1.555 TB/s and 312 TFLOP/s at 40 %, which makes the FFN about as long as in Figure 6 (281 to 370 us); the
# rest so that what METRO saves in Figure 11, 81 less 29 us, is about 10 % of a layer, attention in it.
A100 = Bed(128, 8, 3 * 2048 * 768, 0.4 * 1.555e12, 0.4 * 312e12, rest_s=180e-6)
# 8 TB/s and 2.25 PFLOP/s at 60 %; the rest in proportion to bandwidth.
B200 = Bed(128, 8, 3 * 4096 * 1536, 0.6 * 8e12, 0.6 * 2.25e15, rest_s=35e-6)
DECIDE_S = 26e-6  # the paper's kernel; ours was not timed on a GPU
KV_S = 2048 * 2048 / (0.6 * 8e12)  # a request's attention in a layer, B200: 2 KB of KV a token, 2,048 tokens
COLLECTIVE_S = 12e-6  # the least that one takes, over NVLink; two a layer
TOKEN_S = 2 * 4096 / (0.6 * 900e9)  # a hidden state of Qwen3-235B to each of its GPUs


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
        return int(self.trace.decode_counts.shape[2])

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


class Halves(list[Source]):
    """A trace's, one for each seed."""

    def __str__(self) -> str:
        return self[0].name


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
    for halves, size in steps(product(_sources(options), (8, 32, 256))):
        cost, ratios = A100.cost(halves[0].trace), halves[0].ratios
        first: dict[str, float] = {}
        for ratio in ratios:
            works = _works(options, halves, ratio, size, ("even",))["even"]
            found = {
                "activated": _mean(map(worst, works)),
                "us": _mean(1e6 * _step_s(cost, w) for w in works),
            }
            first = first or found
            rows.append(
                {
                    "model": halves[0].name,
                    "batch_a_rank": size // RANKS,
                    "replication": ratio,
                    "most_activated": found["activated"],
                    "activated_pct": change_pct(found["activated"], first["activated"]),
                    "paper_activated_pct": 30 if ratio == ratios[-1] else None,
                    "tpot_pct": change_pct(found["us"], first["us"]),
                    "paper_tpot_pct": 14 if ratio == ratios[-1] else None,
                }
            )
    return rows


def figure_8(options: Options) -> Rows:
    """Most activated experts on a rank: EPLB's routing, the paper's greedy, ours, the optimum."""
    rows: Rows = []
    for halves, size in steps(product(_sources(options), (32, 256))):
        for ratio in halves[0].ratios[1:]:
            works = _works(options, halves, ratio, size, ("even", "greedy", "metro", "optimum"))
            found = {key: _mean(map(worst, works[key])) for key in works}
            rows.append(
                {"model": halves[0].name, "batch_size": size, "replication": ratio}
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
    return rows


def figure_9(options: Options) -> Rows:
    """Decode latency and total throughput by replication, prefill and decode on the same GPUs."""
    mixes = {"decode-heavy": (1024, 2048, -12.9, 15.9), "prefill-heavy": (8192, 512, None, 4.2)}
    batch = 256
    rows: Rows = []
    for halves, mix in steps(product(_sources(options), mixes)):
        prompt, output, paper_tpot, paper_rate = mixes[mix]
        cost = A100.cost(halves[0].trace)
        layers, top_k = halves[0].trace.decode_counts.shape[1], halves[0].trace.top_k
        for ratio in halves[0].ratios[1:]:
            works = _works(options, halves, ratio, batch, ("even", "metro"))
            skew = _mean(half.prompt_imbalance(half.plan(ratio)) for half in halves)
            prefill_s = layers * cost.per_token_s * skew * batch * prompt * top_k / RANKS
            step_s = {
                routing: _mean(_step_s(cost, w) for w in works[routing])
                + (layers * DECIDE_S if routing == "metro" else 0.0)
                for routing in works
            }
            rate = {r: batch * (prompt + output) / (prefill_s + output * s) for r, s in step_s.items()}
            shown = ratio == halves[0].ratios[-1]
            rows.append(
                {
                    "model": halves[0].name,
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
    rows: Rows = []
    for halves in _sources(options):
        cost = A100.cost(halves[0].trace)
        rest = 1e6 * cost.fixed_s
        for ratio in halves[0].ratios[1:]:
            works = _works(options, halves, ratio, 256, ("even", "metro"))
            ffn = {
                routing: 1e6 * _mean(cost.rank_s(w).max(axis=-1).mean() for w in works[routing])
                for routing in works
            }
            for routing in works:
                decide = 1e6 * DECIDE_S if routing == "metro" else 0.0
                total = rest + decide + ffn[routing]
                shown = routing == "metro" and ratio == 1.5
                rows.append(
                    {
                        "model": halves[0].name,
                        "replication": ratio,
                        "routing": routing,
                        "rest_us": rest,
                        "decide_us": decide,
                        "ffn_us": ffn[routing],
                        "ffn_less_us": ffn["even"] - ffn[routing],
                        "paper_ffn_less_us": 81 if shown else None,
                        "layer_us": total,
                        "layer_pct": change_pct(total, rest + ffn["even"]),
                        "paper_layer_pct": -10 if shown else None,
                    }
                )
    return rows


def figure_12(options: Options) -> Rows:
    """Decode throughput against TPOT over batch sizes and mappings of 8 GPUs; METRO's gain at equal TPOT."""
    rows: Rows = []
    for halves in _sources(options):
        name, cost, ratios = halves[0].name, B200.cost(halves[0].trace), halves[0].ratios[1:]
        points: Rows = []
        for size, (ep, ratio) in steps(
            product((64, 128, 256, 512, 1024), [(1, 1.0), *product((2, 4, 8), ratios)])
        ):
            works = _works(options, halves, ratio, size, ("even", "metro")[: 2 if ep > 1 else 1], ranks=ep)
            for routing in works:
                step_s = _mean(_mapped_s(cost, w, size, ep, routing) for w in works[routing])
                points.append(
                    {
                        "model": name,
                        "routing": routing if ep > 1 else "no EP",
                        "replication": ratio if ep > 1 else None,
                        "batch_size": size,
                        "ep": ep,
                        "tp": RANKS // ep,
                        "tpot_ms": 1e3 * step_s,
                        "tokens_per_s": size / step_s,
                    }
                )
        for ratio in ratios:
            rows += _gain(points, name, ratio)
    return rows


def _gain(points: Rows, name: str, ratio: float) -> Rows:
    """The fronts at a replication, and each point's throughput over EPLB's best at no longer TPOT."""
    fronts = {
        routing: [p for p in points if p["routing"] == routing and p["replication"] in (ratio, None)]
        for routing in ("even", "metro", "no EP")
    }
    fronts = {
        routing: sorted((p for p in mine if not any(_beats(q, p) for q in mine)), key=lambda p: p["tpot_ms"])
        for routing, mine in fronts.items()
    }
    rows: Rows = []
    for routing, front in fronts.items():
        for point in front:
            reached = [p["tokens_per_s"] for p in fronts["even"] if p["tpot_ms"] <= point["tpot_ms"]]
            rows.append(
                {"workload": f"{name}, {ratio}x"}
                | point
                | {
                    "replication": ratio,
                    "times_eplb": point["tokens_per_s"] / max(reached) if reached else None,
                    "paper_times_eplb": "1.98 to 4.11" if routing == "metro" else None,
                }
            )
    return rows


def _beats(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a is not b and a["tpot_ms"] <= b["tpot_ms"] and a["tokens_per_s"] > b["tokens_per_s"]


def _mapped_s(cost: LayerCost, work: LayerWork, size: int, ep: int, routing: str) -> float:
    """A step's time with `ep` ranks of RANKS / ep GPUs, which split their experts; mean over batches, s.

    Hidden states pass twice for EP (dispatch, combine) and four times for TP (two all-reduces).
    """
    tp = RANKS // ep
    ffn = cost.rank_s(work).max(axis=-1) / tp
    passes = 2 * (ep > 1) + 4 * (tp > 1)
    network = COLLECTIVE_S * 2 * ((ep > 1) + (tp > 1)) + TOKEN_S * size * passes
    layer = cost.fixed_s + ffn + KV_S * size / RANKS + network + DECIDE_S * (routing == "metro")
    return float(layer.sum(axis=-1).mean())


def _step_s(cost: LayerCost, work: LayerWork) -> float:
    """A decode step, s, mean over batches."""
    return float(cost.layer_s(work).sum(axis=-1).mean())


def _sources(options: Options) -> list[Halves]:
    """Of each trace."""
    if not options.traces:
        raise BadInput("give --trace: a calibration trace with routes, or GPT-OSS-20B's records; one or more")
    return [Halves(Source.read(path, seed) for seed in options.seeds) for path in options.traces]


def _works(
    options: Options, halves: Halves, ratio: float, size: int, routings: tuple[str, ...], ranks: int = RANKS
) -> dict[str, list[LayerWork]]:
    """By routing: the work of the same batches, one entry for each seed."""
    found: dict[str, list[LayerWork]] = {routing: [] for routing in routings}
    for seed, half in zip(options.seeds, halves, strict=True):
        plan = half.plan(ratio, ranks)
        tokens = half.batches(size, options.requests or BATCHES, seed)
        for routing in routings:
            found[routing].append(LayerWork.gathered(served(routing, plan, tokens)))
    return found


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


_PANELS = ("model", "batch_size", "batch_a_rank", "mix")
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
        bar_plot("replication", "activated_pct", _PANELS),
    ),
    "fig8": Figure(
        "Most activated experts on a rank: EPLB's routing, the paper's greedy, METRO here, the optimum",
        "METRO at most 10.9 % above the optimum and up to 42.3 % below EPLB",
        figure_8,
        bar_plot("replication", "metro_below_even_pct", _PANELS),
    ),
    "fig9": Figure(
        "METRO against EPLB's routing: TPOT and total throughput by the cost model (figures 9 and 10)",
        "TPOT -12.9 % (-21.8 % on B200), throughput +15.9 % (+21.0 %), prefill-heavy +4.2 %, each at most",
        figure_9,
        bar_plot("replication", "tpot_pct", _PANELS),
    ),
    "fig11": Figure(
        "A layer's time in parts by the cost model, the paper's 26 us for the decision",
        "the decision takes up to 26 us and saves up to 81 us of FFN; decode latency falls by up to 10 %",
        figure_11,
        bar_plot("replication", "ffn_less_us", _PANELS),
    ),
    "fig12": Figure(
        "Decode throughput against TPOT, Pareto fronts over batch size and EP x TP, by the cost model",
        "1.98 to 4.11 times EPLB's throughput at a fixed TPOT",
        figure_12,
        line_plot("tpot_ms", "tokens_per_s", by="routing"),
    ),
}  # fmt: skip
