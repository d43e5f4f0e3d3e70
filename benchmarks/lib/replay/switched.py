"""An engine that switches between eldr_serve's connector and scheduler and vLLM's, to measure capture."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import Any, ClassVar

from vllm.v1.core.sched.scheduler import Scheduler

from eldr_serve.engine.vllm.compat.moe import moe_routers
from eldr_serve.engine.vllm.compat.nixl import NixlPullConnector
from eldr_serve.engine.vllm.kv.connector import EldrConnector
from eldr_serve.engine.vllm.scheduler import EldrScheduler

# Both states use eldr_serve's stats (some microseconds per step), since an engine has one kind of metrics.
_NOT_SWITCHED = ("__init__", "get_kv_connector_stats")


class CaptureSwitch:
    """A switch for capture in the engine of this process. It may change only between requests."""

    is_on = True
    _hooks: ClassVar[dict[int, Callable[..., None]]] = {}

    @classmethod
    def turn(cls, on: bool, vllm_config: Any) -> None:
        """Turn capture on or off. When off, no router has a hook."""
        for index, router in moe_routers(vllm_config):
            cls._hooks.setdefault(index, router.capture_fn)
            router.set_capture_fn(cls._hooks[index] if on else None)
        cls.is_on = on


def _switched(eldr_class: type, vllm_class: type) -> Callable[[type], type]:
    """Decorate a subclass of `eldr_class`: while the switch is off, overridden methods call `vllm_class`."""

    def choose_at_call(eldr_method: Any, vllm_method: Any) -> Any:
        return lambda *args, **kwargs: (eldr_method if CaptureSwitch.is_on else vllm_method)(*args, **kwargs)

    def override(switched: type) -> type:
        for owner in eldr_class.__mro__[: eldr_class.__mro__.index(vllm_class)]:
            for name, eldr_method in vars(owner).items():
                if isfunction(eldr_method) and name not in _NOT_SWITCHED and hasattr(vllm_class, name):
                    setattr(switched, name, choose_at_call(eldr_method, getattr(vllm_class, name)))
        return switched

    return override


@_switched(EldrConnector, NixlPullConnector)
class SwitchedConnector(EldrConnector):
    """EldrConnector while the switch is on, otherwise NixlPullConnector."""


@_switched(EldrScheduler, Scheduler)
class SwitchedScheduler(EldrScheduler):
    """EldrScheduler while the switch is on, otherwise vLLM's Scheduler."""
