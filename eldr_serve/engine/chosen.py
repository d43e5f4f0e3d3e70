"""The kind of engine that the product runs, named here and nowhere else."""

from __future__ import annotations

from eldr_serve.engine.backend import Backend
from eldr_serve.engine.vllm.backend import VllmBackend

ENGINES: Backend = VllmBackend()
