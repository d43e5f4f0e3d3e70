"""The kind of engine in use; no other module names one.

Every process may import this module: the engine software is imported only when a method needs it.
"""

from __future__ import annotations

from eldr_serve.engine.backend_protocol import EngineBackend
from eldr_serve.engine.vllm.backend import VllmBackend

BACKEND: EngineBackend = VllmBackend()
