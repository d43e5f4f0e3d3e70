"""Expert placements and replica choices in vLLM's expert parallelism (EP).

Engine arguments, on GPUs (docs/replica_routing.md):

    enable_expert_parallel=True, enable_eplb=True,
    eplb_config={"num_redundant_experts": P - E, "use_async": False, "step_interval": 10**9},
    additional_config={"eldr_experts": {"placement": "placement.json", "replica_choice": "metro"}}

vLLM has no option for a placement or a replica choice. PlacedWorker, the default `worker_cls` of an engine on
GPUs with `eldr_experts`, sets both after it has loaded the weights, and before memory is profiled and CUDA
graphs are captured. A captured graph keeps the choice that it was captured with.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker

from eldr_serve.arrays import Floats, Ints
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.eplb import (
    check_expert_placement,
    get_ep_group,
    get_node_count,
    routes_own_tokens,
    run_before_eplb_mapping,
)
from eldr_serve.engine.vllm.compat.moe import moe_layers
from eldr_serve.engine.vllm.config import CONFIG_KEY
from eldr_serve.engine.vllm.eplb_placement import EplbExperts, place_experts, placement_of
from eldr_serve.engine.vllm.experts_config import ExpertsConfig, parse_experts_config
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology
from eldr_serve.experts.parallel.replica_choice import (
    Metro,
    NearestReplica,
    OneReplicaPerExpert,
    PolledReplica,
    slots_by_rank,
)

# Columns of vLLM's map of replicas under `weighted`. vLLM multiplies a token's position by an odd number and
# takes the result modulo the columns, so that a power of two takes all columns in turn.
_COLUMNS = 64


class PlacedWorker(Worker):
    """vLLM's GPU worker, which places experts by an ExpertPlacement."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model as the base class does, then place the experts and set the replica choice."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        config, state = read_experts_config(self.vllm_config), self.model_runner.eplb_state
        if config.placement is None:
            rows, load = placement_of(state), None
        else:
            placement = ExpertPlacement.load(config.placement)
            rows, load = placement.physical_to_logical, placement.expected_tokens
        place_experts(state, rows)
        choose_replicas(self.vllm_config, config.replica_choice, load)
        is_alone = self.vllm_config.parallel_config.data_parallel_size == 1
        self._eldr_experts = EplbExperts(state, config, called_together=is_alone)


def read_experts_config(vllm_config: VllmConfig) -> ExpertsConfig:
    """Return the engine's setting; raise UnsupportedEngineError if it is invalid or not supported."""
    check_expert_placement(vllm_config)
    settings = vllm_config.additional_config
    if not isinstance(settings, dict) or CONFIG_KEY not in settings:
        raise UnsupportedEngineError(f"additional_config has no {CONFIG_KEY!r}")
    return parse_experts_config(ExpertsConfig, settings[CONFIG_KEY])


def choose_replicas(vllm_config: VllmConfig, choice: str, load: Floats | None) -> None:
    """Set the replica choice of each MoE layer's router; call it after `place_experts`.

    Args:
        load: float[L, E], expected number of tokens of each expert, which `weighted` uses; None: all equal.

    Raises:
        UnsupportedEngineError: the choice is "local", and routers see the tokens of all ranks, so that all
            ranks must make the same choice.
    """
    if choice == "even":
        return
    group = get_ep_group()
    topology = Topology(ranks=group.world_size, nodes=get_node_count())
    loads = itertools.repeat(None) if load is None else load
    for (index, layer), layer_load in zip(moe_layers(vllm_config), loads, strict=False):
        sees_own_tokens, state = routes_own_tokens(layer), layer.router.eplb_state
        slots, device = _slots(state, topology.ranks), state.logical_replica_count.device
        if choice in ("metro", "metro-paper"):
            gather = group.all_reduce if sees_own_tokens else None
            metro = Metro(slots, device, gather, as_written=choice == "metro-paper")
            set_choice(layer.router, metro)
        elif choice == "weighted":
            polled = PolledReplica(slots, topology, load=layer_load, local=False)
            set_replica_table(layer.router, polled.table(_COLUMNS))
        elif sees_own_tokens:
            set_choice(layer.router, NearestReplica(slots, topology, group.rank_in_group, device))
        else:
            raise UnsupportedEngineError(
                f"layer {index} routes the tokens of all ranks, so all ranks must choose the same: use a "
                "replica_choice other than local"
            )


def set_choice(router: Any, choice: OneReplicaPerExpert) -> None:
    """Make a BaseRouter, whose EPLB maps are set, use a replica choice.

    vLLM's own function still maps the ids and counts the load. It reads the layer's maps, which are replaced
    by maps with one replica per expert. The new maps are updated before each call, at fixed addresses. EPLB's
    own maps of all layers do not change.
    """
    state = router.eplb_state
    state.logical_to_physical_map = choice.chosen[:, None]
    state.logical_replica_count = torch.ones_like(state.logical_replica_count)
    run_before_eplb_mapping(router, choice.update)


def set_replica_table(router: Any, table: Tensor) -> None:
    """Make vLLM's own rule draw from these slots, int64[E, C], instead of an expert's replicas.

    The rule takes the column with the number of the hash of a token's position, modulo C.
    """
    state = router.eplb_state
    state.logical_to_physical_map = table.to(state.logical_to_physical_map)
    state.logical_replica_count = torch.full_like(state.logical_replica_count, table.shape[1])


def _slots(state: Any, ranks: int) -> Ints:
    """Return a layer's EPLB maps as int64[E, G]; see `slots_by_rank`."""
    replicas = state.logical_to_physical_map.cpu().numpy()
    row = np.full(state.expert_load_view.shape[0], -1, np.int64)
    expert, column = np.nonzero(replicas >= 0)
    row[replicas[expert, column]] = expert
    return slots_by_rank(row, len(replicas), ranks)
