"""Move expert weights between slots, within a rank and between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from eldr_serve.engine.vllm.ep.layer import LayerExperts
from eldr_serve.experts.moves import Move


def transfer(layers: Mapping[int, LayerExperts], moves: Sequence[Move], group: Any) -> int:
    """Make all moves and update the layers' placements; all ranks make the same call.

    All moves read the content of the slots before the call. Incoming weights are buffered beside the slots,
    at most one expert per move, until all have arrived.

    Args:
        layers: the layers, by `Move.layer`.
        moves: the moves of one slice (`eldr_serve.experts.moves`).
        group: process group of the ranks.

    Returns:
        Bytes that this rank received from others.
    """
    sent: list[tuple[Tensor, Any]] = []  # holds tensors until they are sent
    waiting: list[tuple[Tensor, int, Tensor, Any]] = []
    received = 0
    for tag, move in enumerate(moves):
        if move.expert < 0:  # the slot becomes empty
            continue
        layer = layers[move.layer]
        source, rank = move.source // layer.size, move.slot // layer.size
        for part, weight in enumerate(layer.weights):
            number = tag * len(layer.weights) + part
            if rank == layer.rank:
                arriving, request = _receive(
                    weight, move.source % layer.size, source, layer.rank, group, number
                )
                waiting.append((weight, move.slot % layer.size, arriving, request))
                received += 0 if request is None else arriving.numel() * arriving.element_size()
            elif source == layer.rank:
                leaving = weight[move.source % layer.size].contiguous()
                sent.append((leaving, dist.isend(leaving, group=group, group_dst=rank, tag=number)))
    for *_, request in waiting:
        if request is not None:
            request.wait()
    for _, request in sent:
        request.wait()
    dist.barrier(group)  # if a rank fails before this, no rank has changed a slot
    for weight, slot, arriving, _ in waiting:
        weight[slot].copy_(arriving)
    for number in {move.layer for move in moves}:
        row = layers[number].row.copy()
        for move in moves:
            if move.layer == number:
                row[move.slot] = move.expert
        layers[number].put(row)
    return received


def _receive(weight: Tensor, slot: int, source: int, rank: int, group: Any, tag: int) -> tuple[Tensor, Any]:
    """Return the content of a slot of rank `source`, and the request to wait for; None if it is local."""
    if source == rank:
        return weight[slot].clone(), None
    arriving = torch.empty_like(weight[0], memory_format=torch.contiguous_format)
    return arriving, dist.irecv(arriving, group=group, group_src=source, tag=tag)
