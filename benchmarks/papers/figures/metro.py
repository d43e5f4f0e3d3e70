"""METRO's evaluation on real routes: the replicas that a batch activates, and their time by `LayerCost`.

EPLB replicates and places experts by the decode routes of one half of the requests, for each seed. Batches
come from the other half, each request at a random step. Nothing here ran on GPUs: times come from
`layer_cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.lib.ep.replica_choice import route_even, route_optimal
from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    bar_plot,
    change_pct,
    line_plot,
    with_progress,
)
from eldr_serve.arrays import Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import hosts_of
from eldr_serve.experts.parallel.metro import MetroPlan
from offline.expert_placement.cost import LayerCost, LayerWork
from offline.expert_placement.packed_placements import eplb_placement
from offline.scenario import read_calibration_trace

RANKS = 8
RATIOS = (1.0, 1.125, 1.25, 1.5)
BATCHES = 40  # batches drawn for each seed

# An A100: 1.555 TB/s and 312 TFLOP/s at 40 %, which makes the FFN about as long as in Figure 6 (281 to
# 370 us); Qwen3-30B-A3B's layer of 128 experts, 8 per token, 2 bytes per weight.
BYTES_PER_S, FLOP_PER_S = 0.4 * 1.555e12, 0.4 * 312e12
EXPERTS, TOP_K, WEIGHTS = 128, 8, 3 * 2048 * 768
FLOP_PER_BYTE = {"h100": 989e12 / 3.35e12, "b200": 2250e12 / 8e12}  # dense BF16, over HBM's bandwidth
REST_S = 180e-6  # seconds of a layer for any batch: METRO saves 81 - 29 us, 10 % of it (Figure 11)


def layer_cost(trace: CalibrationTrace) -> LayerCost:
    """Return a cost with the model's bytes per layer and FLOP per token, scaled to the trace's E and k."""
    return LayerCost(
        fixed_s=REST_S,
        per_expert_s=2 * WEIGHTS / BYTES_PER_S * EXPERTS / trace.decode_counts.shape[2],
        per_token_s=2 * WEIGHTS / FLOP_PER_S * TOP_K / trace.top_k,
    )


@dataclass(frozen=True)
class HalvedTrace:
    """A trace in two halves: loads of one, decode routes of the other."""

    name: str
    trace: CalibrationTrace
    fit: Ints
    test: Ints

    @classmethod
    def read(cls, path: Path, seed: int) -> HalvedTrace:
        """Read a trace and split it by the seed. Raise UserInputError if the file has no routes."""
        trace = read_calibration_trace(path)
        if trace.routes is None:
            raise UserInputError(f"{path} has no routes")
        order = np.random.default_rng(seed).permutation(len(trace.ids))
        return cls(trace.model, trace, order[: len(order) // 2], order[len(order) // 2 :])

    @cached_property
    def experts(self) -> int:
        return int(self.trace.decode_counts.shape[2])

    @cached_property
    def ratios(self) -> tuple[float, ...]:
        """Return the slots per expert: `RATIOS` rounded to whole slots of a rank."""
        return tuple(sorted({self._slots(ratio) / self.experts for ratio in RATIOS}))

    def _slots(self, ratio: float) -> int:
        return max(1, round(self.experts * ratio / RANKS)) * RANKS

    def plan(self, ratio: float) -> MetroPlan:
        """Return the plan of EPLB's placement with that many slots per expert."""
        load = self.trace.decode_counts[self.fit].sum(axis=0, dtype=np.int64)
        experts = eplb_placement(load, self._slots(ratio), groups=1, nodes=1, ranks=RANKS)
        return MetroPlan.from_hosts(hosts_of(experts, self.experts, RANKS))

    def batches(self, size: int, number: int, seed: int) -> Ints:
        """Return int[n, L, E]: tokens of each expert in batches of `size` held-out requests."""
        assert self.trace.routes is not None
        assert self.trace.route_offsets is not None
        rng = np.random.default_rng([seed, size])
        steps = self.trace.decode_steps.astype(np.int64)
        with_steps = self.test[steps[self.test] > 0]
        requests = rng.choice(with_steps, (number, size))
        step = self.trace.route_offsets[requests] + rng.integers(steps[requests])
        routes = self.trace.routes[step].astype(np.int64)  # [n, B, L, k]
        layers = routes.shape[2]
        cell = (np.arange(number)[:, None, None, None] * layers + np.arange(layers)[:, None]) * self.experts
        counts = np.bincount((cell + routes).reshape(-1), minlength=number * layers * self.experts)
        return counts.reshape(number, layers, self.experts)


class TraceBySeed(list[HalvedTrace]):
    """A trace in two halves for each seed."""

    def __str__(self) -> str:
        return self[0].name


def tokens_on_ranks(routing: str, plan: MetroPlan, tokens: Ints) -> Ints:
    """Return int[n, L, E, G]: tokens of each expert on each rank, from tokens int[n, L, E].

    The routing is even (EPLB's), metro, greedy (the paper's Algorithm 1, experts by id) or optimum.
    """
    hosts = plan.shares >= 0
    if routing == "greedy":
        plan = MetroPlan.as_written(hosts)
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


def mean_worst_rank_experts(work: LayerWork) -> float:
    """Return the most activated experts on a rank, mean over batches and layers."""
    return float(work.activated.max(axis=-1).mean())


