"""The engine backend in use; no other module names one."""

from __future__ import annotations

from eldr_serve.engine.backend import Backend
from eldr_serve.engine.vllm.backend import VllmBackend

ENGINES: Backend = VllmBackend()
