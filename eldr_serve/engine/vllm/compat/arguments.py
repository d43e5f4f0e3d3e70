"""A check of engine arguments against vLLM's configuration classes, where a deployment is built."""

from __future__ import annotations

import eldr_serve.engine.vllm.imports  # noqa: F401

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from eldr_serve.engine.vllm.compat.checked import internal_imports
from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import did_you_mean, first_problem, format_value

with internal_imports():
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

# Configuration classes whose fields have the names of engine arguments, and arguments with another name.
_CONFIGS = (ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig)
_OTHER_NAMES = {"kv_cache_dtype": (CacheConfig, "cache_dtype")}


def check_arguments(where: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for the first value that a field of vLLM's configuration would refuse.

    Args:
        where: location of the arguments in the file.
        kwargs: engine arguments.
    """
    for name, value in kwargs.items():
        adapter = _adapter(name)
        if adapter is None or value is None or not isinstance(value, int | float | str):
            continue
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            raise ConfigurationError(first_problem(error, value, where=f"{where}.{name}")) from error
    for name, plugin, manager in (
        ("tool_call_parser", "tool_parser_plugin", ToolParserManager),
        ("reasoning_parser", "reasoning_parser_plugin", ReasoningParserManager),
    ):
        parser, known_parsers = kwargs.get(name), manager.list_registered()
        if parser and not kwargs.get(plugin) and parser not in known_parsers:
            hint = did_you_mean(parser, known_parsers) or f"vLLM has {', '.join(sorted(known_parsers))}"
            raise ConfigurationError(f"{where}.{name} is {format_value(parser)}: unknown parser, {hint}")
    if kwargs.get("enable_auto_tool_choice") and not kwargs.get("tool_call_parser"):
        raise ConfigurationError(
            f"{where}.enable_auto_tool_choice is true: it needs tool_call_parser, which is not given"
        )


@cache
def _adapter(name: str) -> TypeAdapter[Any] | None:
    """Return the validator for the values of an engine argument; None if no field corresponds to it."""
    if name not in {field.name for field in fields(AsyncEngineArgs)}:
        return None
    for config, field_name in [_OTHER_NAMES.get(name) or (config, name) for config in _CONFIGS]:
        info = config.__pydantic_fields__.get(field_name)
        if info is not None and info.init is not False and not is_dataclass(info.annotation):
            kind: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    return None
