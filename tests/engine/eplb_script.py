"""Run vLLM's own EPLB state, weight exchange and replica kernel on two gloo ranks with our placements.

vLLM has no expert parallelism on CPUs, so a stand-in replaces the engine: a model of bare layers.
vLLM builds the replica kernel only for GPUs. It runs in Triton's interpreter here.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
import triton
import triton.language
import vllm.triton_utils
from triton.runtime import interpreter
from vllm.config.parallel import EPLBConfig
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.eplb_state import EplbLayerState, EplbState
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from eldr_serve.engine.vllm import eplb, eplb_placement
from eldr_serve.engine.vllm.compat import moe
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.ep.swap import EngineExperts
from eldr_serve.engine.vllm.worker import EldrWorkerExtension
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.expert_placement import ExpertPlacement, hosts_of
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.replica_choice import slots_by_rank

RANKS, LAYERS, EXPERTS, SLOTS, TOP_K = 2, 2, 6, 8, 2
# In the second layer the two forms of METRO choose different replicas of expert 0.
PLACEMENT = [[0, 1, 2, 4, 5, 3, 0, 1], [3, 2, 4, 0, 1, 5, 1, 0]]
# Unequal, so that the ranks have different weights under `weighted`.
EXPECTED_TOKENS = [[10.0, 10.0, 100.0, 5.0, 100.0, 5.0], [10.0, 10.0, 100.0, 100.0, 100.0, 5.0]]
METRO_PLANS = {"metro": MetroPlan.from_hosts, "metro-paper": MetroPlan.as_written}


def reload_router_with_kernel() -> Any:
    """Reload vLLM's base_router as on a GPU, with its kernel interpreted."""
    # The interpreter rejects a mask that it made itself, a vector of bools and a scalar.
    add = interpreter._interpreter.atomic_rmw
    interpreter._interpreter.atomic_rmw = lambda op, at, value, mask, order: add(
        op, at, value, mask.astype(bool), order
    )
    platform = type(current_platform)
    before = platform.is_cuda_alike, vllm.triton_utils.triton, vllm.triton_utils.tl
    platform.is_cuda_alike = lambda self: True
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
    try:
        return importlib.reload(base_router)
    finally:
        platform.is_cuda_alike, vllm.triton_utils.triton, vllm.triton_utils.tl = before


