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
from benchmarks.lib.ep.ranks import device, read_experts, read_gate
from benchmarks.papers.parallel_layer import (
    ParallelLayer,
    Products,
    Routing,
    all_replicas,
    one_replica,
    top_k_gate,
    vllm_products,
)
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.placement import hosts_of

STAGES = ("dispatch", "gate", "route", "experts", "combine")
ACTIVATED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
TOKENS_PER_EXPERT = (1, 2, 4, 8)
MESSAGE_BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
Arm = tuple[float, str, str]  # setting of a comparison: replication (slots / experts), routing, dispatch
ONCE_A_NODE = "all-to-all, once a node"  # a dispatch; the others are "all-gather" and "all-to-all"


@dataclass(frozen=True)
class Plan:
    """Common input of all ranks: the model, placements by replication, and batches of routes."""

    model: Path
    ranks: int
    placements: dict[float, NDArray[np.int64]]  # int[L, P]
    routes: NDArray[np.int64]  # int[B, L, T, k], B batches
    arms: tuple[Arm, ...]
    rounds: int  # calls of each batch, layer and arm
    seed: int
    network: Network = ONE_NODE

    def routing(self, arm: Arm, layer: int) -> Routing:
        """Return the arm's choice of replicas in a layer."""
        hosts = hosts_of(self.placements[arm[0]][layer : layer + 1], self.num_experts, self.ranks)[0]
        if arm[1] == "metro":
            return one_replica(MetroPlan.from_hosts(hosts).route, len(hosts))
        return all_replicas(hosts)

    @property
    def num_experts(self) -> int:
        """Return E."""
        return int(self.placements[1.0].max()) + 1

    def tokens_by_rank(self, arm: Arm) -> NDArray[np.int64]:
        """Return int[B, L, E, G]: tokens of each expert on each rank."""
        batches, layers = self.routes.shape[:2]
        tokens = np.zeros((batches, layers, self.num_experts, self.ranks), np.int64)
        for layer in range(layers):
            route = self.routing(arm, layer)
            for b in range(batches):
                experts = self.routes[b, layer]
                # All-to-all: each rank chooses for its own tokens.
                parts = 1 if arm[2] == "all-gather" else self.ranks
                for chunk in np.split(experts, parts):
                    np.add.at(tokens[b, layer], (chunk, route(chunk, np.zeros(len(chunk), np.int64))), 1)
        return tokens


class _Experts:
    """All layers' experts in this process's memory, to which the slots of a placement point."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        layers = range(plan.routes.shape[1])
        weights = (read_experts(plan.model, layer, range(plan.num_experts)) for layer in layers)
        self._products = [vllm_products(w13.to(device()), w2.to(device())) for w13, w2 in weights]
        self._gates = [read_gate(plan.model, layer).to(device()) for layer in layers]
        self.hidden = self._gates[0].shape[1]
        self.top_k = plan.routes.shape[3]

    def products(self, layer: int, experts: NDArray[np.int64]) -> Products:
        """Return the products of slots that hold these experts."""
        expert_of_slot = torch.as_tensor(experts, device=device())
        return lambda rows, slot: self._products[layer](rows, expert_of_slot[slot])

    def gate(self, layer: int, recorded: NDArray[np.int64]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the model's gate, forced to the recorded choices int[T, k]."""
        gate, experts = top_k_gate(self._gates[layer], self.top_k), torch.as_tensor(recorded, device=device())
        return lambda tokens: (gate(tokens)[0], experts)

    def seconds(self, layer: int, rows: Tensor, slot: Tensor) -> float:
        """Return the seconds that these rows' experts take, all of which are local."""
        products = self.products(layer, np.arange(self._plan.num_experts))
        start = _now()
        products(rows, slot)
        return _now() - start

    def tokens(self, number: int) -> Tensor:
        """Return hidden states. Their values do not affect a layer's time."""
        return torch.randn(number, self.hidden, device=device()).bfloat16()


class LayerRun(NamedTuple):
    """What `layers_together` measures on one rank, by arm."""

    seconds: dict[Arm, NDArray[np.float64]]  # [B, L, rounds, stage]
    traffic: dict[Arm, NDArray[np.int64]]  # [B, L, 4], as in TRAFFIC; all-to-alls alone


