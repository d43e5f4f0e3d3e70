"""The LoRA adapters in the memory of each worker's engine, known from the requests that were sent to it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class LoadedAdapters:
    """The adapters that each worker has loaded; a worker is any hashable name.

    An engine loads all adapters at its start, and keeps the most recently used ones.

    Args:
        names: adapters in the order in which an engine loads them.
        slots: number of adapters that an engine keeps.
    """

    def __init__(self, names: Sequence[str] = (), slots: int = 1) -> None:
        self._first, self._slots = tuple(names[-slots:]), slots
        self._loaded: dict[Hashable, tuple[str, ...]] = {}  # adapters, least recently used first

    def keep_only(self, workers: Iterable[Hashable]) -> None:
        """Remove all workers but these."""
        names = set(workers)
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if name in names}

    def record_request(self, worker: Hashable, adapter: str) -> None:
        """Record that a request for an adapter was sent to the worker; "" is the base model."""
        if adapter:
            others = (name for name in self._loaded.get(worker, self._first) if name != adapter)
            self._loaded[worker] = (*others, adapter)[-self._slots :]

    def lacks_adapter(self, workers: Sequence[Hashable], adapter: str) -> NDArray[np.bool_]:
        """Return whether each worker would have to load the adapter, bool[W]."""
        return np.array([adapter not in self._loaded.get(name, self._first) for name in workers], bool)
