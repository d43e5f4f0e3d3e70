"""Data-parallel ranks compute the same layer whether they gather tokens before or after top-k."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eldr_serve.engine.vllm.compat import ep, ep_ranks
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.moe import _find_source
from eldr_serve.engine.vllm.ep.exchange import RankBatches
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig, parse_experts_config

HIDDEN, EXPERTS, TOP_K = 8, 6, 2
GATE = torch.randn(HIDDEN, EXPERTS, generator=torch.Generator().manual_seed(9)).double()
# Tokens of each rank in each step. A rank without tokens runs one of no request.
STEPS = [[3, 1], [0, 4], [2, 2], [0, 0], [1, 0]]
THREAD = threading.local()  # a rank is a thread


class ThreadBatches(RankBatches):
    """The exchange of a rank that is a thread.

    Args:
        values: list with a place for each rank, which all ranks share.
        barrier: barrier of all ranks.
    """

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self.ranks, self._values, self._barrier = rank, len(values), values, barrier
        self.sizes, self.forwards, self.sent = [0] * self.ranks, 0, []

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self._rank] = value
        self._barrier.wait(timeout=30)
        values = list(self._values)
        self._barrier.wait(timeout=30)
        return values

    def begin(self, tokens: int) -> None:
        self.sizes = self._exchange(tokens)
        self.forwards += 1

    def gather(self, *parts: Tensor) -> list[Tensor]:
        self.sent.append([part.shape[1] for part in parts])
        by_rank = self._exchange([part[: self.sizes[self._rank]] for part in parts])
        return [torch.cat(rows) for rows in zip(*by_rank, strict=True)]

    def combine(self, partial: Tensor) -> Tensor:
        return self.select_own(torch.stack(self._exchange(partial)).sum(dim=0))


def tokens_of(rank: int, step: int, tokens: int) -> Tensor:
    """Return hidden states of a rank's tokens."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(tokens, HIDDEN, generator=generator).double()


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(dim=1).topk(TOP_K)
    return weights, experts