class Layer:
    """An MoE layer with a router and weights that equal the logical expert's number."""

    def __init__(self, router_class: Any, layer: int, rank: int, own_tokens: bool) -> None:
        class Router(router_class):
            routing_method_type = None

            def _compute_routing(self, hidden_states: Any, router_logits: Any, *_: Any, **__: Any) -> Any:
                return torch.ones_like(router_logits), router_logits  # the test passes ids as logits

        self.router = Router(TOP_K, SLOTS, EplbLayerState())
        first = [slot % EXPERTS for slot in range(SLOTS)][rank * SLOTS // RANKS :][: SLOTS // RANKS]
        self.weights = torch.tensor([[100.0 * layer + expert] * 3 for expert in first])
        parallel = SimpleNamespace(use_all2all_kernels=own_tokens)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        self.do_naive_dispatch_combine = False

    @property
    def eplb_state(self) -> EplbLayerState:
        return self.router.eplb_state

    def get_expert_weights(self) -> list[torch.Tensor]:
        return [self.weights]

    def set_eplb_state(self, **maps: Any) -> None:
        self.eplb_state.set_layer_state(**maps)


class Model(MixtureOfExperts):
    def __init__(self, layers: list[Layer]) -> None:
        self.moe_layers = layers
        self.num_moe_layers, self.num_expert_groups = LAYERS, 1
        self.num_routed_experts = self.num_logical_experts = EXPERTS
        self.num_redundant_experts, self.num_physical_experts = SLOTS - EXPERTS, SLOTS
        self.num_local_physical_experts = SLOTS // RANKS


class ExtendedWorker(eplb.PlacedWorker, EldrWorkerExtension):
    """The worker as vLLM extends it."""


def worker(rank: int, path: Path | None, router_class: Any, choice: str, own_tokens: bool) -> Any:
    """Return a loaded PlacedWorker, its EPLB state and its layers. vLLM loads no model for it."""
    layers = [Layer(router_class, layer, rank, own_tokens) for layer in range(LAYERS)]
    parallel = SimpleNamespace(
        eplb_config=EPLBConfig(use_async=False, window_size=2, communicator="torch_gloo"),
        num_ubatches=0,
        enable_eplb=True,
        enable_elastic_ep=False,
        enable_dbo=False,
        data_parallel_size=1,
    )
    state = EplbState(parallel, torch.device("cpu"))
    state.add_model(Model(layers), SimpleNamespace(compute_hash=lambda: "tiny", model="tiny"))
    placed_worker = object.__new__(ExtendedWorker)
    settings = {"placement": path and str(path), "replica_choice": choice, "layers_per_slice": 1}
    placed_worker.vllm_config = SimpleNamespace(
        parallel_config=parallel,
        speculative_config=None,
        additional_config={eplb.CONFIG_KEY: settings},
        compilation_config=SimpleNamespace(
            static_forward_context={f"model.layers.{i}.mlp": layer for i, layer in enumerate(layers)}
        ),
    )
    placed_worker.model_runner = SimpleNamespace(eplb_state=state)
    placed_worker.load_model()
    for layer in layers:
        layer.eplb_state.num_unpadded_tokens_tensors[0].fill_(1000)
    return placed_worker, state, layers


def run(rank: int, port: int, path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    world = torch.distributed.group.WORLD

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total

    group = SimpleNamespace(
        device_group=world, cpu_group=world, world_size=RANKS, rank_in_group=rank, all_reduce=all_reduce
    )
    eplb_state.get_eplb_group = lambda: group
    for module in (eplb_state, eplb, eplb_placement):
        module.get_ep_group = lambda: group
    eplb_state.get_node_count = eplb.get_node_count = lambda: 1
    # CPUs have no timed events and no streams.
    timer = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 0.0)
    torch.Event = lambda **_: timer
    torch.accelerator.current_stream = lambda: timer
    Worker.load_model = lambda self, *, load_dummy_weights=False: None
    kernel_router = reload_router_with_kernel().BaseRouter
    moe.BaseRouter = kernel_router
    rng = np.random.default_rng(7)

    placement = np.array(PLACEMENT)
    hosts = hosts_of(placement, EXPERTS, RANKS)
    ours, papers = (plan(hosts).route(np.ones((LAYERS, EXPERTS), int)) for plan in METRO_PLANS.values())
    assert not np.array_equal(ours, papers), "both forms of METRO make the same choice under this placement"
    choices = [("even", True), *((metro, own) for metro in METRO_PLANS for own in (True, False))]
    for choice, own_tokens in (*choices, ("local", True), ("weighted", True), ("weighted", False)):
        _, state, layers = worker(rank, path, kernel_router, choice, own_tokens)
        check_weights(rank, layers, placement)
        for _ in range(3):
            # Both ranks draw the same expert ids of the tokens of all ranks.
            ids = rng.integers(0, EXPERTS, (RANKS, 5, TOP_K))
            own_ids = ids[rank] if own_tokens else ids.reshape(-1, TOP_K)
            for index, layer in enumerate(layers):
                layer.eplb_state.expert_load_view.zero_()
                _, mapped = layer.router.select_experts(torch.empty(0), torch.from_numpy(own_ids))
                slots = mapped.numpy()
                assert np.array_equal(placement[index][slots], own_ids), "a slot holds another expert"
                load = np.bincount(slots.ravel(), minlength=SLOTS)
                assert np.array_equal(layer.eplb_state.expert_load_view.numpy(), load)
                ranks = slots // (SLOTS // RANKS)
                if choice in METRO_PLANS:
                    count = np.bincount(ids.ravel(), minlength=EXPERTS)
                    assert np.array_equal(ranks, METRO_PLANS[choice](hosts[index]).route(count)[own_ids])
                elif choice == "local":
                    assert (ranks == rank)[hosts[index, own_ids, rank]].all()
                elif choice == "weighted":
                    assert np.array_equal(slots, polled(own_ids, index))
                else:
                    maps = state.model_states["tiny"]
                    assert np.array_equal(slots, evenly(own_ids, maps, index)), "vLLM chooses otherwise"
        state.rearrange()  # vLLM does so after step_interval
        check_weights(rank, layers, placement)
    check_migration(rank, path, kernel_router)
    check_refused(lambda: worker(rank, path, kernel_router, "local", False), "must choose the same")
    other = path.with_name(f"other{rank}.json")
    save([PLACEMENT[0]], other)
    check_refused(lambda: worker(rank, other, kernel_router, "even", True), "1 layers of 8 slots")
    save([[0] * SLOTS] * LAYERS, other, experts=1)
    check_refused(lambda: worker(rank, other, kernel_router, "even", True), "has no slot")


def check_migration(rank: int, path: Path, router_class: Any) -> None:
    """Check that an engine in vLLM's own order takes the placement of the file while it serves."""
    placed, state, layers = worker(rank, None, router_class, "even", True)
    start = np.tile([slot % EXPERTS for slot in range(SLOTS)], (LAYERS, 1))
    new, loads = ExpertPlacement.load(path), EXPECTED_TOKENS
    check_weights(rank, layers, start)
    placed.vllm_config.additional_config = None  # only the start of an engine reads it

    for placement, ranks, reason in (
        (PLACEMENT, 4, "for 4 ranks, but the engine has 2"),
        (PLACEMENT[:1], RANKS, "1 layers of 8 slots"),
        ([[0] * SLOTS] * LAYERS, RANKS, "has no slot"),
        ([[-1, *PLACEMENT[0][1:]]] * LAYERS, RANKS, "outside 0 to 5"),
    ):
        assert reason in placed.eldr_experts("begin", placement, ranks, loads)
    assert "set replica_choice to metro" in placed.eldr_experts("choose", "metro")
    check_weights(rank, layers, start)

    assert placed.eldr_experts("begin", PLACEMENT, RANKS, loads) == LAYERS
    assert "2 slices to come" in placed.eldr_experts("begin", PLACEMENT, RANKS, loads)
    for slices_left in (1, 0):
        assert placed.eldr_experts("move") == slices_left
        rows = np.array(placed.eldr_experts("status")["placement"])
        assert np.array_equal(rows[LAYERS - slices_left :], start[LAYERS - slices_left :])
        check_weights(rank, layers, rows)
        check_routing(state, layers, rows)
    assert np.array_equal(hosts_of(rows, EXPERTS, RANKS), hosts_of(new.physical_to_logical, EXPERTS, RANKS))
    status = placed.eldr_experts("status")
    was_here, is_here = (hosts_of(side, EXPERTS, RANKS)[..., rank] for side in (start, rows))
    slot_bytes = layers[0].weights[0].nbytes
    assert status["bytes_received"] == slot_bytes * (is_here & ~was_here).sum() > 0
    assert status["experts_moved"] == (rows != start).sum()
    assert status["weight_bytes"] == slot_bytes * LAYERS * EXPERTS // RANKS
    assert status["replica_bytes"] == slot_bytes * LAYERS * (SLOTS - EXPERTS) // RANKS

    assert placed.eldr_experts("begin", start.tolist(), RANKS) == LAYERS
    assert placed.eldr_experts("move") == 1
    assert placed.eldr_experts("stop") == 1
    assert placed.eldr_experts("status")["slices_left"] == 0
    experts = EngineExperts(call_ranks(placed))
    swap = asyncio.run(experts.place(new, EXPECTED_TOKENS))
    assert (swap["placement"], swap["slices"]) == (new.id, 1)
    assert (experts.status["ranks"], experts.status["slots"]) == (RANKS, SLOTS)
    check_weights(rank, layers, np.array(placed.eldr_experts("status")["placement"]))

    fixed = EngineExperts(call_ranks(worker(rank, path, router_class, "metro", True)[0]))
    with pytest.raises(RequestRefusedError, match="set replica_choice to even"):
        asyncio.run(fixed.place(new))
    assert fixed.status["placement"] == new.id


def call_ranks(placed: Any) -> Any:
    """Return a `collective_rpc` that both ranks call at the same time."""

    async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = [None] * RANKS
        torch.distributed.all_gather_object(answers, getattr(placed, method)(*args))
        return answers

    return call


def check_routing(state: Any, layers: list[Layer], rows: np.ndarray) -> None:
    """Check that vLLM's own rule sends tokens to slots that hold their experts."""
    ids = np.arange(EXPERTS * TOP_K).reshape(-1, TOP_K) % EXPERTS
    for index, layer in enumerate(layers):
        _, mapped = layer.router.select_experts(torch.empty(0), torch.from_numpy(ids))
        assert np.array_equal(rows[index][mapped.numpy()], ids)
        assert np.array_equal(mapped.numpy(), evenly(ids, state.model_states["tiny"], index))


def check_weights(rank: int, layers: list[Layer], placement: np.ndarray) -> None:
    local = placement.reshape(LAYERS, RANKS, -1)[:, rank]
    for index, layer in enumerate(layers):
        assert np.array_equal(layer.weights[:, 0].numpy(), 100.0 * index + local[index])


def evenly(ids: np.ndarray, maps: Any, layer: int) -> np.ndarray:
    """Return slots by vLLM's documented rule: a hash of the token's position modulo the replica count."""
    replicas = maps.logical_replica_count[layer].numpy()[ids]
    hashed = (np.arange(len(ids)) * 2654435769) & 0xFFFFFFFF
    return maps.logical_to_physical_map[layer].numpy()[ids, hashed[:, None] % replicas]


def polled(ids: np.ndarray, layer: int) -> np.ndarray:
    """Return slots by GRACE-MoE's weights (Equation 3), drawn in 64 steps by vLLM's hash of the position."""
    slots = slots_by_rank(PLACEMENT[layer], EXPERTS, RANKS)
    load = np.array(EXPECTED_TOKENS[layer]) / (slots >= 0).sum(axis=1)  # of a replica
    weight = 1 / (load[:, None] * (slots >= 0)).sum(axis=0)
    draw = ((np.arange(len(ids)) * 2654435769 & 0xFFFFFFFF) % 64 + 0.5) / 64
    chosen = np.empty_like(ids)
    for token, column in np.ndindex(ids.shape):
        hosts = np.flatnonzero(slots[ids[token, column]] >= 0)
        shares = np.cumsum(weight[hosts])
        host = hosts[np.searchsorted(shares / shares[-1], draw[token], side="right")]
        chosen[token, column] = slots[ids[token, column], host]
    return chosen


def save(slots: list[list[int]], path: Path, experts: int = EXPERTS) -> None:
    load = np.array(EXPECTED_TOKENS) if slots is PLACEMENT else None
    placement = ExpertPlacement(
        np.array(slots), RANKS, experts, model="tiny", method="by hand", expected_tokens=load
    )
    placement.save(path)


def check_refused(call: Any, word: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=word):
        call()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "placement.json"
        save(PLACEMENT, file)
        arguments = int(sys.argv[1]), file
        # Forked, so that vLLM is imported once.
        torch.multiprocessing.start_processes(run, arguments, nprocs=RANKS, start_method="fork")
