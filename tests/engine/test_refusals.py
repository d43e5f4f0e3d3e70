"""What would make counts inexact is refused at the start, with the reason."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from eldr_serve.engine.compat import UnsupportedEngineError, check_engine, check_side_channel, moe_routers
from eldr_serve.engine.config import engine_kwargs


def config(
    block_size: int = 16,
    speculative: Any = None,
    layers: Any = None,
    return_experts: bool = False,
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
        ({"speculative": object()}, 1, "speculative"),
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
    ("layers", "reason"),
    [
        ({"model.layers.0.mlp.experts": layer(Router(2, 8), monolithic=True)}, "monolithic"),
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
