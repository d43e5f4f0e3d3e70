"""Engines whose counts would be inexact are refused at the start, with the reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
from pydantic import BaseModel, field_validator
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu_worker import Worker

from eldr_serve.engine.vllm.compat import checked
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError, start_errors
from eldr_serve.engine.vllm.compat.engine import check_engine
from eldr_serve.engine.vllm.compat.kv_cache import CountedGroup, counted_group
from eldr_serve.engine.vllm.compat.moe import moe_routers
from eldr_serve.engine.vllm.compat.nixl import check_side_channel
from eldr_serve.engine.vllm.config import Role, engine_kwargs
from eldr_serve.engine.vllm.ep.swap import has_live_experts
from eldr_serve.engine.vllm.gpu_worker import EldrWorker
from eldr_serve.errors import ConfigurationError

COMPAT = sorted(Path(checked.__file__).parent.glob("*.py"))


def config(
    speculative: Any = None,
    layers: Any = None,
    return_experts: bool = False,
    kv_role: str = "kv_both",
    kind: str = "qwen3_moe",
    custom_ops: bool = True,
    experts: int = 8,
    redundant: int = 0,
    **parallel: Any,
) -> Any:
    sizes = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_size_local": parallel.get("data_parallel_size", 1),
        "data_parallel_backend": "mp",
        "distributed_executor_backend": "uni",
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "tensor_parallel_size": 1,
        "enable_expert_parallel": True,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
        "enable_elastic_ep": False,
        "eplb_config": SimpleNamespace(num_redundant_experts=redundant),
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        speculative_config=speculative,
        kv_transfer_config=SimpleNamespace(kv_role=kv_role),
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: 12,
            get_num_experts=lambda: experts,
            hf_text_config=SimpleNamespace(model_type=kind),
        ),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=return_experts),
        compilation_config=SimpleNamespace(
            static_forward_context=layers or {}, is_custom_op_enabled=lambda name: custom_ops
        ),
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.4", "0.32.1.post1", "0.32.10+cu130"])
def test_a_patch_of_the_checked_vllm_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    check_engine(config(), "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_data_parallel_ranks_with_whole_experts_are_accepted(device: str) -> None:
    check_engine(config(data_parallel_size=4), device)
    check_engine(config(data_parallel_size=4, experts=6, redundant=2), device)


@pytest.mark.parametrize(
    "version", ["0.31.9", "0.33.0", "1.32.0", "0.320.0", "0.32.1rc1", "0.32.1.dev7", "dev"]
)
def test_another_vllm_is_refused_with_the_same_names(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(
        UnsupportedEngineError, match=rf"vLLM {version} .*pip install vllm==0\.32\.0"
    ) as refused:
        check_engine(config(), "cpu")
    assert "\n" not in str(refused.value)
    with pytest.raises(UnsupportedEngineError, match=version), start_errors():
        pytest.fail("it started")


def test_a_vllm_without_a_required_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    with pytest.raises(
        UnsupportedEngineError, match=r"no .*resolve_kv_cache_block_sizes.*pip install vllm=="
    ):
        check_engine(config(), "cpu")


@pytest.mark.parametrize(
    ("our_module", "vllm_module"),
    [
        ("compat.engine", "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"),
        ("compat.kv_cache", "vllm.forward_context"),
        ("compat.moe", "vllm.model_executor.layers.fused_moe.router.cpu_router"),
        ("compat.eplb", "vllm.distributed.eplb.eplb_state"),
        ("compat.described", "vllm.model_executor.model_loader.utils"),
        ("compat.serve_llm", "vllm.v1.engine.output_processor"),
        ("compat.buffered_metrics", "vllm.v1.metrics.ray_wrappers"),
        ("worker", "vllm.distributed.kv_transfer.kv_connector.v1.nixl"),
    ],
)
def test_a_vllm_without_a_required_module_is_refused(
    monkeypatch: pytest.MonkeyPatch, our_module: str, vllm_module: str
) -> None:
    package = "eldr_serve.engine.vllm"
    for name in list(sys.modules):
        if name.startswith(f"{package}.") and name not in (f"{package}.compat", f"{package}.compat.checked"):
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:  # otherwise it is removed with its parent
                monkeypatch.delattr(sys.modules[parent], child)
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, vllm_module, None)
    with pytest.raises(UnsupportedEngineError, match=rf"{vllm_module}.*pip install vllm==0\.32\.0"):
        importlib.import_module(f"{package}.{our_module}")


@pytest.mark.parametrize("path", COMPAT, ids=[path.stem for path in COMPAT])
def test_every_import_of_vllms_internals_is_guarded(path: Path) -> None:
    tree = ast.parse(path.read_text())
    guarded = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and ast.unparse(block.items[0].context_expr) == "internal_imports()"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        internal = isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm"
        if internal and node.module != "vllm.config":  # vllm.config is public
            assert node in guarded, f"line {node.lineno}: {ast.unparse(node)}"


def test_an_error_of_vllm_with_several_lines_becomes_one_sentence() -> None:
    class Settings(BaseModel):
        model: str

        @field_validator("model")
        @classmethod
        def refused(cls, value: str) -> str:
            raise ValueError(f"Model architectures ['{value}'] failed to be inspected.\nSee the logs.")

    with (
        pytest.raises(UnsupportedEngineError, match=r"inspected\. See the logs\..*torchvision") as refusal,
        start_errors(),
    ):
        Settings(model="Qwen3_5MoeForCausalLM")
    assert "\n" not in str(refusal.value)


def test_a_plain_engine_is_accepted() -> None:
    check_engine(config(), "cpu")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"data_parallel_size": 2, "enable_expert_parallel": False}, "set enable_expert_parallel to true"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "set tensor_parallel_size to 1"),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, "leave data_parallel_rank"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb out"),
        ({"data_parallel_size": 3}, "8 experts on 3 data-parallel ranks: set data_parallel_size"),
        ({"data_parallel_size": 2, "experts": 6, "redundant": 1}, "7 experts on 2 data-parallel ranks"),
        ({"decode_context_parallel_size": 2}, "decode context"),
        ({"prefill_context_parallel_size": 2}, "prefill context"),
        ({"enable_dbo": True}, "overlap"),
        ({"speculative": object()}, "prefills and decodes.*leave speculative_config out"),
        ({"return_experts": True}, "enable_return_routed_experts"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_that_would_not_count_exactly_is_refused(
    settings: dict[str, Any], reason: str, device: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason) as refused:
        check_engine(config(**settings), device)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"data_parallel_size_local": 4}, "on several nodes: leave data_parallel_size_local and nnodes out"),
        ({"data_parallel_backend": "ray"}, "actors of Ray.*leave data_parallel_backend"),
        ({"distributed_executor_backend": "ray"}, "actors of Ray.*distributed_executor_backend out"),
        ({"enable_elastic_ep": True}, "elastic.*set enable_elastic_ep to false"),
    ],
)
def test_data_parallel_ranks_that_a_replica_on_gpus_cannot_have_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        check_engine(config(data_parallel_size=8, **settings), "cuda")
    check_engine(config(**settings | {"data_parallel_size_local": 1}), "cuda")  # it has no ranks


ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=32, **ATTENTION)
MLA = MLAAttentionSpec(block_size=64, **ATTENTION)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=128, **ATTENTION)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


def group_of(*specs: Any, longest: int = 512, caching: bool = True, unit: int | None = None) -> CountedGroup:
    """Return the counted group of an engine with a group of two layers for each spec."""
    groups = [KVCacheGroupSpec([f"layer.{n}.0", f"layer.{n}.1"], spec) for n, spec in enumerate(specs)]
    cache = SimpleNamespace(block_size=32, enable_prefix_caching=caching, prefix_match_unit=unit)
    settings: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest),
        cache_config=cache,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
    )
    return counted_group(settings, KVCacheConfig(8, [], groups))


def test_tokens_are_counted_by_the_group_of_full_attention() -> None:
    assert group_of(FULL) == CountedGroup(0, 32, "layer.0.0")
    assert group_of(WINDOW, MLA, WINDOW) == CountedGroup(1, 64, "layer.1.0")
    assert group_of(STATE, STATE, FULL) == CountedGroup(2, 32, "layer.2.0")


def test_a_window_longer_than_all_prompts_can_be_counted() -> None:
    assert group_of(WINDOW, longest=128) == CountedGroup(0, 16, "layer.0.0")
    assert group_of(WINDOW, FULL, longest=512).index == 1


@pytest.mark.parametrize("specs", [(WINDOW,), (STATE,), (WINDOW, STATE)])
def test_an_engine_that_frees_blocks_within_a_prompt_is_refused(specs: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"{type(specs[0]).__name__}.*max_model_len"):
        group_of(*specs, longest=129)


def test_prefix_hits_that_end_within_a_counted_block_are_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"16 tokens .*32\): leave prefix_match_unit out"):
        group_of(FULL, STATE, unit=16)
    with pytest.raises(UnsupportedEngineError, match="enable_prefix_caching to false"):
        group_of(FULL, STATE, WINDOW)
    assert group_of(FULL, STATE, unit=16, caching=False).index == 0
    assert group_of(FULL, STATE, unit=32).index == group_of(FULL, STATE).index == 0
    # Without recurrent states, hits end at whole blocks of all groups.
    assert group_of(FULL, WINDOW).index == 0


@pytest.mark.parametrize("kv_role", ["kv_consumer", "kv_producer"])
def test_a_serving_engine_may_decode_speculatively(kv_role: str) -> None:
    check_engine(config(speculative=object(), kv_role=kv_role), "cpu")


class Router(BaseRouter):
    routing_method_type = None

    def _compute_routing(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def layer(router: Any, monolithic: bool = False, gathers: bool = False) -> Any:
    """Return an MoE layer, which `gathers` the tokens of data-parallel ranks before it routes them."""
    return SimpleNamespace(
        router=router,
        _quant_method=SimpleNamespace(is_monolithic=monolithic),
        do_naive_dispatch_combine=gathers,
    )


def test_routers_are_found_in_the_order_of_their_layers() -> None:
    routers = {n: Router(2, 8) for n in (10, 2, 0)}
    layers = {f"model.layers.{n}.mlp.experts": layer(r) for n, r in routers.items()}
    layers["model.layers.0.self_attn.attn"] = SimpleNamespace()
    assert moe_routers(config(layers=layers)) == [(n, routers[n]) for n in (0, 2, 10)]


def test_replicas_of_eplb_are_not_counted_as_experts() -> None:
    router = Router(2, 8)
    ((_, source),) = moe_routers(config(layers={"model.layers.0.mlp.experts": layer(router)}, redundant=2))
    assert (source.top_k, source.global_num_experts) == (2, 6)
    source.set_capture_fn(print)
    assert router.capture_fn is print


@pytest.mark.parametrize(
    "drafter", ["model.layers.12.mtp_block", "mtp.layers.0", "draft_model.model.layers.0"]
)
def test_the_drafters_experts_are_not_counted(drafter: str) -> None:
    routers = {n: Router(2, 8) for n in (3, 11)}
    layers = {f"model.layers.{n}.mlp.experts": layer(r) for n, r in routers.items()}
    layers[f"{drafter}.mlp.experts"] = layer(Router(2, 16))
    assert moe_routers(config(layers=layers, speculative=object())) == list(routers.items())


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (
            {f"model.layers.{n}.mlp.experts": layer(Router(2, 8 * n)) for n in (1, 2)},
            "layer 2 chooses 2 of 16 experts, and layer 1 chooses 2 of 8.*without locality",
        ),
        (
            {"model.layers.0.mlp.experts": layer(CPURouter(2, 8, scoring_func="sigmoid"))},
            "scores experts by sigmoid .*on GPUs",
        ),
        ({"model.layers.0.mlp.experts": layer(Router(2, 8), monolithic=True)}, "layer 0 .*moe_backend"),
        ({"model.layers.0.mlp.experts": layer(object())}, "does not show its choices"),
        (
            {"model.layers.0.mlp.experts": layer(Router(2, 8), gathers=True)},
            "MoE layer 0 routes the tokens of all data-parallel ranks.*moe_backend",
        ),
        ({"model.layers.0.self_attn.attn": SimpleNamespace()}, "no MoE layer.*name a model with experts"),
    ],
)
def test_a_model_that_hides_its_choices_is_refused(layers: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        moe_routers(config(layers=layers))


def test_zero_experts_are_refused() -> None:
    router = ZeroExpertRouter(2, 8, torch.zeros(10), num_logical_experts=8, zero_expert_type="identity")
    with pytest.raises(UnsupportedEngineError, match=r"zero experts.*without locality"):
        moe_routers(config(layers={"model.layers.0.mlp.experts": layer(router)}))


def test_a_correction_bias_that_the_cpu_router_ignores_is_refused() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])

    def router(**settings: Any) -> CPURouter:
        return CPURouter(1, 4, e_score_correction_bias=bias, **settings)

    def choose(router: CPURouter) -> int:
        return int(router._compute_routing(logits, logits, None)[1])

    grouped = router(use_grouped_topk=True, num_expert_group=1, topk_group=1)
    assert (choose(router()), choose(grouped)) == (0, 3)  # a vLLM that applies the bias needs no refusal
    assert moe_routers(config(layers={"model.layers.0.mlp.experts": layer(grouped)})) == [(0, grouped)]
    with pytest.raises(UnsupportedEngineError, match=r"correction bias.*on GPUs"):
        moe_routers(config(layers={"model.layers.0.mlp.experts": layer(router())}))


def test_wrong_position_embeddings_of_the_cpu_kernel_are_refused() -> None:
    # VllmConfig writes settings to the environment; engines of other tests would inherit them.
    with mock.patch.dict(os.environ), set_current_vllm_config(VllmConfig()):
        rotary = get_rope(32, 64, is_neox_style=True, rope_parameters={"rope_type": "default"})
    positions, queries, keys = torch.arange(5), torch.randn(5, 2, 32), torch.randn(5, 1, 32)

    def rotate(embed: Any, *shape: int) -> torch.Tensor:
        query, _ = embed(positions, queries.reshape(shape).clone(), keys.reshape(5, -1).clone())
        result: torch.Tensor = query.reshape(5, 2, 32)
        return result

    right = rotate(rotary.forward_native, 5, 64)
    torch.testing.assert_close(rotate(rotary.forward_native, 5, 2, 32), right)
    torch.testing.assert_close(rotate(rotary.forward_cpu, 5, 64), right)
    # a vLLM whose kernel separates heads needs no refusal
    assert not torch.allclose(rotate(rotary.forward_cpu, 5, 2, 32), right, atol=0.1)
    layers = {"model.layers.0.feed_forward.experts": layer(Router(2, 8))}
    assert moe_routers(config(layers=layers, kind="lfm2_moe", custom_ops=False))
    with pytest.raises(UnsupportedEngineError, match=r'lfm2_moe wrongly on CPUs.*\["-rotary_embedding"\]'):
        moe_routers(config(layers=layers, kind="lfm2_moe"))


def test_a_side_channel_that_cannot_listen_is_refused() -> None:
    def scheduler(host: str, port: int, listener: Any = None) -> Any:
        return SimpleNamespace(
            side_channel_host=host, side_channel_port=port, _nixl_handshake_listener_t=listener
        )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(UnsupportedEngineError, match=f"{host}:{port} .*in use"):
                check_side_channel(scheduler(host, port))
        check_side_channel(scheduler("localhost", port, listener=object()))
    check_side_channel(scheduler("localhost", port))
    with pytest.raises(UnsupportedEngineError, match=r"203\.0\.113\.7"):
        check_side_channel(scheduler("203.0.113.7", port))  # address of another machine


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="calibrate"):
        engine_kwargs("router")  # type: ignore[arg-type]


def test_spans_exist_for_served_requests_and_need_statistics() -> None:
    spans = {"otlp_traces_endpoint": "http://127.0.0.1:4317", "collect_detailed_traces": ["all"]}
    assert spans.items() <= engine_kwargs("decode", **spans).items()  # type: ignore[arg-type]
    assert not spans.keys() & engine_kwargs("calibrate", disable_log_stats=True, **spans).keys()  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="disable_log_stats"):
        engine_kwargs("prefill", disable_log_stats=True, **spans)  # type: ignore[arg-type]


def test_an_engine_without_statistics_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine_kwargs("calibrate", disable_log_stats=True)
    engine_kwargs("decode", disable_log_stats=False)
    assert not caplog.records
    assert engine_kwargs("decode", disable_log_stats=True)["disable_log_stats"]
    (warned,) = caplog.messages
    assert "the decode engine has disable_log_stats" in warned


NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(
    ("role", "drafting", "drafts", "asynchronous"),
    [
        ("decode", NGRAM, True, False),  # vLLM requires it
        ("decode", MTP, True, True),
        ("prefill", NGRAM, False, True),
        ("prefill", MTP, True, True),  # NIXL rejects two engines that differ in it
        ("calibrate", MTP, False, False),
    ],
)
def test_only_engines_that_verify_drafts_make_them(
    role: Role, drafting: dict[str, Any], drafts: bool, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = engine_kwargs(role, speculative_config=drafting)
    assert kwargs.get("speculative_config") == (drafting if drafts else None)
    assert kwargs["async_scheduling"] is asynchronous
    assert ("Async" in kwargs["scheduler_cls"]) is asynchronous
    messages = [record.getMessage() for record in caplog.records]
    assert messages == (
        [] if drafts else [f"speculative decoding is off on the {role} engine, which verifies no drafts"]
    )


def test_engines_without_drafts_are_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    assert "speculative_config" not in engine_kwargs("prefill")
    assert engine_kwargs("decode", speculative_config=None)["async_scheduling"]
    assert not caplog.records


@pytest.mark.parametrize(("device", "worker"), [("cpu", None), ("gpu", "EldrWorker")])
def test_a_gpu_has_a_worker_that_chooses_the_kernel(device: str, worker: str | None) -> None:
    worker_class = engine_kwargs("decode", device=device).get("worker_cls")
    assert worker_class == (worker and f"eldr_serve.engine.vllm.gpu_worker.{worker}")


def test_a_gpu_engine_with_expert_settings_has_the_worker_that_applies_them() -> None:
    settings = {"additional_config": {"eldr_experts": {}}}
    assert engine_kwargs("decode", **settings)["worker_cls"] == "eldr_serve.engine.vllm.eplb.PlacedWorker"
    assert "worker_cls" not in engine_kwargs("decode", device="cpu", **settings)


@pytest.mark.parametrize(
    ("parallel", "switch", "settings", "is_live"),
    [
        (True, "1", None, True),
        (True, "0", {"eldr_experts": {}}, True),
        (True, "0", {"other": {}}, False),
        (True, "0", None, False),
        (False, "1", {"eldr_experts": {}}, False),
    ],
)
def test_engines_whose_workers_report_their_experts(
    parallel: bool, switch: str, settings: Any, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELDR_EXPERT_PARALLEL", switch)
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_expert_parallel=parallel), additional_config=settings
    )
    assert has_live_experts(vllm_config) == is_live


def test_the_worker_has_the_arguments_of_vllms_worker() -> None:
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(worker.load_model).parameters.values()]
        for worker in (EldrWorker, Worker)
    )
    assert ours == theirs
