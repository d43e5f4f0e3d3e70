"""Driver part of the backend."""

from __future__ import annotations

from typing import Any

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """A driver that is never active, so that Triton never instantiates it."""

    @staticmethod
    def is_active() -> bool:
        return False

    def _absent(self, *_: Any) -> Any:
        raise NotImplementedError("this driver launches nothing: set TRITON_INTERPRET=1")

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = _absent
