"""Batches with a changing mix of domains, served under expert parallelism with different placement rules.

A batch decodes STEPS steps. Its latency is the sum over steps and MoE layers of the slowest rank's time
(`LayerCost`), without attention, plus the cost of migration. Requests come from the held-out half. A request
stays on one rank, and replays the experts of an observed request from a random step on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.migration import Links, plan_migration
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import Topology, hosts_of
from offline.expert_placement.alignment import minimise_moves
from offline.expert_placement.cost import LayerCost, LayerWork
from offline.expert_placement.director import director_placement
from offline.expert_placement.forecast import decode_correction, expected_workload
from offline.expert_placement.workload import placed_work
from offline.scenario import read_calibration_trace

STEPS = 256  # decode steps of a batch, in which observed steps repeat
PER_RANK = 64  # requests per rank
_CONCENTRATION = 0.3  # concentration of the Dirichlet mix: one or two domains dominate a batch

# Qwen3-30B-A3B in bf16: 3 matrices of 2048 x 768 per expert, hidden states of 2048.
EXPERT_BYTES = 3 * 2048 * 768 * 2.0
TOKEN_BYTES = 2048 * 2.0
_FLOPS = 2 * 3 * 2048 * 768  # operations of one expert for one token


def _cluster(hbm: float, flops: float, near: float, far: float) -> tuple[LayerCost, Links]:
    """Return costs from memory bytes/s, FLOP/s (half of it reached), and link bytes/s of a GPU."""
    cost = LayerCost(
        fixed_s=0,
        per_expert_s=EXPERT_BYTES / hbm,
        per_token_s=_FLOPS / (flops / 2),
        near_byte_s=1 / near,
        far_byte_s=1 / far,
    )
    return cost, Links(expert_bytes=EXPERT_BYTES, near_byte_s=1 / near, far_byte_s=1 / far, commit_s=1e-6)


# The paper's clusters, 8 GPUs per node, by data sheets: H200 with NVLink 4 (450 GB/s per direction) and
# InfiniBand NDR (400 Gb/s per GPU); RTX 4090 with PCIe 4.0 x16 (32 GB/s) and one such adapter per node.
CLUSTERS = {
    "H200": _cluster(4.8e12, 989e12, 450e9, 50e9),
    "RTX 4090": _cluster(1.008e12, 165e12, 32e9, 50e9 / 8),
}


@dataclass(frozen=True)
class Batch:
    """Requests that decode together."""

    requests: NDArray[np.int64]  # indices in the trace; request i lives on rank i mod G
    tokens: NDArray[np.float32]  # [T, L, G, E], tokens of each observed step by layer, source rank and expert

    @property
    def workload(self) -> NDArray[np.float64]:
        """Return [L, G, E] tokens of a step, on average."""
        return np.asarray(self.tokens.mean(axis=0, dtype=np.float64))


Forecast = Callable[[Batch], NDArray[np.float64]]


def read_routes(path: Path) -> CalibrationTrace:
    """Read a calibration trace with routes, or published routes. Raise UserInputError without routes."""
    trace = read_calibration_trace(path)
    if trace.routes is None:
        raise UserInputError(f"{path} has no routes (calibrate with --routes)")
    if len(set(trace.decode_steps.tolist())) > 1:
        raise UserInputError(
            f"the requests of {path} have different numbers of decode steps: give `eldr routes` equal "
            "--output-tokens and --min-output-tokens"
        )
    return trace


def split(trace: CalibrationTrace, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return requests to fit on, and to measure with."""
    order = np.random.default_rng(seed).permutation(len(trace.ids))
    return order[::2], order[1::2]


def shifting_batches(
    trace: CalibrationTrace, members: NDArray[np.int64], number: int, ranks: int, seed: int
) -> list[Batch]:
    """Return batches with separate mixes of domains, drawn with replacement."""
    rng = np.random.default_rng([seed, 7])
    domains = np.array(trace.domains)[members]
    names, count = np.unique(domains, return_counts=True)
    names = names[count >= 4]
    if not len(names):
        raise UserInputError("no domain has 8 requests")
    batches = []
    for _ in range(number):
        mix = rng.dirichlet(np.full(len(names), _CONCENTRATION))
        domain_of_request = rng.choice(names, PER_RANK * ranks, p=mix)
        requests = np.array([rng.choice(members[domains == name]) for name in domain_of_request])
        batches.append(Batch(requests, _tokens(trace, requests, ranks, rng)))
    return batches