def layers_together(rank: int, plan: Plan) -> LayerRun:
    """Time each stage while the ranks start every layer together."""
    experts_of_rank = _Experts(plan)
    batches, layers, tokens, _ = plan.routes.shape
    rank_tokens = tokens // plan.ranks
    start = rank * rank_tokens
    times = {arm: np.zeros((batches, layers, plan.rounds, len(STAGES))) for arm in plan.arms}
    counts = {arm: np.zeros((batches, layers, len(TRAFFIC)), np.int64) for arm in plan.arms}
    for b, layer, turn, arm in _schedule(plan):
        traffic = RankTraffic(rank, plan.ranks, plan.network)
        placement = plan.placements[arm[0]][layer]
        gathers_all = arm[2] == "all-gather"
        recorded = plan.routes[b, layer, slice(None) if gathers_all else slice(start, start + rank_tokens)]
        layer_of_rank = ParallelLayer(
            experts_of_rank.gate(layer, recorded),
            experts_of_rank.products(layer, placement.reshape(plan.ranks, -1)[rank]),
            placement,
            num_experts=plan.num_experts,
            route=plan.routing(arm, layer),
            on_exchange=traffic.add,
        )
        x = experts_of_rank.tokens(rank_tokens)
        clock = _Clock()
        dist.barrier()
        clock.start()
        if gathers_all:
            layer_of_rank.run_gathered(x, [rank_tokens] * plan.ranks, clock)
        else:
            nodes = plan.network.nodes if arm[2] == ONCE_A_NODE else 1
            layer_of_rank.run_exchanged(x, clock, nodes=nodes)
        times[arm][b, layer, turn] = [clock.seconds[stage] for stage in STAGES]
        counts[arm][b, layer] = traffic.counts
    return LayerRun(times, counts)


def shares_alone(rank: int, plan: Plan) -> dict[Arm, NDArray[np.float64]]:
    """Time each rank's experts with nothing else running: [B, L, rounds, G] s, by arm."""
    experts_of_rank = _Experts(plan)
    batches, layers, tokens, _ = plan.routes.shape
    times = {arm: np.zeros((batches, layers, plan.rounds, plan.ranks)) for arm in plan.arms}
    x = experts_of_rank.tokens(tokens)
    for b, layer, turn, arm in _schedule(plan):
        experts = plan.routes[b, layer]
        ranks = plan.routing(arm, layer)(experts, np.zeros(tokens, np.int64))
        for g in range(plan.ranks):
            token, choice = np.nonzero(ranks == g)
            rows = x[torch.as_tensor(token, device=device())]
            slot = torch.as_tensor(experts[token, choice], device=device())
            times[arm][b, layer, turn, g] = experts_of_rank.seconds(layer, rows, slot)
    return times


def rank_alone(rank: int, plan: Plan) -> list[dict[str, Any]]:
    """Return a rank's median time by activated experts and pairs. Each call uses other experts."""
    experts_of_rank = _Experts(plan)
    rng = np.random.default_rng(plan.seed)
    points = [(a, a * n) for a in ACTIVATED for n in TOKENS_PER_EXPERT if a <= plan.num_experts]
    seconds: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(3 * plan.rounds + 1):  # the first one warms up
        for n in rng.permutation(len(points)):
            activated, pairs = points[n]
            layer = int(rng.integers(plan.routes.shape[1]))
            experts = rng.permutation(plan.num_experts)[:activated]
            slot = torch.as_tensor(np.resize(experts, pairs), device=device())
            rows = experts_of_rank.tokens(pairs)
            seconds[activated, pairs].append(experts_of_rank.seconds(layer, rows, slot))
    return [{"activated": a, "pairs": p, "s": float(np.median(s[1:]))} for (a, p), s in seconds.items()]


def messages(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Return medians of both ways to move tokens to experts and back, by bytes received per rank."""
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
        self._since = _now()

    def __call__(self, stage: str) -> None:
        now = _now()
        self.seconds[stage] = now - self._since
        self._since = now


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _schedule(plan: Plan) -> list[tuple[int, int, int, Arm]]:
    """Return (batch, layer, round, arm) in a random order that is the same on every rank."""
    batches, layers = plan.routes.shape[:2]
    cases = [
        (b, layer, turn, arm)
        for turn in range(plan.rounds)
        for b in range(batches)
        for layer in range(layers)
        for arm in plan.arms
    ]
    return [cases[n] for n in np.random.default_rng(plan.seed).permutation(len(cases))]
