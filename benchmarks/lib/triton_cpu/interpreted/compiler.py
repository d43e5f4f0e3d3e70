"""Compiler part of the backend."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    """A backend that supports no target."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def _absent(self, *_: Any) -> Any:
        raise NotImplementedError("this backend compiles nothing: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _absent
