"""Experts' weights from slot to slot, within a rank and between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from eldr_serve.engine.vllm.ep.layer import LayerExperts
from eldr_serve.experts.moves import Move


def transfer(layers: Mapping[int, LayerExperts], moves: Sequence[Move], group: Any) -> int:
    """Make all the moves, and let the layers serve from where they went; every rank calls it alike.

    What a slot held before the call is what is read. Incoming weights wait beside the slots until all are
    there, at most one expert a move.

    Args:
        layers: by the moves' layer.
        moves: of one slice (`eldr_serve.experts.moves`).
        group: process group of the ranks.

    Returns:
        Bytes that this rank received from others.
    """
    sent: list[tuple[Tensor, Any]] = []  # kept until they are out
    waiting: list[tuple[Tensor, int, Tensor, Any]] = []
    received = 0
    for tag, move in enumerate(moves):
        if move.expert < 0:  # its slot becomes empty
            continue
        layer = layers[move.layer]
        source, rank = move.source // layer.size, move.slot // layer.size
        for part, weight in enumerate(layer.weights):
            number = tag * len(layer.weights) + part
            if rank == layer.rank:
                arriving, request = _fetched(
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
    dist.barrier(group)  # a rank that fails until here leaves all as they were
    for weight, slot, arriving, _ in waiting:
        weight[slot].copy_(arriving)
    for number in {move.layer for move in moves}:
        row = layers[number].row.copy()
        for move in moves:
            if move.layer == number:
                row[move.slot] = move.expert
        layers[number].put(row)
    return received


def _fetched(weight: Tensor, slot: int, source: int, rank: int, group: Any, tag: int) -> tuple[Tensor, Any]:
    """What a slot of `source` holds, and the request to wait for; None where it is this rank's own."""
    if source == rank:
        return weight[slot].clone(), None
    arriving = torch.empty_like(weight[0], memory_format=torch.contiguous_format)
    return arriving, dist.irecv(arriving, group=group, group_src=source, tag=tag)
