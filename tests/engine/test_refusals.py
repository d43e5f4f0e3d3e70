"""What would make counts inexact is refused at the start, with the reason."""

from __future__ import annotations

import inspect
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.worker.gpu_worker import Worker

from eldr_serve.engine.compat import UnsupportedEngineError, check_engine, check_side_channel, moe_routers
from eldr_serve.engine.config import Role, engine_kwargs
from eldr_serve.engine.gpu_worker import EldrWorker


def config(
    block_size: int = 16,
    speculative: Any = None,
    layers: Any = None,
    return_experts: bool = False,
    kv_role: str = "kv_both",
    **parallel: Any,
) -> Any:
    sizes = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(block_size=block_size),
        speculative_config=speculative,
        kv_transfer_config=SimpleNamespace(kv_role=kv_role),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 12),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=return_experts),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )


def test_a_plain_engine_is_accepted() -> None:
    check_engine(config(), 1)


@pytest.mark.parametrize(
    ("settings", "groups", "reason"),
    [
        ({"pipeline_parallel_size": 2}, 1, "pipeline"),
        ({"data_parallel_size": 2}, 1, "data parallel"),
        ({"decode_context_parallel_size": 2}, 1, "decode context"),
        ({"prefill_context_parallel_size": 2}, 1, "prefill context"),
        ({"enable_dbo": True}, 1, "overlap"),
        ({"speculative": object()}, 1, "speculative decoding in calibration"),
        ({"return_experts": True}, 1, "enable_return_routed_experts"),
        ({"block_size": 256}, 1, "block_size 256"),
        ({}, 2, "disable_hybrid_kv_cache_manager"),
    ],
)
def test_an_engine_that_would_not_count_exactly_is_refused(
    settings: dict[str, Any], groups: int, reason: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        check_engine(config(**settings), groups)


@pytest.mark.parametrize("kv_role", ["kv_consumer", "kv_producer"])
def test_an_engine_that_serves_may_decode_speculatively(kv_role: str) -> None:
    check_engine(config(speculative=object(), kv_role=kv_role), 1)


class Router(BaseRouter):
    routing_method_type = None

    def _compute_routing(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def layer(router: Any, monolithic: bool = False) -> Any:
    return SimpleNamespace(router=router, _quant_method=SimpleNamespace(is_monolithic=monolithic))


def test_routers_are_found_in_the_order_of_their_layers() -> None:
    routers = {n: Router(2, 8) for n in (10, 2, 0)}
    layers = {f"model.layers.{n}.mlp.experts": layer(r) for n, r in routers.items()}
    layers["model.layers.0.self_attn.attn"] = SimpleNamespace()
    assert moe_routers(config(layers=layers)) == [(n, routers[n]) for n in (0, 2, 10)]


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
        ({"model.layers.0.mlp.experts": layer(Router(2, 8), monolithic=True)}, "layer 0 .*moe_backend"),
        ({"model.layers.0.mlp.experts": layer(object())}, "shows no choices"),
        ({"model.layers.0.self_attn.attn": SimpleNamespace()}, "no MoE layer"),
    ],
)
def test_a_model_that_hides_its_choices_is_refused(layers: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        moe_routers(config(layers=layers))


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
        check_side_channel(scheduler("203.0.113.7", port))  # not of this machine


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="calibrate"):
        engine_kwargs("router")  # type: ignore[arg-type]


NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(
    ("role", "drafting", "kept", "asynchronous"),
    [
        ("decode", NGRAM, True, False),  # as vLLM wants it
        ("decode", MTP, True, True),
        ("prefill", NGRAM, False, True),
        ("prefill", MTP, True, True),  # NIXL refuses two engines that differ in it
        ("calibrate", MTP, False, False),
    ],
)
def test_drafts_are_made_where_they_are_verified(
    role: Role,
    drafting: dict[str, Any],
    kept: bool,
    asynchronous: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kwargs = engine_kwargs(role, speculative_config=drafting)
    assert kwargs.get("speculative_config") == (drafting if kept else None)
    assert kwargs["async_scheduling"] is asynchronous
    assert ("Async" in kwargs["scheduler_cls"]) is asynchronous
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [] if kept else [f"speculative decoding is off on the {role} engine, which verifies no drafts"]
    )


def test_engines_without_drafts_are_as_before(caplog: pytest.LogCaptureFixture) -> None:
    assert "speculative_config" not in engine_kwargs("prefill")
    assert engine_kwargs("decode", speculative_config=None)["async_scheduling"]
    assert not caplog.records


@pytest.mark.parametrize(("device", "worker"), [("cpu", None), ("gpu", "EldrWorker")])
def test_a_gpu_has_a_worker_that_settles_the_kernel(device: str, worker: str | None) -> None:
    found = engine_kwargs("decode", device=device).get("worker_cls")
    assert found == (worker and f"eldr_serve.engine.gpu_worker.{worker}")


def test_the_worker_takes_what_vllms_own_takes() -> None:
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(worker.load_model).parameters.values()]
        for worker in (EldrWorker, Worker)
    )
    assert ours == theirs
