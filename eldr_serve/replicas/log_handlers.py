"""Serve's log handlers, which are restored after vLLM closes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

_SERVE_LOGGER = "ray.serve"


@contextmanager
def restore_log_handlers() -> Iterator[None]:
    """Give Serve's log handlers of this process their files back on exit.

    vLLM configures logging when it is imported, and again when an engine starts, with
    `logging.config.dictConfig`, which closes all existing handlers. Serve's handler then has no file, so
    later log lines of the replica are lost. A restarted Serve controller asks each replica for that file's
    path, gets an AttributeError, and replaces the replica. Thus all engines end at once, with all their
    streams (Ray 2.60.0, vLLM 0.32.0).
    """
    handlers = [h for h in logging.getLogger(_SERVE_LOGGER).handlers if isinstance(h, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)
