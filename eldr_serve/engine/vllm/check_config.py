"""A check of an LLMConfig's names and simple values, without an import of vLLM or Ray Serve LLM.

It runs where a deployment is read: in the CLI, and where the application is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_serve.engine.vllm.compat import declared
from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import did_you_mean, format_value, invalid_value, unknown_name

_MAPPINGS = (
    "accelerator_config",
    "deployment_config",
    "engine_kwargs",
    "experimental_configs",
    "lora_config",
    "model_loading_config",
    "placement_group_config",
    "runtime_env",
)
# Environment variables that are whole numbers -> minimum, maximum, meaning.
_NUMBERS = {
    "VLLM_CPU_KVCACHE_SPACE": (1, 1_000_000, "GiB of an engine's KV cache on a CPU"),
    "VLLM_NIXL_SIDE_CHANNEL_PORT": (1, 65535, "a port"),
}
_MODEL_ID = "the model name that requests use"
_PORT_BASE = "NIXL_SIDE_CHANNEL_PORT_BASE"


def check_config(where: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an unknown name, or a value that no engine accepts.

    Args:
        where: name of the configuration, `decode_config` or `prefill_config`.
        config: the fields of Ray Serve LLM's LLMConfig.
    """
    _check_names(where, config, declared.llm_config_keys())
    for name in _MAPPINGS:
        if not isinstance(config.get(name, {}), Mapping | None):
            raise _invalid(f"{where}.{name}", config[name], "must be a mapping of names to values")
    loading = config.get("model_loading_config") or {}
    _check_names(f"{where}.model_loading_config", loading, declared.model_loading_keys())
    if "model_id" not in loading:
        raise ConfigurationError(f"{where}.model_loading_config.model_id is missing: {_MODEL_ID}")
    model_id = loading["model_id"]
    if not isinstance(model_id, str):
        raise _invalid(f"{where}.model_loading_config.model_id", model_id, f"must be text, {_MODEL_ID}")
    if config.get("llm_engine") not in (None, "vLLM"):
        raise _invalid(f"{where}.llm_engine", config["llm_engine"], "must be 'vLLM'")
    kinds = declared.accelerator_types()
    if config.get("accelerator_type") not in (None, "A10", *kinds):
        kind = config["accelerator_type"]
        raise _invalid(
            f"{where}.accelerator_type",
            kind,
            f"unknown, {did_you_mean(kind, kinds) or 'see the documentation of Ray'}",
        )
    if config.get("lora_config"):
        raise ConfigurationError(
            f"{where}.lora_config is not supported: name adapters in engine_kwargs.lora_modules instead"
        )
    kwargs = config.get("engine_kwargs") or {}
    _check_names(f"{where}.engine_kwargs", kwargs, declared.engine_arguments(), "engine argument")
    check_environment(f"{where}.runtime_env", config.get("runtime_env") or {})
    experimental = config.get("experimental_configs") or {}
    if _PORT_BASE in experimental:
        _check_number(
            f"{where}.experimental_configs.{_PORT_BASE}", experimental[_PORT_BASE], 1, 65535, "a port"
        )


def check_environment(where: str, runtime_env: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an environment variable that is not text or has an invalid value."""
    variables = runtime_env.get("env_vars") or {}
    if not isinstance(variables, Mapping):
        raise _invalid(f"{where}.env_vars", variables, "must be a mapping of names to values")
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise _invalid(f"{where}.env_vars.{name}", value, "must be text: put it in quotes", name)
        if name in _NUMBERS:
            _check_number(f"{where}.env_vars.{name}", value, *_NUMBERS[name])


def _check_names(
    where: str, mapping: Mapping[str, Any], known_names: frozenset[str], what: str = "key"
) -> None:
    for name in mapping:
        if known_names and name not in known_names:
            raise ConfigurationError(unknown_name(where, name, known_names, what))


def _check_number(where: str, value: Any, minimum: int, maximum: int, meaning: str) -> None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = minimum - 1
    if isinstance(value, bool | float) or not minimum <= number <= maximum:
        raise _invalid(where, value, f"must be a whole number from {minimum} to {maximum}, {meaning}")


def _invalid(where: str, value: Any, problem: str, name: str = "") -> ConfigurationError:
    return ConfigurationError(invalid_value(where, format_value(value, name), problem))
