"""Moves of expert weights between slots, within a rank and between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.ep.layer import LayerExperts
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology, check_placement_fits
from eldr_serve.experts.parallel.moves import Move, fill_with_replicas, keep_slots, slice_moves


def transfer(layers: Mapping[int, LayerExperts], moves: Sequence[Move], group: Any) -> int:
    """Make all moves and update the layers' placements; all ranks make the same call.

    All moves read the content that the slots had before the call. Weights that a rank receives are buffered
    beside the slots, at most one expert per move, until all have arrived.

    Args:
        layers: the layers, by `Move.layer`.
        moves: the moves of one slice (`eldr_serve.experts.parallel.moves`).
        group: process group of the ranks.

    Returns:
        Bytes that this rank received from others.
    """
    sends: list[tuple[Tensor, Any]] = []  # (content, request); keeps each content until it is sent
    receives: list[tuple[Tensor, int, Tensor, Any]] = []  # (weight, slot, new content, request)
    received_bytes = 0
    for tag, move in enumerate(moves):
        if move.expert < 0:  # the slot becomes empty
            continue
        layer = layers[move.layer]
        source, rank = move.source // layer.slots_per_rank, move.target // layer.slots_per_rank
        for part, weight in enumerate(layer.weights):
            number = tag * len(layer.weights) + part
            if rank == layer.rank:
                content, request = _receive(
                    weight, move.source % layer.slots_per_rank, source, layer.rank, group, number
                )
                receives.append((weight, move.target % layer.slots_per_rank, content, request))
                received_bytes += 0 if request is None else content.numel() * content.element_size()
            elif source == layer.rank:
                content = weight[move.source % layer.slots_per_rank].contiguous()
                sends.append((content, dist.isend(content, group=group, group_dst=rank, tag=number)))
    for *_, request in receives:
        if request is not None:
            request.wait()
    for _, request in sends:
        request.wait()
    dist.barrier(group)  # if a rank fails before this, no rank has changed a slot
    for weight, slot, content, _ in receives:
        weight[slot].copy_(content)
    for number in {move.layer for move in moves}:
        row = layers[number].row.copy()
        for move in moves:
            if move.layer == number:
                row[move.target] = move.expert
        layers[number].set_placement(row)
    return received_bytes


def _receive(weight: Tensor, slot: int, source: int, rank: int, group: Any, tag: int) -> tuple[Tensor, Any]:
    """Return the content of a slot of rank `source`, and the request to wait for (None if it is local)."""
    if source == rank:
        return weight[slot].clone(), None
    content = torch.empty_like(weight[0], memory_format=torch.contiguous_format)
    return content, dist.irecv(content, group=group, group_src=source, tag=tag)


def start_layer(
    weights: Sequence[nn.Parameter],
    config: CpuExpertsConfig,
    *,
    layer: int,
    num_layers: int,
    num_experts: int,
    topology: Topology,
    rank: int,
    group: Any,
    max_decode_tokens: int,
) -> LayerExperts:
    """Move a layer's experts to the configured placement and return them; all ranks call this together.

    Args:
        weights: [E / G, ...] each, the experts that vLLM loaded on this rank; extended to all its slots.
        config: the engine's configuration.
        layer, num_layers: index of this MoE layer, and number of MoE layers.
        num_experts: E.
        topology: topology of the G ranks.
        rank: this rank.
        group: process group of the ranks.
        max_decode_tokens: see LayerExperts.

    Raises:
        UnsupportedEngineError: the placement cannot be read, or does not fit the model and the engine.
    """
    try:
        placement, slots = _configured_placement(config, num_layers, num_experts, topology.ranks)
    except (ArtifactError, ValueError) as error:
        raise UnsupportedEngineError(str(error)) from error
    for weight in weights:
        spare = slots // topology.ranks - len(weight)
        weight.data = torch.cat([weight.data, weight.data.new_zeros(spare, *weight.shape[1:])])
    experts = LayerExperts(
        [weight.data for weight in weights],
        slots=slots,
        num_experts=num_experts,
        topology=topology,
        rank=rank,
        rule=config.replica_choice,
        prefill_rule=config.prefill_replica_choice,
        max_decode_tokens=max_decode_tokens,
    )
    if placement is not None and placement.expected_tokens is not None:
        experts.load = placement.expected_tokens[layer]
        experts.set_placement(experts.row)
    target = None if placement is None else placement.physical_to_logical[layer]
    if target is None and config.fill_redundant:
        target = fill_with_replicas(experts.row, topology.ranks)
    if target is not None:
        old, new = experts.row[None], target[None]
        for moves in slice_moves(
            old, keep_slots(old, new, topology.ranks), topology.ranks, config.moves_per_slice
        ):
            transfer({0: experts}, moves, group)
    return experts


def _configured_placement(
    config: CpuExpertsConfig, num_layers: int, num_experts: int, ranks: int
) -> tuple[ExpertPlacement | None, int]:
    """Return the configured placement, if there is one, and the number of slots of a layer over all ranks."""
    placement = None if config.placement is None else ExpertPlacement.load(config.placement)
    redundant = config.redundant_experts
    if redundant is None:
        redundant = 0 if placement is None else placement.num_redundant
    slots = num_experts + redundant
    if slots % ranks:
        raise ValueError(f"{slots} expert slots cannot be split evenly over {ranks} ranks")
    if placement is not None:
        if placement.ranks != ranks:
            raise ValueError(f"the placement is for {placement.ranks} ranks, but the engine has {ranks}")
        check_placement_fits(
            placement.physical_to_logical,
            layers=num_layers,
            slots=slots,
            num_experts=num_experts,
            ranks=ranks,
        )
    return placement, slots
