"""MoE kernels with internal routing: vLLM's selector on mocked GPUs, and its driver of such a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config.vllm import VllmConfig
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import (
    flashinfer_cutlass_moe,
    gpt_oss_triton_kernels_moe,
    trtllm_mxfp4_moe,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPMonolithic,
)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.moe import avoid_kernels_that_hide_choices, moe_routers
from eldr_serve.engine.vllm.kv.metadata import StepPlan

LAYERS, EXPERTS, K, HIDDEN = 2, 8, 2, 16


def moe_config(backend: str = "auto") -> FusedMoEConfig:
    """Return the configuration of a small GPT-OSS layer."""
    return FusedMoEConfig(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        experts_per_token=K,
        hidden_dim=256,
        intermediate_size=256,
        activation=MoEActivation.SWIGLUOAI,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        in_dtype=torch.bfloat16,
        has_bias=True,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        max_num_tokens=32,
        moe_backend=backend,  # type: ignore[arg-type]
    )


def engine(backend: str = "auto", quantization: str = "gpt_oss_mxfp4", eplb: bool = False) -> Any:
    return SimpleNamespace(
        kernel_config=SimpleNamespace(moe_backend=backend),
        model_config=SimpleNamespace(quantization=quantization),
        parallel_config=SimpleNamespace(enable_eplb=eplb),
    )


def on_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int = 0) -> None:
    """Pretend to have an NVIDIA GPU of this capability, with all packages that kernels need."""
    capability = DeviceCapability(major, minor)

    def at_least(asked: Any, device_id: int = 0) -> bool:
        return capability.to_int() >= (asked[0] * 10 + asked[1] if isinstance(asked, tuple) else asked)

    for name, value in {
        "is_cuda": lambda: True,
        "is_cpu": lambda: False,
        "is_cuda_alike": lambda: True,
        "get_device_capability": lambda device_id=0: capability,
        "has_device_capability": at_least,
        "is_device_capability": lambda asked, device_id=0: asked in (capability.to_int(), (major, minor)),
        "is_device_capability_family": lambda asked, device_id=0: asked // 10 == major,
    }.items():
        monkeypatch.setattr(current_platform, name, value, raising=False)
    monkeypatch.setattr(gpt_oss_triton_kernels_moe, "has_triton_kernels", lambda: True)
    monkeypatch.setattr(trtllm_mxfp4_moe, "has_flashinfer", lambda: True)
    monkeypatch.setattr(flashinfer_cutlass_moe, "has_flashinfer_cutlass_fused_moe", lambda: True)
    plain = SimpleNamespace(model_config=SimpleNamespace(quantization_config=None))
    monkeypatch.setattr(mxfp4, "get_current_vllm_config", lambda: plain)


def selected_kernel(backend: str) -> Any:
    """Return the kernel class that vLLM would run for GPT-OSS."""
    return mxfp4.select_mxfp4_moe_backend(moe_config(backend))[1]


def is_open(kernel: Any) -> bool:
    return not kernel.is_monolithic() or kernel.supports_routing_replay_capture(None)


@pytest.mark.parametrize(
    ("capability", "automatic", "backend", "chosen"),
    [
        ((8, 0), "MarlinExperts", "auto", "MarlinExperts"),
        ((9, 0), "OAITritonMxfp4ExpertsMonolithic", "marlin", "MarlinExperts"),
        ((10, 0), "TrtLlmMxfp4ExpertsMonolithic", "auto", "TrtLlmMxfp4ExpertsMonolithic"),
        ((12, 0), "MarlinExperts", "auto", "MarlinExperts"),
    ],
)
def test_gpt_oss_gets_a_kernel_that_exposes_its_choices(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], automatic: str, backend: str, chosen: str
) -> None:
    on_gpu(monkeypatch, *capability)
    assert selected_kernel("auto").__name__ == automatic
    config = engine()
    avoid_kernels_that_hide_choices(config)
    assert config.kernel_config.moe_backend == backend
    assert selected_kernel(backend).__name__ == chosen
    assert is_open(selected_kernel(backend))


def test_a_gpu_without_a_kernel_that_exposes_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 9)
    assert not is_open(selected_kernel("auto"))
    monkeypatch.setattr(gpt_oss_triton_kernels_moe, "has_triton_kernels", lambda: False)
    config = engine()
    avoid_kernels_that_hide_choices(config)
    assert config.kernel_config.moe_backend == "auto"
    assert is_open(selected_kernel("auto"))


@pytest.mark.parametrize("settings", [{"backend": "triton"}, {"quantization": "fp8"}, {"eplb": True}])
def test_an_explicit_backend_and_other_quantizations_are_kept(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    on_gpu(monkeypatch, 9)
    config = engine(**settings)
    avoid_kernels_that_hide_choices(config)
    assert config.kernel_config.moe_backend == settings.get("backend", "auto")


def test_the_choice_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on_gpu(monkeypatch, 9)
    avoid_kernels_that_hide_choices(engine())
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("eldr_serve")]
    assert line.startswith("MoE kernel: marlin, since vLLM's first choice, OAITritonMxfp4ExpertsMonolithic,")


class InsideRouting(mk.FusedMoEExpertsMonolithic):
    """A kernel that routes by the largest logits, like FlashInfer's, and records its choice on request."""

    replay = True
    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)
    _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(lambda *_: True)
    _supports_routing_method = _supports_router_logits_dtype = staticmethod(lambda *_: True)

    def supports_routing_replay_capture(self) -> bool:
        return self.replay

    def apply(
        self,
        hidden_states: Tensor,
        w1: Any,
        w2: Any,
        router_logits: Tensor,
        *_: Any,
        routing_replay_out: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        if routing_replay_out is not None:
            routing_replay_out.copy_(router_logits.topk(K).indices)
        return hidden_states


class Hidden(InsideRouting):
    replay = False


class Unused(BaseRouter):
    """The layer's router, which such a kernel does not use."""

    routing_method_type = RoutingMethodType.Renormalize

    def _compute_routing(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def layers(kernel: type[InsideRouting]) -> tuple[VllmConfig, list[mk.FusedMoEKernelMonolithicImpl], Any]:
    """Return an engine's configuration with two such layers, and vLLM's drivers for them."""
    impls = [
        mk.FusedMoEKernelMonolithicImpl(
            MoEPrepareAndFinalizeNoDPEPMonolithic(), kernel(moe_config(), FUSED_MOE_UNQUANTIZED_CONFIG)
        )
        for _ in range(LAYERS)
    ]
    layers_by_name = {
        f"model.layers.{number}.mlp.experts": SimpleNamespace(
            router=Unused(K, EXPERTS),
            routed_experts=SimpleNamespace(routing_sink=None),
            _quant_method=SimpleNamespace(is_monolithic=True, moe_kernel=SimpleNamespace(impl=impl)),
        )
        for number, impl in enumerate(impls)
    }
    config: Any = SimpleNamespace(
        speculative_config=None,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type="qwen3_moe")),
        parallel_config=SimpleNamespace(eplb_config=SimpleNamespace(num_redundant_experts=0)),
        compilation_config=SimpleNamespace(static_forward_context=layers_by_name),
    )
    return config, impls, list(layers_by_name.values())