def experts_output(hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the weighted results of experts that multiply a token by their number and one."""
    return hidden * (weights * (experts + 1)).sum(dim=1, keepdim=True)


def vllm_forward(
    self: Any, hidden_states: Tensor, router_logits: Tensor, shared: Any, input_ids: Any = None
) -> Any:
    """Stand in for vLLM's `MoERunner._forward_impl` of a rank that has every second expert."""
    logits = hidden_states @ GATE if self.gate is not None else router_logits
    weights, experts = choose(logits)
    assert input_ids is None or len(input_ids) == len(hidden_states)
    self.router.capture_fn(experts)
    output = torch.empty_like(hidden_states)
    hidden, _, _, all_experts, all_weights = self.dispatch.prepare(
        hidden_states, weights, experts, EXPERTS, None, False, None
    )
    self.routes.append(all_experts)
    own_weights = all_weights * (all_experts % 2 == THREAD.batches._rank)
    partial = experts_output(hidden, own_weights, all_experts)
    self.dispatch.finalize(output, partial, weights, experts, False, None)
    return output if shared is None else (shared, output)


class Router:
    """The part of vLLM's BaseRouter that is used here."""

    top_k, global_num_experts = TOP_K, EXPERTS

    def set_capture_fn(self, capture_fn: Any) -> None:
        self.capture_fn = capture_fn


def make_runner(before: bool, has_gate: bool) -> Any:
    runner = object.__new__(ep.PlacedMoERunner)
    runner.__dict__ |= {
        "gate": object() if has_gate else None,
        "router": Router(),
        "dispatch": ep.RankDispatch(begins=not before, gathers=not before),
        "routes": [],
        "_gathers_first": before,
        "_begins": True,
    }
    if before:
        runner.__dict__["own_choices"] = ep.OwnChoices(runner.router)
    return runner


def run_rank(rank: int, values: list[Any], barrier: threading.Barrier, before: bool, has_gate: bool) -> Any:
    """Return outputs, all ranks' routes and captured choices of a rank's steps, and the widths it sent."""
    THREAD.batches = ThreadBatches(rank, values, barrier)
    runner, captured, outputs = make_runner(before, has_gate), [], []
    _find_source(0, runner).set_capture_fn(captured.append)
    for step, sizes in enumerate(STEPS):
        THREAD.idle = not sizes[rank]
        hidden = tokens_of(rank, step, max(sizes[rank], 1))
        logits = hidden if has_gate else hidden @ GATE
        ids = torch.arange(len(hidden))
        shared, output = runner._forward_impl(hidden, logits, "shared", ids)
        assert shared == "shared"
        assert output.shape == hidden.shape
        outputs.append(output[: sizes[rank]])
    return outputs, runner.routes, captured, THREAD.batches


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs two ranks."""
    monkeypatch.setattr(ep.MoERunner, "_forward_impl", vllm_forward)
    for module in (ep, ep_ranks):
        monkeypatch.setattr(module, "rank_batches", lambda: THREAD.batches)
    metadata = {True: None, False: {}}  # metadata of attention for an idle and a busy rank
    monkeypatch.setattr(
        ep_ranks, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata[THREAD.idle])
    )

    def run(**settings: Any) -> list[Any]:
        values, barrier = [None, None], threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            started = [pool.submit(run_rank, rank, values, barrier, **settings) for rank in (0, 1)]
            return [future.result() for future in started]

    return run


@pytest.mark.parametrize("has_gate", [True, False])
def test_both_ways_to_gather_give_the_same_layer(ranks: Any, has_gate: bool) -> None:
    after, before = (ranks(before=before, has_gate=has_gate) for before in (False, True))
    for rank in (0, 1):
        for outputs, routes, captured, _ in (after[rank], before[rank]):
            for step, sizes in enumerate(STEPS):
                all_tokens = torch.cat([tokens_of(other, step, n) for other, n in enumerate(sizes)])
                weights, experts = choose(all_tokens @ GATE)
                own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                assert torch.equal(routes[step], experts)
                assert torch.equal(captured[step][: sizes[rank]], experts[own])
                assert torch.allclose(outputs[step], experts_output(all_tokens, weights, experts)[own])
        assert after[rank][-1].forwards == before[rank][-1].forwards == len(STEPS)


def test_a_gather_before_top_k_sends_no_choices(ranks: Any) -> None:
    for has_gate, widths in ((True, [HIDDEN, 1]), (False, [HIDDEN, EXPERTS, 1])):
        *_, batches = ranks(before=True, has_gate=has_gate)[0]
        assert batches.sent == [widths] * sum(any(sizes) for sizes in STEPS)  # last: token ids
    *_, batches = ranks(before=False, has_gate=True)[0]
    assert batches.sent == [[HIDDEN, TOP_K, TOP_K]] * len(STEPS)


def test_a_capture_can_be_removed() -> None:
    router = Router()
    ep.OwnChoices(router).set_capture_fn(None)
    assert router.capture_fn is None


def vllm_config(gather: str, ranks: int) -> Any:
    parallel = SimpleNamespace(data_parallel_size=ranks)
    return SimpleNamespace(additional_config={"eldr_experts": {"gather": gather}}, parallel_config=parallel)


def test_tokens_are_gathered_after_top_k_by_default() -> None:
    assert CpuExpertsConfig().gather == "after-top-k"
    for gather in ("after-top-k", "before-top-k"):
        config = vllm_config(gather, ranks=2)
        assert ep._gathers_before_top_k(config) == (gather == "before-top-k")
    assert not ep._gathers_before_top_k(vllm_config("after-top-k", ranks=1))


def test_other_values_are_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"eldr_experts has the invalid value .*gather"):
        parse_experts_config(CpuExpertsConfig, {"gather": "before"})


def test_a_gather_before_top_k_needs_data_parallel_ranks() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"without data-parallel ranks.*leave gather out"):
        ep._gathers_before_top_k(vllm_config("before-top-k", ranks=1))


@pytest.mark.parametrize("before", [True, False])
def test_the_dispatch_gathers_if_the_layer_does_not(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep.UnquantizedFusedMoEMethod, "_init_moe_kernel", lambda *_: None)
    monkeypatch.setattr(ep, "FusedMoEKernel", lambda dispatch, experts: dispatch)
    runners = {"0": object.__new__(ep.PlacedMoERunner), "1": object.__new__(ep.PlacedMoERunner)}
    method = object.__new__(ep.PlacedMoEMethod)
    method.__dict__ |= {
        "moe": SimpleNamespace(use_ep=True, dp_size=2),
        "moe_kernel": SimpleNamespace(fused_experts=None),
        "_gathers_first": before,
        "_layer_names": ["0", "1"],
        "_runners": runners,
    }
    for name in ("0", "1"):
        method.__dict__["moe_kernel"] = SimpleNamespace(fused_experts=None)
        method._init_moe_kernel(SimpleNamespace(layer_name=name))
        assert method.moe_kernel._gathers is not before
        assert method.moe_kernel._begins is (name == "0" and not before)
    runners["1"] = SimpleNamespace()
    method.__dict__["moe_kernel"] = SimpleNamespace(fused_experts=None)
    if before:
        with pytest.raises(UnsupportedEngineError, match="layers of type SimpleNamespace: leave gather out"):
            method._init_moe_kernel(SimpleNamespace(layer_name="1"))
    else:
        method._init_moe_kernel(SimpleNamespace(layer_name="1"))
