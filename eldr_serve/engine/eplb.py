"""An expert placement and a replica choice of ours in vLLM's expert parallelism (EP).

Engine arguments, on GPUs (docs/replica_routing.md):

    worker_cls="eldr_serve.engine.eplb.PlacedWorker", enable_expert_parallel=True, enable_eplb=True,
    eplb_config={"num_redundant_experts": P - E, "use_async": False, "step_interval": 10**9},
    additional_config={"eldr_experts": {"placement": "placement.json", "replica_choice": "metro"}}

vLLM has no option for either. The worker does both when the weights are loaded, before memory is profiled
and CUDA graphs are captured: a captured graph keeps the replica choice that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from eldr_serve.artifacts import ExpertPlacement
from eldr_serve.engine.compat import (
    AbstractEplbPolicy,
    EplbState,
    UnsupportedEngineError,
    before_eplb_mapping,
    check_expert_placement,
    get_ep_group,
    get_node_count,
    moe_layers,
    routes_own_tokens,
)
from eldr_serve.expert_placement import Topology, hosts_of
from eldr_serve.experts.metro import MetroPlan
from eldr_serve.experts.metro_torch import TorchMetro

Ints = NDArray[np.int64]
CONFIG_KEY = "eldr_experts"


class ExpertsConfig(BaseModel):
    """`additional_config["eldr_experts"]` of an engine.

    Attributes:
        placement: file of an ExpertPlacement (`offline.place --out`), its sidecar beside it.
        replica_choice: even: vLLM's own, by the token's position; metro: one replica a batch, so that no
            rank activates too many experts; local: the rank's own replica, else one of its node, else any.
    """

    model_config = ConfigDict(extra="forbid")

    placement: Path
    replica_choice: Literal["even", "metro", "local"] = "even"


class PlacedWorker(Worker):
    """vLLM's GPU worker, with experts where the placement says."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As the base class; then place the experts and choose replicas."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        config = experts_config(self.vllm_config)
        placement = ExpertPlacement.load(config.placement)
        place_experts(self.model_runner.eplb_state, placement.physical_to_logical)
        choose_replicas(self.vllm_config, config.replica_choice)


