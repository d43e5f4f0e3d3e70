"""Set up a layer's experts at the start of an engine, by the configured placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.ep.layer import LayerExperts
from eldr_serve.engine.vllm.ep.transfer import transfer
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig
from eldr_serve.experts.moves import aligned, sliced
from eldr_serve.experts.placement import Topology, check_fits
from eldr_serve.experts.routing_table import ArtifactError, ExpertPlacement


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

    Raises:
        UnsupportedEngineError: the placement cannot be read, or does not fit the model and the engine.
    """
    placement = None
    redundant = config.redundant_experts or 0
    try:
        if config.placement is not None:
            placement = ExpertPlacement.load(config.placement)
            if config.redundant_experts is None:
                redundant = placement.num_redundant
        slots = num_experts + redundant
        if slots % topology.ranks:
            raise ValueError(f"{slots} expert slots do not divide by {topology.ranks} ranks")
        if placement is not None:
            if placement.ranks != topology.ranks:
                raise ValueError(
                    f"the placement is for {placement.ranks} ranks, the engine has {topology.ranks}"
                )
            check_fits(
                placement.physical_to_logical,
                layers=num_layers, slots=slots, num_experts=num_experts, ranks=topology.ranks,
            )  # fmt: skip
    except (ArtifactError, ValueError) as error:
        raise UnsupportedEngineError(str(error)) from error
    for weight in weights:
        spare = slots // topology.ranks - len(weight)
        weight.data = torch.cat([weight.data, weight.data.new_zeros(spare, *weight.shape[1:])])
    made = LayerExperts(
        [weight.data for weight in weights],
        slots=slots, num_experts=num_experts, topology=topology, rank=rank, rule=config.replica_choice,
    )  # fmt: skip
    if placement is not None:
        old, new = made.row[None], placement.physical_to_logical[layer][None]
        for moves in sliced(old, aligned(old, new, topology.ranks), topology.ranks, config.moves_a_slice):
            transfer({0: made}, moves, group)
    return made
