"""Imports of Ray Serve LLM and vLLM without garbage collection, wherever a process may import them first.

These imports create half a million objects and no garbage; looking for garbage takes a fifth of their time.
"""

import gc

_collects = gc.isenabled()
gc.disable()

import ray.serve.llm  # noqa: E402, F401

if _collects:
    gc.enable()
