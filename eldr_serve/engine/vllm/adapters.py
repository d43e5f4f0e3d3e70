"""LoRA adapters: the argument `lora_modules` of vLLM's server, checked where the application is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from vllm.config import LoRAConfig

from eldr_serve.data_root import model_folder
from eldr_serve.engine.vllm.compat.serve_llm import LoRAModulePath
from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import first_problem, format_value

_WHERE = "engine_kwargs.lora_modules"
_MODULES = TypeAdapter(list[LoRAModulePath])


def parse_adapters(
    kwargs: dict[str, Any], *, model_id: str, on_cpu: bool, model_is_here: bool
) -> dict[str, Any]:
    """Return the engine arguments that adapters need: `lora_modules` as vLLM's objects, and `enable_lora`.

    Args:
        kwargs: engine arguments of the file.
        model_id: name of the base model.
        on_cpu: the engines run on CPUs.
        model_is_here: the model is a folder on this machine, so its adapters must be folders here too.

    Raises:
        ConfigurationError: an adapter's name is taken already, or the engine could not load the adapter.
    """
    try:
        modules = _MODULES.validate_python(kwargs.get("lora_modules") or [])
    except ValidationError as error:
        raise ConfigurationError(first_problem(error, kwargs["lora_modules"], where=_WHERE)) from error
    if (modules or kwargs.get("enable_lora")) and on_cpu and not kwargs.get("lora_target_modules"):
        raise ConfigurationError(
            "engine_kwargs.lora_target_modules is missing: on CPUs vLLM does not support adapters on "
            "experts, so name the modules that adapters change, for example [q_proj, k_proj, v_proj, o_proj]"
        )
    names = {model_id}
    for module in modules:
        if module.name in names:
            raise ConfigurationError(
                f"{_WHERE} has the name {format_value(module.name)} of the model or of another adapter: "
                "choose another name"
            )
        names.add(module.name)
        if folder := model_folder(module.path):
            module.path = folder  # the path is absolute, since replicas run elsewhere
            _check_rank(module, kwargs.get("max_lora_rank") or LoRAConfig.max_lora_rank)
        elif model_is_here:
            raise ConfigurationError(
                f"{_WHERE}: the path of adapter {module.name!r}, {module.path!r}, is not a folder"
            )
    return {"lora_modules": modules, "enable_lora": True} if modules else {}


def _check_rank(module: LoRAModulePath, max_rank: int) -> None:
    """Raise ConfigurationError unless the adapter's adapter_config.json names a rank up to `max_rank`."""
    file = Path(module.path) / "adapter_config.json"
    try:
        rank = json.loads(file.read_text())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{_WHERE}: adapter {module.name!r} needs {file} with its rank `r`"
        ) from error
    if not isinstance(rank, int) or rank > max_rank:
        raise ConfigurationError(
            f"{_WHERE}: adapter {module.name!r} has rank {rank}, above engine_kwargs.max_lora_rank {max_rank}"
        )
