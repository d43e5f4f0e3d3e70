"""Counting never waits in a step: all sizes are known on the host, and results are copied asynchronously."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router

from eldr_serve.engine.vllm.capture import expert_capture as module
from eldr_serve.engine.vllm.capture.block_counts import active_experts
from eldr_serve.engine.vllm.capture.expert_capture import ExpertCapture
from eldr_serve.engine.vllm.capture.host_copy import HostCopies, HostCopy
from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
from eldr_serve.engine.vllm.capture.on_host import HostCapture
from eldr_serve.engine.vllm.kv.metadata import StepPlan
from tests.engine.operators import WAITING, Operators

LAYERS, EXPERTS, K, SIZE = 2, 8, 2, 4
PLAN = StepPlan(
    new_blocks=[3, 1, 2],
    finished_prompts={"a": [3], "b": [1, 2]},
    decode_slots={"b": (3, [7, 8]), "a": (2, [14])},
    requests=2,
    tokens=8,
    drafts=6,
    kv_tokens=12,
)
SLOTS = [12, 13, 14, 4, 5, 6, 7, 8, -1, -1]  # three tokens of request a, five of b, padding


class Router:
    top_k, global_num_experts = K, EXPERTS

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None] | None) -> None:
        assert capture_fn is not None
        self.show = capture_fn


def device_capture(routers: Any, **sizes: Any) -> ExpertCapture:
    return DeviceCapture(routers, max_tokens=16, device="cpu", **sizes)


either_capture = pytest.mark.parametrize("capture_type", [device_capture, HostCapture])


def step(capture_type: Callable[..., ExpertCapture]) -> tuple[Any, Any, Tensor]:
    """Return the results of a step, and its tokens' choices int32[T,L,K]."""
    routers = [Router() for _ in range(LAYERS)]
    capture = capture_type(routers, num_blocks=6, block_size=SIZE)
    assert capture.cache is not None
    capture.cache.rows += 1  # counts of earlier blocks
    chosen = torch.rand(len(SLOTS), LAYERS, EXPERTS).topk(K).indices.int()
    for layer, router in enumerate(routers):
        router.show(chosen[:, layer])
    counts, active = capture.count_last_step(torch.tensor(SLOTS), PLAN)
    return counts, active, chosen


@either_capture
def test_a_step_counts_what_its_tokens_chose(capture_type: Callable[..., ExpertCapture]) -> None:
    counts, active, shown = step(capture_type)
    chosen = shown.numpy()
    for request, tokens in {"a": chosen[:3], "b": chosen[3:8]}.items():
        expected = np.zeros((LAYERS, EXPERTS), int)
        for token in tokens:
            for layer in range(LAYERS):
                expected[layer, token[layer]] += 1
        np.testing.assert_array_equal(counts.prompts[request].wait(), expected)
    routes = {request: (first, experts) for request, first, experts in counts.routes.split_by_request()}
    assert {request: first for request, (first, _) in routes.items()} == {"b": 3, "a": 2}
    np.testing.assert_array_equal(routes["b"][1], chosen[6:8])
    np.testing.assert_array_equal(routes["a"][1], chosen[2:3])
    assert active.wait().tolist() == [len(np.unique(chosen[:8, layer])) for layer in range(LAYERS)]


@either_capture
def test_a_rank_that_does_not_report_still_counts(
    monkeypatch: pytest.MonkeyPatch, capture_type: Callable[..., ExpertCapture]
) -> None:
    """With tensor parallelism, every rank has the rows but only the first one reports them."""
    copies: list[Tensor] = []
    monkeypatch.setattr(HostCopies, "start", lambda _, tensor: copies.append(tensor))
    routers = [[Router() for _ in range(LAYERS)] for _ in range(2)]
    ranks = [
        capture_type(of_rank, num_blocks=6, block_size=SIZE, reports=rank == 0)
        for rank, of_rank in enumerate(routers)
    ]
    chosen = torch.rand(len(SLOTS), LAYERS, EXPERTS).topk(K).indices.int()
    for of_rank in routers:
        for layer, router in enumerate(of_rank):
            router.show(chosen[:, layer])
    first = ranks[0].count_last_step(torch.tensor(SLOTS), PLAN)
    assert first[0].prompts.keys() == {"a", "b"}
    copies.clear()
    counts, active = ranks[1].count_last_step(torch.tensor(SLOTS), PLAN)
    assert (counts.prompts, counts.routes, active, copies) == ({}, None, None, [])
    caches = [rank.cache.rows for rank in ranks if rank.cache is not None]
    assert caches[0].sum() == PLAN.tokens * LAYERS * K
    assert torch.equal(*caches)