def experts_config(vllm_config: VllmConfig) -> ExpertsConfig:
    """What the engine was given; UnsupportedEngineError, with one sentence, if it cannot be had."""
    check_expert_placement(vllm_config)
    given = vllm_config.additional_config
    try:
        return ExpertsConfig.model_validate(given[CONFIG_KEY])
    except (KeyError, TypeError) as error:
        raise UnsupportedEngineError(f"additional_config has no {CONFIG_KEY!r}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UnsupportedEngineError(f"{CONFIG_KEY} does not fit, {where}: {first['msg']}") from error


def place_experts(state: EplbState, placement: Ints) -> None:
    """Move the weights of all ranks, which call it together, to the placement [L, P]; and keep them there.

    Raises:
        UnsupportedEngineError: the model has other layers, experts or slots, or vLLM did not move them.
    """
    models = list(state.model_states.values())
    if len(models) != 1:
        raise UnsupportedEngineError(f"expert placement needs one model under EPLB, not {len(models)}")
    model = models[0]
    expected = tuple(model.physical_to_logical_map.shape)
    if placement.shape != expected:
        raise UnsupportedEngineError(
            f"the placement has {placement.shape[0]} layers of {placement.shape[1]} slots, "
            f"the model {expected[0]} of {expected[1]}"
        )
    try:
        hosts_of(placement, model.logical_replica_count.shape[1], get_ep_group().world_size)
    except ValueError as error:
        raise UnsupportedEngineError(str(error)) from error
    state.policy = fixed_policy(placement)
    state.rearrange()
    if not np.array_equal(model.physical_to_logical_map.cpu().numpy(), placement):
        raise UnsupportedEngineError("vLLM did not move the experts to the placement")


def fixed_policy(placement: Ints) -> type[AbstractEplbPolicy]:
    """An EPLB policy that always answers with the placement; a later rearrangement moves nothing."""
    slots = torch.from_numpy(placement)

    class FixedPlacement(AbstractEplbPolicy):
        @classmethod
        def rebalance_experts(cls, *_: Any, **__: Any) -> Tensor:
            return slots.clone()

    return FixedPlacement


def choose_replicas(vllm_config: VllmConfig, choice: str) -> None:
    """Make each MoE layer's router choose replicas so; call it after `place_experts`.

    Raises:
        UnsupportedEngineError: "local" where each router sees the tokens of all ranks, which must agree.
    """
    if choice == "even":
        return
    group = get_ep_group()
    topology = Topology(ranks=group.world_size, nodes=get_node_count())
    for index, layer in moe_layers(vllm_config):
        own = routes_own_tokens(layer)
        if choice == "metro":
            route_by_batch(layer.router, topology.ranks, group.all_reduce if own else None)
        elif own:
            route_nearest(layer.router, topology, group.rank_in_group)
        else:
            raise UnsupportedEngineError(
                f"layer {index} routes the tokens of all ranks, which must agree: a local choice would not"
            )


def route_by_batch(router: Any, ranks: int, gather: Callable[[Tensor], Tensor] | None) -> None:
    """METRO: one replica for each expert and batch.

    vLLM's own function still maps the ids and counts the load. It reads the layer's maps, which are ours
    from now on: one replica an expert, chosen anew before each call, at addresses that do not change.

    Args:
        router: a BaseRouter whose EPLB maps are set.
        ranks: EP ranks.
        gather: sum over all ranks of int32[1, E + 1], where each routes its own tokens; None: all see all.
    """
    slots = _slots_by_rank(router.eplb_state, ranks)
    experts, device = len(slots), router.eplb_state.logical_replica_count.device
    metro = _metro_on(device)(MetroPlan.of(slots >= 0), device, stored=slots[None])
    active = torch.zeros(1, experts + 1, dtype=torch.int32, device=device)  # the last for ids that are none
    _set_maps(router.eplb_state, metro.chosen[0, :, None])

    def choose(topk_ids: Tensor) -> None:
        ids = topk_ids.reshape(-1).long()
        ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
        active.zero_().index_fill_(1, ids, 1)
        everywhere = active if gather is None else gather(active)
        metro.route(everywhere[:, :experts].contiguous())

    before_eplb_mapping(router, choose)


def route_nearest(router: Any, topology: Topology, rank: int) -> None:
    """GRACE-MoE's locality: the rank's own replica, else one of its node, else any, by turns."""
    slots = _slots_by_rank(router.eplb_state, topology.ranks)
    node = topology.node_of
    distance = np.where(node == node[rank], 1, 2)
    distance[rank] = 0
    away = np.where(slots < 0, 3, distance)
    nearest = away == away.min(axis=1, keepdims=True)
    turn = (rank + np.arange(len(slots))) % nearest.sum(axis=1)
    choice = (np.cumsum(nearest, axis=1) == turn[:, None] + 1).argmax(axis=1)
    chosen = slots[np.arange(len(slots)), choice]
    device = router.eplb_state.logical_replica_count.device
    _set_maps(router.eplb_state, torch.from_numpy(chosen)[:, None].to(device))


def _slots_by_rank(state: Any, ranks: int) -> Ints:
    """int64[E, G]: the first physical slot of the expert on the rank; -1 where there is none."""
    local = state.expert_load_view.shape[0] // ranks
    replicas = state.logical_to_physical_map.cpu().numpy()
    slots = np.full((len(replicas), ranks), -1, np.int64)
    for expert, column in zip(*np.nonzero(replicas >= 0), strict=True):
        slot = replicas[expert, column]
        held = slots[expert, slot // local]
        slots[expert, slot // local] = slot if held < 0 else min(held, slot)
    return slots


def _set_maps(state: Any, chosen: Tensor) -> None:
    """Give the layer one replica an expert, chosen[E, 1]; EPLB's own maps of all layers stay as they are."""
    state.logical_to_physical_map = chosen
    state.logical_replica_count = torch.ones_like(state.logical_replica_count)


def _metro_on(device: torch.device) -> Any:
    """The kernel where there is one for the device."""
    if device.type != "cuda":
        return TorchMetro
    from eldr_serve.experts.metro_triton import TritonMetro  # Triton is there where CUDA is

    return TritonMetro
