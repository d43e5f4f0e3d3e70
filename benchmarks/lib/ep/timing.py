"""Timed work of EP ranks: whole layers together, each rank's share alone, and messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.lib.ep.network import ONE_NODE, TRAFFIC, Network, RankTraffic
from benchmarks.lib.ep.parallel_layer import (
    ParallelLayer,
    Products,
    Routing,
    all_replicas,
    one_replica,
    top_k_gate,
    vllm_products,
)
from benchmarks.lib.ep.ranks import device, read_experts, read_gate
from eldr_serve.experts.expert_placement import hosts_of
from eldr_serve.experts.parallel.metro import MetroPlan

STAGES = ("dispatch", "gate", "route", "experts", "combine")
ACTIVATED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
TOKENS_PER_EXPERT = (1, 2, 4, 8)
MESSAGE_BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
ONCE_A_NODE = "all-to-all, once a node"  # a dispatch; the others are "all-gather" and "all-to-all"


class LayerArm(NamedTuple):
    """One setting of a comparison."""

    replication: float  # slots / experts
    routing: str
    dispatch: str


@dataclass(frozen=True)
class RankJob:
    """Common input of all ranks: the model, placements by replication, and batches of routes."""

    model: Path
    ranks: int
    num_experts: int  # E, routed experts of a layer
    placements: dict[float, NDArray[np.int64]]  # int[L, P]
    routes: NDArray[np.int64]  # int[B, L, T, k], B batches
    arms: tuple[LayerArm, ...]
    rounds: int  # calls of each batch, layer and arm
    seed: int
    network: Network = ONE_NODE

    def routing(self, arm: LayerArm, layer: int) -> Routing:
        """Return the function that sends tokens to ranks in this layer under the arm's rule and placement."""
        hosts = hosts_of(self.placements[arm.replication][layer : layer + 1], self.num_experts, self.ranks)[0]
        if arm.routing == "metro":
            return one_replica(MetroPlan.from_hosts(hosts).route, len(hosts))
        return all_replicas(hosts)

    def tokens_by_rank(self, arm: LayerArm) -> NDArray[np.int64]:
        """Return int[B, L, E, G]: tokens of each expert on each rank."""
        batches, layers = self.routes.shape[:2]
        tokens = np.zeros((batches, layers, self.num_experts, self.ranks), np.int64)
        for layer in range(layers):
            route = self.routing(arm, layer)
            for b in range(batches):
                experts = self.routes[b, layer]
                # All-to-all: each rank chooses for its own tokens.
                parts = 1 if arm.dispatch == "all-gather" else self.ranks
                for home, chunk in enumerate(np.split(experts, parts)):
                    np.add.at(tokens[b, layer], (chunk, route(chunk, np.full(len(chunk), home))), 1)
        return tokens


