"""Positions of the decode workers, from what each ingress can reach."""

from __future__ import annotations

from collections.abc import Iterable


class Positions:
    """The position of each live decode worker; position i serves centroid i of the routing table.

    A worker is lost when no ingress can reach it. Its position then stays vacant, so that the other workers
    keep their centroids, and the requests of its centroid go to the next most similar workers. A new worker
    takes the lowest vacant position. A restarted router adopts the positions from an ingress.

    Attributes:
        workers: the worker in each position; None: the position is vacant.
    """

    def __init__(self) -> None:
        self.workers: list[str | None] = []
        self._reachable: dict[str, frozenset[str]] = {}  # only ingresses that have reported

    @property
    def live_workers(self) -> frozenset[str]:
        """Return the workers that some ingress can reach."""
        return frozenset[str]().union(*self._reachable.values())

    @property
    def num_live(self) -> int:
        """Return the number of positions that are not vacant."""
        return sum(worker is not None for worker in self.workers)

    @property
    def unreachable(self) -> dict[str, frozenset[str]]:
        """Return the live workers that an ingress cannot reach, by ingress, if there are any."""
        live_workers = self.live_workers
        return {
            ingress: live_workers - workers
            for ingress, workers in self._reachable.items()
            if workers != live_workers
        }

    def set_reachable(
        self, ingress: str, workers: Iterable[str], restored: Iterable[str | None] | None = None
    ) -> None:
        """Set the workers that an ingress can reach.

        Args:
            restored: the positions before a restart, which are adopted if no worker has a position.
        """
        self.workers = self.workers or list(restored or ())
        self._reachable[ingress] = frozenset(workers)
        self._update()

    def remove_ingress(self, ingress: str) -> bool:
        """Remove the workers that a lost ingress could reach; return whether the positions were updated.

        If no other ingress has reported, the last workers stay.
        """
        if self._reachable.pop(ingress, None) is None or not self._reachable:
            return False
        self._update()
        return True

    def _update(self) -> None:
        live_workers = self.live_workers
        self.workers = [worker if worker in live_workers else None for worker in self.workers]
        for worker in sorted(live_workers.difference(filter(None, self.workers))):
            if None in self.workers:
                self.workers[self.workers.index(None)] = worker
            else:
                self.workers.append(worker)
        while self.workers and self.workers[-1] is None:
            self.workers.pop()
