"""The kind of engine in use; no other module names one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eldr_serve.engine.vllm.backend import VllmBackend

if TYPE_CHECKING:
    from eldr_serve.engine.vllm.spec import VllmSpec as EngineSpec

__all__ = ["ENGINES", "EngineSpec"]

ENGINES = VllmBackend()