def test_a_step_reads_no_tensor_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: code that reads one, or needs a size that depends on one, raises."""
    monkeypatch.setattr(module, "HostCopies", lambda device: SimpleNamespace(start=lambda tensor: tensor))
    with FakeTensorMode(allow_non_fake_inputs=True):  # lists of blocks come from the host
        counts, active, _ = step(device_capture)
    assert {r: c.shape for r, c in counts.prompts.items()} == dict.fromkeys("ab", (LAYERS, EXPERTS))
    assert counts.routes.chosen.shape == (3, LAYERS, K)
    assert active.shape == (LAYERS,)


@either_capture
def test_shared_experts_in_the_same_kernel_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, capture_type: Callable[..., ExpertCapture]
) -> None:
    """vLLM's router on AMD with AITER lists two shared experts after the chosen ones."""
    monkeypatch.setattr(fused_topk_bias_router.rocm_aiter_ops, "is_fused_moe_enabled", lambda: True)
    router = fused_topk_bias_router.FusedTopKBiasRouter(
        K, EXPERTS, torch.zeros(EXPERTS), scoring_func="softmax", num_fused_shared_experts=2
    )
    capture = capture_type([router], num_blocks=2, block_size=8)
    logits = torch.rand(8, EXPERTS)
    _, shown = router._select_experts(logits, logits)
    assert shown.shape == (8, K + 2)
    counts, _ = capture.count_last_step(
        torch.arange(8), StepPlan(new_blocks=[0], finished_prompts={"a": [0]}, requests=1, tokens=8)
    )
    chosen = logits.topk(K).indices.flatten()
    assert counts.prompts["a"].wait().tolist() == [torch.bincount(chosen, minlength=EXPERTS).tolist()]


@pytest.mark.parametrize(
    "waits",
    [
        lambda chosen: chosen[:, chosen[0, :, 0] >= 0],
        lambda chosen: chosen.sum().item(),
        lambda chosen: active_experts(chosen, EXPERTS).tolist(),
        lambda chosen: chosen.nonzero(),
        lambda chosen: chosen.numpy(),
        lambda chosen: bool(chosen[0, 0, 0] >= 0),
        lambda chosen: chosen.masked_select(chosen > 1),
    ],
)
def test_calls_that_would_wait_are_detected(waits: Callable[[Tensor], Any]) -> None:
    operators = Operators()
    operators.record_calls(waits)(torch.ones((LAYERS, 4, K), dtype=torch.int16))
    assert operators.names & WAITING
    with (
        FakeTensorMode(),
        pytest.raises((DataDependentOutputException, DynamicOutputShapeException, RuntimeError)),
    ):
        waits(torch.ones((LAYERS, 4, K), dtype=torch.int16))


class Event:
    """A CUDA event that completes when it is waited for."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


def test_a_copy_is_ready_when_its_event_is_over() -> None:
    event = Event()
    copy = HostCopy(np.arange(3), event, torch.arange(3))
    assert not copy.ready
    event.over = True
    assert copy.ready
    assert HostCopies("cpu").start(torch.arange(3)).ready


def test_pickling_a_copy_waits_for_it() -> None:
    event = Event()
    restored = pickle.loads(pickle.dumps(HostCopy(np.arange(3), event, torch.arange(3))))
    assert event.over
    assert restored.ready
    assert restored.wait().tolist() == [0, 1, 2]
