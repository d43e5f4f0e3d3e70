"""The decode workers: which of them a request may get, and their loads as a policy sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.decode_loads import WorkerLoads
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.prefixes import PrefixMap, PromptBlocks
from eldr_serve.scheduling.types import Lease, Loads


class WorkerSet:
    """The decode workers by position, with their loads, prefix caches and adapters.

    The position of a worker is its index in the loads that policies see. A worker is available if it may get
    requests: its position is not vacant and it does not drain. As long as other workers are available, a
    request also avoids its excluded workers and the workers that its ingress cannot reach.

    Args:
        ledger: load of the workers.
        adapters: LoRA adapters of the workers.

    Attributes:
        names: the worker of each position, None for a vacant one.
        positions: position of each worker.
        available: bool[W], whether the worker of each position may get requests.
        prefixes: blocks that were sent to each worker.
    """

    def __init__(self, ledger: LoadLedger, adapters: LoadedAdapters) -> None:
        self.names: list[str | None] = []
        self.positions: dict[str, int] = {}
        self.available = np.zeros(0, bool)
        self.prefixes = PrefixMap()
        self._ledger = ledger
        self._ledger_rows = np.zeros(0, np.int64)  # the row in the ledger for each position
        self._adapters = adapters
        self._unreachable: dict[str, frozenset[str]] = {}  # workers that an ingress cannot reach

    def update(
        self,
        names: Sequence[str | None],
        draining: Collection[str],
        unreachable: Mapping[str, Collection[str]],
    ) -> bool:
        """Set the workers as Placer.set_workers describes; return whether a position has another worker."""
        self._unreachable = {ingress: frozenset(workers) for ingress, workers in unreachable.items()}
        changed = list(names) != self.names
        if changed:
            self.names = list(names)
            self.positions = {name: position for position, name in enumerate(names) if name is not None}
            self._ledger.name_workers(names)
            self._ledger_rows = self._ledger.rows_of(names)
            self.prefixes.keep_only(self.positions)
            self._adapters.keep_only(self.positions)
        self.available = np.array([name is not None and name not in draining for name in names], bool)
        return changed

    def record_placement(self, lease: Lease) -> None:
        """Set `lease.cached_tokens`; record the lease's adapter and blocks at its worker."""
        if lease.worker in self.positions:
            self._adapters.record_request(lease.worker, lease.request.adapter)
            if (blocks := lease.request.blocks) is not None:
                lease.cached_tokens = int(self.prefixes.cached_tokens([lease.worker], blocks)[0])
                self.prefixes.record_prompt(lease.worker, blocks)

    def excluded_for(self, lease: Lease) -> tuple[frozenset[str], frozenset[str]]:
        """Return all workers that a request avoids, and which of these its ingress cannot reach."""
        unreachable = self._unreachable.get(lease.ingress, frozenset())
        return unreachable.union(lease.request.exclude), unreachable

    # -- loads -----------------------------------------------------------------------------------

    def loads(self, exclude: Iterable[str] = ()) -> Loads:
        """Return the loads of all positions; the excluded workers are not available."""
        available = self.available.copy()
        available[[self.positions[worker] for worker in exclude if worker in self.positions]] = False
        return self._ledger.loads(self._ledger_rows, available)

    def loads_for(self, lease: Lease) -> Loads:
        """Return the loads for a request, and its prompt's cached tokens."""
        request = lease.request
        loads = self.loads_avoiding(*self.excluded_for(lease))
        if request.adapter:
            loads = replace(loads, lacks_adapter=self._adapters.lacks_adapter(self.names, request.adapter))
        if request.blocks is None:
            return loads
        return replace(loads, cached_tokens=self.prefixes.cached_tokens(self.names, request.blocks))

    def loads_avoiding(self, *groups: Collection[str]) -> Loads:
        """Return the loads without the first of these groups that leaves a worker; all loads if none does."""
        for workers in groups:
            loads = self.loads(workers)
            if loads.available.any():
                return loads
        return self.loads()

    def worker_loads(self, blocks: PromptBlocks | None) -> WorkerLoads:
        """Return the loads of all available workers.

        Args:
            blocks: blocks of a prompt, of which each worker may have some in its prefix cache.
        """
        loads = self.loads()
        positions = loads.available_positions
        names = tuple(str(self.names[position]) for position in positions.tolist())
        if blocks is None:
            cached_tokens = np.zeros(len(names), np.int64)
        else:
            cached_tokens = self.prefixes.cached_tokens(names, blocks)
        return WorkerLoads(names, loads.in_flight[positions], loads.kv_tokens[positions], cached_tokens)