def test_choices_made_in_the_kernel_are_counted() -> None:
    config, impls, drivers = layers(InsideRouting)
    capture = DeviceCapture(
        [router for _, router in moe_routers(config)], max_tokens=32, device="cpu", num_blocks=4, block_size=4
    )
    logits = torch.randn(LAYERS, 6, EXPERTS)
    for impl, layer, layer_logits in zip(impls, drivers, logits, strict=True):
        out = impl.apply(
            torch.zeros(6, HIDDEN),
            torch.empty(0),
            torch.empty(0),
            layer_logits,
            MoEActivation.SWIGLUOAI,
            EXPERTS,
            None,
            False,
            routing_sink=layer.routed_experts.routing_sink,
        )
        assert isinstance(out, Tensor)
    # The last of the six rows is padding.
    plan = StepPlan(new_blocks=[1, 2], finished_prompts={"r": [1, 2]}, requests=1, tokens=5)
    counts, _ = capture.count_last_step(torch.tensor([4, 5, 6, 7, 8, -1]), plan)
    expected = torch.zeros(LAYERS, EXPERTS)
    for layer in range(LAYERS):
        for token in logits[layer, :5].topk(K).indices:
            expected[layer, token] += 1
    assert counts.prompts["r"].wait().tolist() == expected.tolist()


def test_a_kernel_that_hides_its_choices_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"MoE layer 0 runs Hidden, whose router runs inside"):
        moe_routers(layers(Hidden)[0])


def test_a_kernel_that_routes_the_tokens_of_all_ranks_is_refused() -> None:
    """vLLM gathers the tokens of data-parallel ranks before a kernel that routes internally."""
    config, impls, _ = layers(InsideRouting)
    for impl in impls:
        impl.fused_experts.moe_config.moe_parallel_config.dp_size = 2
    with pytest.raises(
        UnsupportedEngineError,
        match=r"InsideRouting routes the tokens of all data-parallel ranks.*moe_backend",
    ):
        moe_routers(config)


@pytest.mark.parametrize("dispatches", [True, False])
def test_a_layer_gathers_tokens_before_it_routes_them_only_if_its_kernel_does_not_dispatch(
    dispatches: bool,
) -> None:
    runner: Any = SimpleNamespace(
        moe_config=SimpleNamespace(dp_size=2, is_sequence_parallel=False),
        _quant_method=SimpleNamespace(supports_internal_mk=dispatches),
    )
    gathers: Any = vars(MoERunner)["do_naive_dispatch_combine"]
    assert gathers.fget(runner) is not dispatches
