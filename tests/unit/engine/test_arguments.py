"""Engine arguments: names read from source, values, and arguments that both roles must share."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.llm import LLMConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from eldr_serve.engine.vllm.agreement import SHARED_ARGUMENTS, differences, resolve_shared_arguments
from eldr_serve.engine.vllm.compat import declared
from eldr_serve.engine.vllm.compat.arguments import check_arguments
from eldr_serve.engine.vllm.config import engine_kwargs
from eldr_serve.errors import ConfigurationError


def test_names_read_from_source_equal_those_of_the_classes() -> None:
    arguments = {field.name for kind in (AsyncEngineArgs, FrontendArgs) for field in fields(kind)}
    assert declared.engine_arguments() == {name for name in arguments if not name.startswith("_")}
    assert declared.llm_config_keys() == set(LLMConfig.model_fields)
    assert {argument.name for argument in SHARED_ARGUMENTS} <= arguments


def test_vllms_defaults_are_accepted() -> None:
    for field in fields(AsyncEngineArgs):
        if field.default is not MISSING:
            check_arguments("engine_kwargs", {field.name: field.default})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_parsers_of_plugins_are_accepted(role: str) -> None:
    plugin_kwargs = {"tool_call_parser": "mine", "tool_parser_plugin": "/mine.py"}
    check_arguments(f"{role}_config.engine_kwargs", plugin_kwargs)
    with pytest.raises(ConfigurationError, match="tool_call_parser is 'mine': unknown parser"):
        check_arguments(f"{role}_config.engine_kwargs", {"tool_call_parser": "mine"})


def config_of(**model: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(**model), cache_config=SimpleNamespace(block_size=32))


def test_differences_between_resolved_values_are_listed_by_field() -> None:
    prefill = resolve_shared_arguments(
        config_of(max_model_len=2048, dtype="torch.bfloat16", quantization=None)
    )
    decode = resolve_shared_arguments(
        config_of(max_model_len=4096, dtype="torch.bfloat16", quantization="fp8")
    )
    assert prefill == {
        "max_model_len": 2048,
        "dtype": "torch.bfloat16",
        "block_size": 32,
        "quantization": None,
    }
    assert not list(differences(prefill, dict(prefill)))
    first, second = differences(prefill, decode)
    assert first.startswith(
        "prefill_config.engine_kwargs.max_model_len is 2048 and decode_config.engine_kwargs"
    )
    assert "prefill_config.engine_kwargs.quantization is not given and" in second


def test_own_settings_of_the_transfer_keep_the_lease() -> None:
    default = engine_kwargs("prefill", kv_lease_s=45.0)["kv_transfer_config"]
    assert default["kv_connector_extra_config"] == {"kv_lease_duration": 45}
    assert engine_kwargs("prefill", kv_lease_s=45.0, kv_transfer_config=None)["kv_transfer_config"] == default
    settings: dict[str, Any] = {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["UCX"]}}
    merged = engine_kwargs("prefill", kv_lease_s=45.0, kv_transfer_config=settings)["kv_transfer_config"]
    extra = {"backends": ["UCX"], "kv_lease_duration": 45}
    assert merged == default | {"kv_buffer_device": "cpu", "kv_connector_extra_config": extra}
    settings["kv_connector_extra_config"] = None
    merged = engine_kwargs("prefill", kv_lease_s=45.0, kv_transfer_config=settings)["kv_transfer_config"]
    assert merged == default | {"kv_buffer_device": "cpu"}
    settings["kv_connector_extra_config"] = {"kv_lease_duration": 9}
    with pytest.raises(ConfigurationError, match=r"kv_lease_duration is 9: set path\.kv_lease_s instead"):
        engine_kwargs("prefill", kv_transfer_config=settings)
