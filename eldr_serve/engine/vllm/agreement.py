"""The check that prefill and decode engines share the arguments that let decode continue after prefill.

It runs where a deployment is built, and in `eldr check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import format_value

_CHOSEN_BY_VLLM = (None, "auto", "")


@dataclass(frozen=True)
class SharedArgument:
    """An engine argument that must be equal in both roles.

    Attributes:
        name: name of the argument.
        reason: why it must be equal.
        resolved: path of the resolved value in vLLM's configuration. If empty, vLLM does not change the
            value, and an argument that only one role gives is a difference.
    """

    name: str
    reason: str
    resolved: str = ""


_KV = "decode engines read KV blocks as prefill engines wrote them"
_WEIGHTS = "both must compute with the same weights"
_PROMPT = "both must turn a prompt into the same tokens"
_ADAPTERS = "a request for an adapter passes through both"
_ANSWER = "both engines read each request, and refuse requests that their parsers do not support"

SHARED_ARGUMENTS = (
    SharedArgument(
        "max_model_len",
        "a request passes through both, and /v1/models shows one length",
        "model_config.max_model_len",
    ),
    SharedArgument("dtype", _KV, "model_config.dtype"),
    SharedArgument("kv_cache_dtype", _KV, "cache_config.cache_dtype"),
    SharedArgument("block_size", _KV, "cache_config.block_size"),
    SharedArgument("mamba_cache_dtype", _KV, "cache_config.mamba_cache_dtype"),
    SharedArgument("mamba_ssm_cache_dtype", _KV, "cache_config.mamba_ssm_cache_dtype"),
    SharedArgument("disable_sliding_window", _KV, "model_config.disable_sliding_window"),
    SharedArgument("quantization", _WEIGHTS, "model_config.quantization"),
    SharedArgument("revision", _WEIGHTS),
    SharedArgument("hf_overrides", _WEIGHTS),
    SharedArgument("lora_modules", _ADAPTERS),
    SharedArgument("lora_target_modules", _WEIGHTS),
    SharedArgument("tokenizer", _PROMPT),
    SharedArgument("tokenizer_mode", _PROMPT, "model_config.tokenizer_mode"),
    SharedArgument("tokenizer_revision", _PROMPT),
    SharedArgument("chat_template", _PROMPT),
    SharedArgument("chat_template_content_format", _PROMPT),
    SharedArgument("default_chat_template_kwargs", _PROMPT),
    SharedArgument("trust_request_chat_template", _PROMPT),
    SharedArgument("mm_processor_kwargs", _PROMPT),
    SharedArgument("limit_mm_per_prompt", _PROMPT),
    SharedArgument("enable_auto_tool_choice", _ANSWER),
    SharedArgument("tool_call_parser", _ANSWER),
    SharedArgument("tool_parser_plugin", _ANSWER),
    SharedArgument("reasoning_parser", _ANSWER),
    SharedArgument("reasoning_parser_plugin", _ANSWER),
    SharedArgument("max_logprobs", _ANSWER, "model_config.max_logprobs"),
)
_DEFAULTS: Mapping[str, Any] = {"enable_auto_tool_choice": False, "trust_request_chat_template": False}


def compare_specs(prefill: Any, decode: Any) -> None:
    """Raise ConfigurationError if the files of two VllmSpecs differ in a field that must be equal.

    Values that vLLM chooses itself are unknown here; `differences` compares them.
    """
    for name, reason, prefill_value, decode_value in (
        ("model_id", "a request names one model", prefill.model_id, decode.model_id),
        ("model_source", _WEIGHTS, prefill.model_source, decode.model_source),
        ("tokenizer_source", _PROMPT, prefill.tokenizer, decode.tokenizer),
    ):
        if prefill_value != decode_value:
            raise ConfigurationError(
                _sentence(f"model_loading_config.{name}", prefill_value, decode_value, reason)
            )
    prefill_kwargs, decode_kwargs = prefill.config.engine_kwargs, decode.config.engine_kwargs
    for field in SHARED_ARGUMENTS:
        default = _DEFAULTS.get(field.name)
        prefill_value, decode_value = (
            kwargs.get(field.name, default) for kwargs in (prefill_kwargs, decode_kwargs)
        )
        if field.resolved and (prefill_value in _CHOSEN_BY_VLLM or decode_value in _CHOSEN_BY_VLLM):
            continue
        if prefill_value != decode_value:
            raise ConfigurationError(
                _sentence(f"engine_kwargs.{field.name}", prefill_value, decode_value, field.reason)
            )


def resolve_shared_arguments(config: Any) -> dict[str, Any]:
    """Return the value of each resolved field in vLLM's configuration; see VllmDescribed.shared_arguments."""
    values = {}
    for field in SHARED_ARGUMENTS:
        part, _, name = field.resolved.partition(".")
        if part and hasattr(getattr(config, part), name):
            value = getattr(getattr(config, part), name)
            is_plain = isinstance(value, int | float | str | None)
            values[field.name] = value if is_plain else str(value).removeprefix("torch.")
    return values


def differences(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each field that resolves to different values; see EngineBackend.differences."""
    for field in SHARED_ARGUMENTS:
        if field.name in prefill and field.name in decode and prefill[field.name] != decode[field.name]:
            prefill_value, decode_value = prefill[field.name], decode[field.name]
            yield _sentence(f"engine_kwargs.{field.name}", prefill_value, decode_value, field.reason)


def _sentence(name: str, prefill: Any, decode: Any, reason: str) -> str:
    return (
        f"prefill_config.{name} is {_text(prefill)} and decode_config.{name} is {_text(decode)}: "
        f"give both the same value, since {reason}"
    )


def _text(value: Any) -> str:
    return "not given" if value is None else format_value(value)
