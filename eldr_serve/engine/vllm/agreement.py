"""Arguments that prefill and decode engines must share, so that decode can continue after prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import shown

_CHOSEN_BY_VLLM = (None, "auto", "")


@dataclass(frozen=True)
class Agreed:
    """An engine argument that must be equal in both roles.

    Attributes:
        name: name of the argument.
        reason: why it must be equal.
        resolved: path of the resolved value in vLLM's configuration. If None, vLLM does not change the
            value, so an argument that is missing in one role differs from one that is given in the other.
    """

    name: str
    reason: str
    resolved: str = ""


_KV = "decode engines read KV blocks as prefill engines wrote them"
_WEIGHTS = "both must compute with the same weights"
_PROMPT = "both must turn a prompt into the same tokens"
_ANSWER = "both engines read each request, and refuse those that their parsers do not support"
_SAMPLING = "the first token is sampled by prefill engines, the others by decode engines"

AGREED = (
    Agreed(
        "max_model_len",
        "a request passes through both, and /v1/models shows one length",
        "model_config.max_model_len",
    ),
    Agreed("dtype", _KV, "model_config.dtype"),
    Agreed("kv_cache_dtype", _KV, "cache_config.cache_dtype"),
    Agreed("block_size", _KV, "cache_config.block_size"),
    Agreed("mamba_cache_dtype", _KV, "cache_config.mamba_cache_dtype"),
    Agreed("mamba_ssm_cache_dtype", _KV, "cache_config.mamba_ssm_cache_dtype"),
    Agreed("disable_sliding_window", _KV, "model_config.disable_sliding_window"),
    Agreed("quantization", _WEIGHTS, "model_config.quantization"),
    Agreed("revision", _WEIGHTS),
    Agreed("hf_overrides", _WEIGHTS),
    Agreed("tokenizer", _PROMPT),
    Agreed("tokenizer_mode", _PROMPT, "model_config.tokenizer_mode"),
    Agreed("tokenizer_revision", _PROMPT),
    Agreed("chat_template", _PROMPT),
    Agreed("chat_template_content_format", _PROMPT),
    Agreed("default_chat_template_kwargs", _PROMPT),
    Agreed("trust_request_chat_template", _PROMPT),
    Agreed("mm_processor_kwargs", _PROMPT),
    Agreed("limit_mm_per_prompt", _PROMPT),
    Agreed("enable_auto_tool_choice", _ANSWER),
    Agreed("tool_call_parser", _ANSWER),
    Agreed("tool_parser_plugin", _ANSWER),
    Agreed("reasoning_parser", _ANSWER),
    Agreed("reasoning_parser_plugin", _ANSWER),
    Agreed("max_logprobs", _ANSWER, "model_config.max_logprobs"),
    Agreed("generation_config", _SAMPLING, "model_config.generation_config"),
    Agreed("override_generation_config", _SAMPLING),
)
_DEFAULTS: Mapping[str, Any] = {"enable_auto_tool_choice": False, "trust_request_chat_template": False}


def compare_specs(prefill: Any, decode: Any) -> None:
    """Raise ConfigurationError if the files of two VllmSpecs differ in a field that must be equal.

    Values that vLLM chooses itself are unknown here; `differences` compares them.
    """
    for name, reason, one, other in (
        ("model_id", "a request names one model", prefill.model_id, decode.model_id),
        ("model_source", _WEIGHTS, prefill.model_source, decode.model_source),
        ("tokenizer_source", _PROMPT, prefill.tokenizer, decode.tokenizer),
    ):
        if one != other:
            raise ConfigurationError(_sentence(f"model_loading_config.{name}", one, other, reason))
    one_side, other_side = prefill.config.engine_kwargs, decode.config.engine_kwargs
    for field in AGREED:
        default = _DEFAULTS.get(field.name)
        one, other = one_side.get(field.name, default), other_side.get(field.name, default)
        if field.resolved and (one in _CHOSEN_BY_VLLM or other in _CHOSEN_BY_VLLM):
            continue
        if one != other:
            raise ConfigurationError(_sentence(f"engine_kwargs.{field.name}", one, other, field.reason))


def resolved(config: Any) -> dict[str, Any]:
    """Return the value of each resolved field in vLLM's configuration; see VllmDescribed.agreed."""
    found = {}
    for field in AGREED:
        part, _, name = field.resolved.partition(".")
        if part and hasattr(getattr(config, part), name):
            value = getattr(getattr(config, part), name)
            plain = isinstance(value, int | float | str | None)
            found[field.name] = value if plain else str(value).removeprefix("torch.")
    return found


def differences(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each field that resolves to different values; see VllmBackend.differences."""
    for field in AGREED:
        if field.name in prefill and field.name in decode and prefill[field.name] != decode[field.name]:
            one, other = prefill[field.name], decode[field.name]
            yield _sentence(f"engine_kwargs.{field.name}", one, other, field.reason)


def _sentence(name: str, prefill: Any, decode: Any, reason: str) -> str:
    return (
        f"prefill_config.{name} is {_text(prefill)} and decode_config.{name} is {_text(decode)}: "
        f"give both the same, since {reason}"
    )


def _text(value: Any) -> str:
    return "not given" if value is None else shown(value)
