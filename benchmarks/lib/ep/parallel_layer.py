"""An MoE layer under expert parallelism (EP) on torch.distributed: gloo on CPUs, nccl on GPUs.

A rank holds its own slots of a placement, and is the home of its own tokens. Tokens reach their experts in
one of two ways. All-gather dispatch sends every token to every rank before the gate, so that the choice of
replicas can use the whole batch (METRO, section IV-C). All-to-all dispatch sends a token only to ranks that
serve it: directly, or once to each node, where one of these ranks forwards it to the others (GRACE-MoE,
section 5.1). Each rank chooses replicas for its own tokens. Outputs equal those of one process within
rounding, for any placement, choice and dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from benchmarks.lib.ep.replica_choice import route_even
from eldr_serve.arrays import Ints
from eldr_serve.experts.expert_placement import Topology

Bools = NDArray[np.bool_]
Gate = Callable[[Tensor], tuple[Tensor, Tensor]]  # tokens [T, H] -> weights [T, k], experts int64[T, k]
Products = Callable[[Tensor, Tensor], Tensor]  # rows [n, H], slot int64[n] of each -> outputs [n, H]
Routing = Callable[[Ints, Ints], Ints]  # experts int[T, k], home rank int[T] -> serving rank int[T, k]
OnExchange = Callable[[Ints, Ints], None]  # bytes to and from each rank, int[G]; at the end of an exchange


class _Dispatch(NamedTuple):
    """Tokens that a rank has sent and received, by which results return to their senders."""

    token: Tensor  # row of each sent token at its sender, in the order of the receiving ranks
    tokens: int  # number of rows at the sender
    sent: Ints  # int[G], tokens to each rank
    received: Ints  # int[G], tokens from each rank


class ParallelLayer:
    """One rank's part of the layer. Every rank of the group makes one with equal arguments except products.

    Args:
        products: computes this rank's slots.
        placement: int[P], the logical expert in each slot, rank-major; `slots_of` checks it.
        route: the serving rank of each (token, expert) pair; the same function on every rank.
        on_exchange: called after each exchange of `run_exchanged`, whose parts it counts as one message.
    """

    def __init__(
        self,
        gate: Gate,
        products: Products,
        placement: ArrayLike,
        *,
        num_experts: int,
        route: Routing,
        group: dist.ProcessGroup | None = None,
        on_exchange: OnExchange = lambda sent, received: None,
    ) -> None:
        self._gate, self._products, self._route, self._group = gate, products, route, group
        self._num_experts, self._on_exchange = num_experts, on_exchange
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._slot = slots_of(placement, num_experts, self._ranks)[self._rank]

    def run_gathered(
        self, x: Tensor, sizes: Sequence[int], on_stage: Callable[[str], None] = lambda stage: None
    ) -> Tensor:
        """Compute the layer for [T, H] with all-gather dispatch and reduce-scatter. T may be 0.

        Args:
            sizes: number of tokens of every rank, from the engine's scheduler.
            on_stage: called with the name of each stage at its end: dispatch, gate, route, experts, combine.
        """
        room, width = max(sizes), x.shape[1]
        if not room:
            return x
        padded = x.new_zeros(room, width)
        padded[: len(x)] = x
        all_tokens = x.new_empty(self._ranks * room, width)
        dist.all_gather_single(all_tokens, padded, group=self._group)
        home = np.repeat(np.arange(self._ranks), sizes)
        rows = torch.as_tensor(np.concatenate([g * room + np.arange(n) for g, n in enumerate(sizes)]))
        tokens = all_tokens[rows]
        on_stage("dispatch")
        weights, experts = self._gate(tokens)
        on_stage("gate")
        chosen_experts = experts.cpu().numpy()
        is_served_here = self._route(chosen_experts, home) == self._rank
        on_stage("route")
        outputs = x.new_zeros(self._ranks * room, width)
        outputs[rows] = self._sum_experts(tokens, weights, np.where(is_served_here, chosen_experts, -1))
        on_stage("experts")
        out = x.new_empty(room, width)
        dist.reduce_scatter_single(out, outputs, group=self._group)
        on_stage("combine")
        return out[: len(x)]

    def run_exchanged(
        self, x: Tensor, on_stage: Callable[[str], None] = lambda stage: None, *, nodes: int = 1
    ) -> Tensor:
        """Compute the layer with all-to-all dispatch and combine. A token is sent to a rank at most once.

        Args:
            on_stage: as in `run_gathered`; the stages are gate, route, dispatch, experts, combine.
            nodes: nodes of the ranks. With several, a token is sent to each node at most once, to its entry:
                the first rank there that serves it. The entry forwards it to the others, and adds their
                results before one sum returns.
        """
        weights, experts = self._gate(x)
        on_stage("gate")
        chosen_experts = experts.cpu().numpy()
        ranks = self._route(chosen_experts, np.full(len(x), self._rank))
        on_stage("route")
        pairs = torch.as_tensor(ranks * self._num_experts + chosen_experts).to(x.device)
        tokens = [x, weights, pairs]
        dispatches: list[_Dispatch] = []
        if nodes > 1:
            entries = first_of_each_node(self._serving_ranks(pairs), nodes, self._rank)
            tokens, dispatch = self._send(tokens, entries, np.ones(self._ranks, bool))
            dispatches.append(dispatch)
        node_of = Topology(ranks=self._ranks, nodes=nodes).node_of
        is_near = node_of == node_of[self._rank]
        tokens, dispatch = self._send(tokens, self._serving_ranks(tokens[2]) & is_near, is_near)
        dispatches.append(dispatch)
        on_stage("dispatch")
        received_tokens, gates, pairs = tokens
        rank, expert = np.divmod(pairs.cpu().numpy(), self._num_experts)
        partial = self._sum_experts(received_tokens, gates, np.where(rank == self._rank, expert, -1))
        on_stage("experts")
        for dispatch in reversed(dispatches):
            partial = self._return(partial, dispatch)
        on_stage("combine")
        return partial

    def _serving_ranks(self, pairs: Tensor) -> Bools:
        """Return bool[T, G], the ranks that serve a token, from its pairs int64[T, k], rank * E + expert."""
        ranks = pairs.cpu().numpy() // self._num_experts
        is_serving: Bools = (ranks[:, None, :] == np.arange(self._ranks)[None, :, None]).any(axis=2)
        return is_serving

    def _send(
        self, parts: list[Tensor], is_destination: Bools, is_peer: Bools
    ) -> tuple[list[Tensor], _Dispatch]:
        """Send each token's row of all parts to its destinations, bool[T, G]. Return what arrives.

        Args:
            is_peer: bool[G], the only ranks to which tokens go and from which they come.
        """
        token = torch.as_tensor(np.nonzero(is_destination.T)[1]).to(parts[0].device)
        sent, received = is_destination.sum(axis=0), np.zeros(self._ranks, np.int64)
        counts = torch.as_tensor(sent[is_peer]).to(parts[0].device)
        (arrived_counts,) = self._exchange([counts], is_peer.astype(np.int64), is_peer.astype(np.int64))
        received[is_peer] = arrived_counts.cpu().numpy()
        arrived = self._exchange([part[token] for part in parts], sent, received)
        return arrived, _Dispatch(token, len(is_destination), sent, received)

    def _return(self, results: Tensor, dispatch: _Dispatch) -> Tensor:
        """Return the results [n, H] of a dispatch's tokens to their senders, and sum those of each token."""
        (returned,) = self._exchange([results], dispatch.received, dispatch.sent)
        total = torch.zeros(dispatch.tokens, results.shape[1], device=results.device)
        return total.index_add_(0, dispatch.token, returned.float()).to(results.dtype)

    def _sum_experts(self, tokens: Tensor, weights: Tensor, requested: Ints) -> Tensor:
        """Return [T, H] weighted sums over this rank's experts; requested int[T, k], -1: served elsewhere."""
        token, choice = np.nonzero(requested >= 0)
        slot = self._slot[requested[token, choice]]
        if len(slot) and slot.min() < 0:
            expert = requested[token, choice][slot.argmin()]
            raise ValueError(f"expert {expert} was routed to rank {self._rank}, which does not hold it")
        row = torch.as_tensor(token).to(tokens.device)
        outputs = self._products(tokens[row], torch.as_tensor(slot).to(tokens.device))
        gates = weights[row, torch.as_tensor(choice).to(tokens.device)]
        total = torch.zeros(tokens.shape, device=tokens.device)
        return total.index_add_(0, row, outputs.float() * gates.float()[:, None]).to(tokens.dtype)

    def _exchange(self, parts: list[Tensor], sent: Ints, received: Ints) -> list[Tensor]:
        """Exchange sent[g] rows of each part for received[g] rows of rank g.

        Each part is a collective of its own. `on_exchange` counts them as one message, as an implementation
        that packs them would send.
        """
        arrived = [part.new_empty((int(received.sum()), *part.shape[1:])) for part in parts]
        for rows, part in zip(arrived, parts, strict=True):
            dist.all_to_all_single(
                rows, part.contiguous(), received.tolist(), sent.tolist(), group=self._group
            )
        row_bytes = sum(part.element_size() * math.prod(part.shape[1:]) for part in parts)
        self._on_exchange(row_bytes * sent, row_bytes * received)
        return arrived


