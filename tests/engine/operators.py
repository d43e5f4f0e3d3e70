"""The torch functions and operators that some code calls, and those that wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# On a GPU, a boolean mask calls `nonzero`. A tensor in an `if` or a format calls `_local_scalar_dense`.
WAITING = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "_local_scalar_dense",
    "equal",
}


class Operators:
    """The names of the operators called in wrapped functions."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._noting = True

    def note(self, name: str) -> None:
        """Record an operator by its name, unless its caller is excluded."""
        if self._noting:
            self.names.add(name)

    def record_calls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that calls the function and records the operators that it runs."""

        @wraps(function)
        def call_recorded(*args: Any, **kwargs: Any) -> Any:
            # Record Python functions too, since some run no operator on a CPU.
            with _Functions(self), _Dispatched(self):
                return function(*args, **kwargs)

        return call_recorded

    def exclude(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that calls the function without recording its operators."""

        @wraps(function)
        def call_unrecorded(*args: Any, **kwargs: Any) -> Any:
            self._noting = False
            try:
                return function(*args, **kwargs)
            finally:
                self._noting = True

        return call_unrecorded


class _Functions(TorchFunctionMode):
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operators.note(func.__name__)
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operators.note(func.overloadpacket.__name__)
        if any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in _indices(func, args)
        ):
            self._operators.note("nonzero")
        return func(*args, **(kwargs or {}))


def _indices(func: Any, args: Any) -> Any:
    return args[1] if func.overloadpacket.__name__ in ("index", "index_put", "index_put_") else ()