def _tokens(
    trace: CalibrationTrace, requests: NDArray[np.int64], ranks: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    assert trace.routes is not None
    steps = int(trace.decode_steps[0])
    _, layers, experts = trace.prefill_counts.shape
    routes = trace.routes.reshape(-1, steps, layers, trace.top_k)
    tokens = np.zeros((steps, layers, ranks, experts), np.float32)
    step, layer, _ = np.ogrid[:steps, :layers, : trace.top_k]
    for place, request in enumerate(requests):
        request_routes = np.roll(routes[request], int(rng.integers(steps)), axis=0)
        tokens[step, layer, place % ranks, request_routes] += 1  # the experts of a token are distinct
    return tokens


def correction(trace: CalibrationTrace, past: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `decode_correction` [L, E] of the requests `past`."""
    columns = (trace.prefill_counts, trace.prompt_tokens, trace.decode_counts, trace.decode_steps)
    return decode_correction(*(column[past] for column in columns))


def counted_forecast(counts: NDArray[np.generic], tokens: NDArray[np.generic]) -> Forecast:
    """Forecast one step of each request from its expert frequencies: `counts` [N, L, E] of `tokens` [N]."""

    def forecast(batch: Batch) -> NDArray[np.float64]:
        ranks = batch.tokens.shape[2]
        by_rank = [batch.requests[rank::ranks] for rank in range(ranks)]
        return np.stack([expected_workload(counts[own], tokens[own], 1) for own in by_rank], axis=1)

    return forecast


@dataclass(frozen=True)
class GpuCluster:
    """GPUs and their costs."""

    topology: Topology
    cost: LayerCost
    links: Links
    slots: int

    @classmethod
    def from_name(cls, name: str, ranks: int, experts: int) -> GpuCluster:
        """Return one of CLUSTERS with one spare slot per rank."""
        topology = Topology(ranks=ranks, nodes=max(1, ranks // 8))
        return cls(topology, *CLUSTERS[name], -(-experts // ranks) + 1)

    def place(
        self, workload: NDArray[np.float64], start: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return DIRECTOR's placement for the workload or, if `start` is given, its repair of `start`."""
        placement, _ = director_placement(
            workload,
            topology=self.topology,
            slots=self.slots,
            cost=self.cost,
            token_bytes=TOKEN_BYTES,
            start=start,
            tolerance=2e-3 if start is None else 0.02,
        )
        return placement

    def vanilla(self, layers: int, experts: int) -> NDArray[np.int64]:
        """Return experts in order without replicas. Spare slots repeat the rank's last expert."""
        rank = np.arange(experts) * self.topology.ranks // experts
        rows = [np.flatnonzero(rank == g) for g in range(self.topology.ranks)]
        if any(not len(row) for row in rows):
            raise UserInputError(f"{experts} experts are fewer than {self.topology.ranks} ranks")
        line = np.concatenate([np.pad(row, (0, self.slots - len(row)), mode="edge") for row in rows])
        return np.tile(line, (layers, 1))

    def step_s(self, tokens: NDArray[np.floating], placement: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float[..., L], s, for tokens[..., L, G, E]."""
        return self.cost.layer_s(self.work(tokens, placement))

    def windows_s(self, tokens: NDArray[np.floating], placement: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float[L] in seconds: the mean rank's computation in each layer, while no all-to-all runs."""
        work = self.work(tokens, placement)
        idle = replace(work, near_bytes=0 * work.near_bytes, far_bytes=0 * work.far_bytes)
        return np.asarray(self.cost.rank_s(idle).mean(axis=-1))

    def work(self, tokens: NDArray[np.floating], placement: NDArray[np.int64]) -> LayerWork:
        """Return the work [..., L, G] of each rank for tokens[..., L, G, E]."""
        hosts = hosts_of(placement, tokens.shape[-1], self.topology.ranks)
        return placed_work(tokens, hosts, topology=self.topology, token_bytes=TOKEN_BYTES)


@dataclass(frozen=True)
class ServedBatches:
    """The latency of each batch of a run, in ms, and the number of experts moved before it, in all layers."""

    batch_ms: NDArray[np.float64]
    moves: NDArray[np.int64]


def serve_with_one_placement(
    cluster: GpuCluster, batches: list[Batch], placement: NDArray[np.int64]
) -> ServedBatches:
    """Serve all batches with the same placement."""
    latency_s = [STEPS * cluster.step_s(batch.tokens, placement).sum(axis=1).mean() for batch in batches]
    return ServedBatches(1e3 * np.array(latency_s), np.zeros(len(batches), np.int64))


def serve_adaptively(
    cluster: GpuCluster,
    batches: list[Batch],
    placement: NDArray[np.int64],
    forecast: Forecast,
    *,
    overlapped: bool = True,
) -> ServedBatches:
    """Before each batch, change to a placement for the forecast if it pays.

    The candidates are a new placement and a repair of the old one; the one with the larger forecast saving is
    chosen.

    Args:
        overlapped: whether experts move in compute windows of the batch; otherwise its first step waits
            until they have moved.
    """
    latency_s, moves = [], []
    for batch in batches:
        expected = forecast(batch)
        changes = [
            plan_change(cluster, expected, placement, target, overlapped=overlapped)
            for target in (cluster.place(expected), cluster.place(expected, placement))
        ]
        change = max(changes, key=lambda change: change.saved_s)
        before, after = (cluster.step_s(batch.tokens, p).mean(axis=0) for p in (placement, change.placement))
        latency_s.append((before * change.waits + after * (STEPS - change.waits)).sum() + change.stopped_s)
        moves.append(change.moves)
        placement = change.placement
    return ServedBatches(1e3 * np.array(latency_s), np.array(moves))


class PlannedChange(NamedTuple):
    """A change of the placement before a batch. `saved_s` is the time that it saves by the forecast."""

    saved_s: float
    placement: NDArray[np.int64]  # [L, P]
    waits: NDArray[np.int64]  # [L], steps that run before the layer has its new placement
    stopped_s: float  # time in which no step runs
    moves: int


def plan_change(
    cluster: GpuCluster,
    expected: NDArray[np.float64],
    placement: NDArray[np.int64],
    target: NDArray[np.int64],
    *,
    overlapped: bool,
) -> PlannedChange:
    """Plan the change to the target of the layers for which it pays by the expected tokens [L, G, E]."""
    new = minimise_moves(placement, target, cluster.topology.ranks)
    gain = cluster.step_s(expected, placement) - cluster.step_s(expected, new)
    plan = plan_migration(
        placement,
        new,
        topology=cluster.topology,
        links=cluster.links,
        windows_s=cluster.windows_s(expected, placement),
        gain_s=gain,
        steps=STEPS,
    )
    gain = np.where((plan.placement == new).all(axis=1), gain, 0.0)
    if overlapped:
        waits = np.minimum(plan.ready_steps, STEPS)
        saved_s = float((gain * (STEPS - waits)).sum()) - plan.cost_s
        return PlannedChange(saved_s, plan.placement, waits, plan.cost_s, len(plan.moves))
    # All steps wait for the last transfer, so the layers that are ready later may keep their placement.
    number = np.bincount(np.array([move.layer for move in plan.moves], np.int64), minlength=len(gain))
    order = np.argsort(plan.ready_s, kind="stable")
    stopped_s = plan.ready_s[order] + cluster.links.commit_s * np.cumsum(number[order])
    all_saved_s = STEPS * np.cumsum(gain[order]) - stopped_s
    last = int(all_saved_s.argmax())
    no_waits = np.zeros(len(gain), np.int64)
    if all_saved_s[last] <= 0:
        return PlannedChange(0.0, placement, no_waits, 0.0, 0)
    taken, changed = order[: last + 1], placement.copy()
    changed[taken] = plan.placement[taken]
    moves = int(number[taken].sum())
    return PlannedChange(float(all_saved_s[last]), changed, no_waits, float(stopped_s[last]), moves)


def reactive_forecast(batches: list[Batch], first: NDArray[np.float64]) -> Forecast:
    """Forecast the true workload of the previous batch, or `first` for the first batch."""
    before = {id(later): earlier.workload for earlier, later in itertools.pairwise(batches)}
    return lambda batch: before.get(id(batch), first)
