"""Imports Ray Serve LLM, and with it vLLM, to be named before them wherever a process may import them first.

They make half a million objects and no garbage; looking for it is a fifth of the time that they take.
"""

import gc

_collects = gc.isenabled()
gc.disable()

import ray.serve.llm  # noqa: E402, F401

if _collects:
    gc.enable()
