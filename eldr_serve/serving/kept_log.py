"""A replica's log, which an engine closes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

_SERVE = "ray.serve"  # Serve's logger


@contextmanager
def kept_log() -> Iterator[None]:
    """After it Serve's log of this process has the file that it had before.

    vLLM configures logging as it is imported, and again as an engine starts, by `logging.config.dictConfig`,
    which closes all handlers that there are. Serve's then has no file. What the replica says after that is
    lost, and a Serve controller that starts again asks each replica for that file's path, gets an
    AttributeError, and replaces the replica: all engines at once, with all that they stream (Ray 2.60.0,
    vLLM 0.32.0).
    """
    handlers = [one for one in logging.getLogger(_SERVE).handlers if isinstance(one, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)