class _LocalExperts:
    """All layers' experts in this process's memory, to which the slots of a placement point."""

    def __init__(self, job: RankJob) -> None:
        self._job = job
        layers = range(job.routes.shape[1])
        weights = (read_experts(job.model, layer, range(job.num_experts)) for layer in layers)
        self._products = [vllm_products(w13.to(device()), w2.to(device())) for w13, w2 in weights]
        self._gates = [read_gate(job.model, layer).to(device()) for layer in layers]
        self.hidden = self._gates[0].shape[1]
        self.top_k = job.routes.shape[3]

    def products(self, layer: int, experts: NDArray[np.int64]) -> Products:
        """Return the products of slots that hold these experts."""
        expert_of_slot = torch.as_tensor(experts, device=device())
        return lambda rows, slot: self._products[layer](rows, expert_of_slot[slot])

    def gate(self, layer: int, recorded: NDArray[np.int64]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the model's gate, forced to the recorded choices int[T, k]."""
        gate, experts = top_k_gate(self._gates[layer], self.top_k), torch.as_tensor(recorded, device=device())
        return lambda tokens: (gate(tokens)[0], experts)

    def time_products(self, layer: int, rows: Tensor, slot: Tensor) -> float:
        """Time the experts of these rows, all of which are local; return the seconds."""
        products = self.products(layer, np.arange(self._job.num_experts))
        started_at_s = _now_s()
        products(rows, slot)
        return _now_s() - started_at_s

    def draw_tokens(self, number: int) -> Tensor:
        """Draw hidden states. Their values do not affect a layer's time."""
        return torch.randn(number, self.hidden, device=device()).bfloat16()


class LayerRun(NamedTuple):
    """The measurements of `time_layers_together` on one rank, by arm."""

    seconds: dict[LayerArm, NDArray[np.float64]]  # [B, L, rounds, stage]
    traffic: dict[LayerArm, NDArray[np.int64]]  # [B, L, columns of TRAFFIC]; only all-to-alls are counted


def time_layers_together(rank: int, job: RankJob) -> LayerRun:
    """Time each stage while the ranks start every layer together."""
    experts_of_rank = _LocalExperts(job)
    batches, layers, tokens, _ = job.routes.shape
    rank_tokens = tokens // job.ranks
    start = rank * rank_tokens
    times = {arm: np.zeros((batches, layers, job.rounds, len(STAGES))) for arm in job.arms}
    counts = {arm: np.zeros((batches, layers, len(TRAFFIC)), np.int64) for arm in job.arms}
    for b, layer, round_number, arm in _schedule(job):
        traffic = RankTraffic(rank, job.ranks, job.network)
        placement = job.placements[arm.replication][layer]
        gathers_all = arm.dispatch == "all-gather"
        recorded = job.routes[b, layer, slice(None) if gathers_all else slice(start, start + rank_tokens)]
        layer_of_rank = ParallelLayer(
            experts_of_rank.gate(layer, recorded),
            experts_of_rank.products(layer, placement.reshape(job.ranks, -1)[rank]),
            placement,
            num_experts=job.num_experts,
            route=job.routing(arm, layer),
            on_exchange=traffic.add,
        )
        x = experts_of_rank.draw_tokens(rank_tokens)
        clock = _Clock()
        dist.barrier()
        clock.start()
        if gathers_all:
            layer_of_rank.run_gathered(x, [rank_tokens] * job.ranks, clock)
        else:
            nodes = job.network.nodes if arm.dispatch == ONCE_A_NODE else 1
            layer_of_rank.run_exchanged(x, clock, nodes=nodes)
        times[arm][b, layer, round_number] = [clock.seconds[stage] for stage in STAGES]
        counts[arm][b, layer] = traffic.counts
    return LayerRun(times, counts)


def time_shares_alone(rank: int, job: RankJob) -> dict[LayerArm, NDArray[np.float64]]:
    """Time each rank's experts with nothing else running: [B, L, rounds, G] s, by arm."""
    experts_of_rank = _LocalExperts(job)
    batches, layers, tokens, _ = job.routes.shape
    times = {arm: np.zeros((batches, layers, job.rounds, job.ranks)) for arm in job.arms}
    x = experts_of_rank.draw_tokens(tokens)
    for b, layer, round_number, arm in _schedule(job):
        experts = job.routes[b, layer]
        ranks = job.routing(arm, layer)(experts, np.zeros(tokens, np.int64))
        for g in range(job.ranks):
            token, choice = np.nonzero(ranks == g)
            rows = x[torch.as_tensor(token, device=device())]
            slot = torch.as_tensor(experts[token, choice], device=device())
            times[arm][b, layer, round_number, g] = experts_of_rank.time_products(layer, rows, slot)
    return times


def time_rank_alone(rank: int, job: RankJob) -> list[dict[str, Any]]:
    """Time a rank for several numbers of activated experts and pairs; return medians."""
    experts_of_rank = _LocalExperts(job)
    rng = np.random.default_rng(job.seed)
    counts = [count for count in ACTIVATED if count <= job.num_experts]
    points = [(activated, activated * tokens) for activated in counts for tokens in TOKENS_PER_EXPERT]
    seconds: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(3 * job.rounds + 1):  # the first one warms up
        for n in rng.permutation(len(points)):
            activated, pairs = points[n]
            layer = int(rng.integers(job.routes.shape[1]))
            experts = rng.permutation(job.num_experts)[:activated]
            slot = torch.as_tensor(np.resize(experts, pairs), device=device())
            rows = experts_of_rank.draw_tokens(pairs)
            seconds[activated, pairs].append(experts_of_rank.time_products(layer, rows, slot))
    return [
        {"activated": activated, "pairs": pairs, "s": float(np.median(times[1:]))}
        for (activated, pairs), times in seconds.items()
    ]


def time_messages(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Time both ways to move tokens to experts and back; return medians by bytes received per rank.

    Raises:
        ValueError: there are not two ranks, to which the sizes of the messages belong.
    """
    if (ranks := dist.get_world_size()) != 2:
        raise ValueError(f"messages are timed between two ranks, got {ranks}: call run_on_ranks with 2")
    rows = []
    for size in MESSAGE_BYTES:
        own = torch.zeros(size, dtype=torch.uint8, device=device())
        from_all = torch.zeros(2 * size, dtype=torch.uint8, device=device())
        splits = [0, size] if rank == 0 else [size, 0]
        seconds: dict[str, list[float]] = {"all_gather_reduce_scatter": [], "all_to_all_twice": []}
        for _ in range(10 * rounds + 1):
            clock = _Clock()
            dist.barrier()
            clock.start()
            dist.all_gather_single(from_all, own)
            dist.reduce_scatter_single(own, from_all)
            clock("all_gather_reduce_scatter")
            dist.barrier()
            clock.start()
            dist.all_to_all_single(torch.empty_like(own), own, splits, splits)
            dist.all_to_all_single(torch.empty_like(own), own, splits, splits)
            clock("all_to_all_twice")
            for name, times in seconds.items():
                times.append(clock.seconds[name])
        medians = {f"{name}_p50_ms": 1e3 * float(np.median(times[1:])) for name, times in seconds.items()}
        rows.append({"message_bytes": size} | medians)
    return rows


class _Clock:
    """A clock that measures each stage from the end of the previous one, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def start(self) -> None:
        """Start the first stage."""
        self._stage_started_at_s = _now_s()

    def __call__(self, stage: str) -> None:
        now_s = _now_s()
        self.seconds[stage] = now_s - self._stage_started_at_s
        self._stage_started_at_s = now_s


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _schedule(job: RankJob) -> list[tuple[int, int, int, LayerArm]]:
    """Return (batch, layer, round, arm) in a random order that is the same on every rank."""
    batches, layers = job.routes.shape[:2]
    cases = [
        (b, layer, round_number, arm)
        for round_number in range(job.rounds)
        for b in range(batches)
        for layer in range(layers)
        for arm in job.arms
    ]
    return [cases[n] for n in np.random.default_rng(job.seed).permutation(len(cases))]
