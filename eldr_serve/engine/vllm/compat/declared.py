"""Names that Ray Serve LLM and vLLM declare, read from their source, since importing them is slow."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ray.util.accelerators import accelerators

_LLM_CONFIG = "llm/_internal/serve/core/configs/llm_config.py"


def llm_config_keys() -> frozenset[str]:
    """Return the keys of Ray Serve LLM's LLMConfig."""
    return _declared("ray", _LLM_CONFIG, "LLMConfig")


def model_loading_keys() -> frozenset[str]:
    """Return the keys of `model_loading_config` in an LLMConfig."""
    return _declared("ray", _LLM_CONFIG, "ModelLoadingConfig")


def engine_arguments() -> frozenset[str]:
    """Return the keys of `engine_kwargs` in an LLMConfig: vLLM's arguments for engine and endpoints."""
    engine = _declared("vllm", "engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")
    endpoints = _declared("vllm", "entrypoints/launchers/cli_args.py", "BaseFrontendArgs", "FrontendArgs")
    return engine | endpoints


def accelerator_types() -> frozenset[str]:
    """Return the accelerator types that Ray knows."""
    return frozenset(kind for name, kind in vars(accelerators).items() if name.isupper())


@cache
def _declared(package: str, file: str, *classes: str) -> frozenset[str]:
    """Return the public annotated attributes of classes; empty if the source file is not found."""
    spec = find_spec(package)
    path = Path(spec.origin or "").parent / file if spec is not None else None
    if path is None or not path.is_file():
        return frozenset()
    return frozenset(
        statement.target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")
    )
