"""Select the kind of engine in use; no other module names one.

Every process may import this module: the engine software is imported only when a method needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eldr_serve.engine.vllm.backend import VllmBackend

if TYPE_CHECKING:
    from eldr_serve.engine.vllm.spec import VllmSpec as EngineSpec

__all__ = ["ENGINES", "EngineSpec"]

ENGINES = VllmBackend()