def figure_3(options: Options) -> Rows:
    """Compare the operational intensity of a layer's experts with FLOPs per byte of GPUs (Figure 3).

    A weight of an active expert is read once, 2 bytes, for 2 FLOP per token that chose the expert.
    """
    rows: Rows = []
    for halves, size in with_progress(product(read_halves(options), (1, 4, 16, 64, 256, 1024))):
        drawn = [
            half.batches(size, options.requests or BATCHES, seed)
            for seed, half in zip(options.seeds, halves, strict=True)
        ]
        active = _mean(float((tokens > 0).sum(axis=2).mean()) for tokens in drawn)
        intensity = size * halves[0].trace.top_k / active
        row = {"model": halves[0].name, "batch_size": size, "activated": active, "flop_per_byte": intensity}
        rows.append(row | {f"below_{gpu}": ratio / intensity for gpu, ratio in FLOP_PER_BYTE.items()})
    return rows


def figure_4(options: Options) -> Rows:
    """Show the effect of balancing tokens: 8 experts on 8 GPUs, each on two, 2 tokens each (Figure 4)."""
    hosts = (np.eye(8) + np.roll(np.eye(8), 1, axis=1))[None] > 0
    tokens = np.full((1, 1, 8), 2)
    rows: Rows = []
    for routing, paper in (("even", 2), ("metro", 1), ("optimum", 1)):
        work = LayerWork.from_gathered(tokens_on_ranks(routing, MetroPlan.from_hosts(hosts), tokens))
        row = {"routing": routing, "most_tokens_of_a_rank": int(work.tokens.max())}
        activated = int(work.activated.max())
        rows.append(row | {"most_activated_of_a_rank": activated, "paper_most_activated": paper})
    return rows


def figure_5(options: Options) -> Rows:
    """Measure activated experts and decode step time with EPLB's routing, by replication and batch."""
    rows: Rows = []
    for halves, size in with_progress(product(read_halves(options), (8, 32, 256))):
        cost, ratios = layer_cost(halves[0].trace), halves[0].ratios
        first_means: dict[str, float] = {}
        for ratio in ratios:
            works = _works(options, halves, ratio, size, ("even",))["even"]
            means = {"activated": _mean(map(mean_worst_rank_experts, works))}
            means["tpot"] = _mean(float(cost.layer_s(work).sum(axis=-1).mean()) for work in works)
            first_means, is_last = first_means or means, ratio == ratios[-1]
            row = {"model": halves[0].name, "batch_a_rank": size // RANKS, "replication": ratio}
            row["most_activated"] = means["activated"]
            for name, paper in (("activated", 30), ("tpot", 14)):
                row[f"{name}_pct"] = change_pct(means[name], first_means[name])
                row[f"paper_{name}_pct"] = paper if is_last else None
            rows.append(row)
    return rows


def figure_8(options: Options) -> Rows:
    """Compare the most activated experts on a rank: EPLB, the paper's greedy, this METRO, the optimum."""
    rows: Rows = []
    for halves, size in with_progress(product(read_halves(options), (32, 256))):
        for ratio in halves[0].ratios[1:]:
            works = _works(options, halves, ratio, size, ("even", "greedy", "metro", "optimum"))
            means = {key: _mean(map(mean_worst_rank_experts, works[key])) for key in works}
            row = {"model": halves[0].name, "batch_size": size, "replication": ratio} | means
            for name in ("metro", "greedy", "even"):
                row[f"{name}_above_optimum_pct"] = change_pct(means[name], means["optimum"])
            below = {"metro_below_even_pct": -change_pct(means["metro"], means["even"])}
            rows.append(row | below | {"paper_above_optimum_pct": 10.9, "paper_below_even_pct": 42.3})
    return rows


def read_halves(options: Options) -> list[TraceBySeed]:
    """Read each trace in two halves, for each seed."""
    traces = options.all_traces("one or more calibration traces with routes, or published routes")
    return [TraceBySeed(HalvedTrace.read(path, seed) for seed in options.seeds) for path in traces]


def _works(
    options: Options, halves: TraceBySeed, ratio: float, size: int, routings: tuple[str, ...]
) -> dict[str, list[LayerWork]]:
    """Return the work of the same batches by routing, one entry per seed."""
    works: dict[str, list[LayerWork]] = {routing: [] for routing in routings}
    for seed, half in zip(options.seeds, halves, strict=True):
        plan = half.plan(ratio)
        tokens = half.batches(size, options.requests or BATCHES, seed)
        for routing in routings:
            works[routing].append(LayerWork.from_gathered(tokens_on_ranks(routing, plan, tokens)))
    return works


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


_PANELS = ("model", "batch_size", "batch_a_rank")
FIGURES = {
    "fig3": PaperFigure(
        "Operational intensity of a layer's experts by batch, and FLOPs per byte of GPUs",
        "two orders of magnitude below the GPUs' up to 64 tokens, 1.5 to 3 times below at 1024",
        figure_3,
        line_plot("batch_size", "flop_per_byte", panels=_PANELS[:1]),
    ),
    "fig4": PaperFigure(
        "What balancing tokens does to activated experts: the example",
        "2 activated experts per GPU when tokens are balanced, 1 in the ideal",
        figure_4,
    ),
    "fig5": PaperFigure(
        "EPLB's routing by replication and batch, 8 ranks: activated experts, and TPOT by the cost model",
        "Qwen3-30B, 8 A100, 1.5x replication: 30 % more experts activated in a decode batch, TPOT +14 %",
        figure_5,
        bar_plot("replication", "activated_pct", _PANELS),
    ),
    "fig8": PaperFigure(
        "Most activated experts on a rank: EPLB's routing, the paper's greedy, METRO here, the optimum",
        "METRO at most 10.9 % above the optimum and up to 42.3 % below EPLB",
        figure_8,
        bar_plot("replication", "metro_below_even_pct", _PANELS),
    ),
}
