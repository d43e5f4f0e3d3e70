"""The kind of engine in use: vLLM, or the class that ELDR_ENGINE_BACKEND names as `my_package.module:Class`.

Every process may import this module: the engine software is imported only when a method needs it.
"""

from __future__ import annotations

import os

from eldr_serve.engine.backend_protocol import EngineBackend
from eldr_serve.import_path import import_object

_BACKEND_PATH = os.environ.get("ELDR_ENGINE_BACKEND", "eldr_serve.engine.vllm.backend:VllmBackend")
BACKEND: EngineBackend = import_object(_BACKEND_PATH, "ELDR_ENGINE_BACKEND")()