def first_of_each_node(is_serving: Bools, nodes: int, home: int) -> Bools:
    """Return bool[T, G]: the first rank of each node among the ranks bool[T, G] that serve a token.

    The count begins at the home rank's place on its own node, so that the homes of a node use different
    entries.
    """
    tokens, ranks = is_serving.shape
    place = home % (ranks // nodes)
    by_node = np.roll(is_serving.reshape(tokens, nodes, ranks // nodes), -place, axis=2)
    is_first = by_node & (by_node.cumsum(axis=2) == 1)
    return np.roll(is_first, place, axis=2).reshape(tokens, ranks)


def slots_of(placement: ArrayLike, num_experts: int, ranks: int) -> Ints:
    """Return int[G, E]: the slot on the rank that serves the expert, or -1.

    Raises:
        ValueError: the slots cannot be divided among the ranks, or a slot is empty (-1).
    """
    experts_of_slots = np.asarray(placement)
    if experts_of_slots.ndim != 1 or len(experts_of_slots) % ranks:
        raise ValueError(
            f"a layer's placement of shape {experts_of_slots.shape} cannot be divided among {ranks} ranks"
        )
    if (experts_of_slots < 0).any():
        raise ValueError("a layer's placement has empty slots (-1): fill them with `fill_with_replicas`")
    slot = np.full((ranks, num_experts), -1)
    for rank, experts in enumerate(experts_of_slots.reshape(ranks, -1)):
        slot[rank, experts] = np.arange(len(experts))
    return slot


def one_replica(choose: Callable[[Ints], Ints], num_experts: int) -> Routing:
    """Return a routing that sends all tokens of an expert to one replica.

    Args:
        choose: maps a batch's tokens int[E] to ranks int[E].
    """

    def route(experts: Ints, home: Ints) -> Ints:
        return choose(np.bincount(experts.reshape(-1), minlength=num_experts))[experts]

    return route


def all_replicas(hosts: NDArray[np.bool_]) -> Routing:
    """Return a routing that spreads an expert's tokens evenly over its replicas, as `route_even` does.

    The remainder begins at another replica for each lowest home rank, so that ranks which choose for their
    own tokens do not all add it to the same replica.
    """

    def route(experts: Ints, home: Ints) -> Ints:
        pairs = experts.reshape(-1)
        first = int(home.min(initial=hosts.shape[1]))
        served = route_even(np.bincount(pairs, minlength=len(hosts)), hosts, first)
        ranks = np.empty_like(pairs)
        ranks[np.argsort(pairs, kind="stable")] = np.repeat(
            np.tile(np.arange(hosts.shape[1]), len(hosts)), served.reshape(-1)
        )
        return ranks.reshape(experts.shape)

    return route


def top_k_gate(weight: Tensor, top_k: int) -> Gate:
    """Return a gate with `weight` [E, H]: softmax over experts, the k largest, weights normalised to 1."""

    def gate(tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores, experts = torch.softmax((tokens @ weight.T).float(), -1).topk(top_k, -1)
        return scores / scores.sum(-1, keepdim=True), experts

    return gate


def vllm_products(w13: Tensor, w2: Tensor) -> Products:
    """Return a function that computes experts with vLLM's fused kernel in bf16, on CPUs or by Triton on CUDA.

    Each (token, expert) pair is a row with one expert, so that a rank computes only its own pairs.
    """
    from eldr_serve.engine.vllm.compat.moe import fused_moe  # only this function needs it

    fused = fused_moe(w13, w2)

    def products(rows: Tensor, slot: Tensor) -> Tensor:
        return fused(rows, torch.ones(len(rows), 1, device=rows.device), slot[:, None].int())

    return products
