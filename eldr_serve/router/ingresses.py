"""The ingresses of a router: the workers that they can reach, and what they report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from eldr_serve.metrics import RouterEvent
from eldr_serve.router.leases import Leases
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.positions import Positions
from eldr_serve.router_protocol.messages import IngressReport
from eldr_serve.scheduling.placer import Placer


class Ingresses:
    """The ingresses of a router, including lost ones until they are dropped.

    A worker is a replica or one of its data-parallel ranks (see worker_names). Each ingress reports the
    workers that it can reach. If it can reach any, its requests go only to them.

    Args:
        positions: positions of the decode workers that some ingress can reach.
        placer: receives the positions.
        leases: the leases of the ingresses' requests.
        counters: counters of the status.
        view: data of the live page.

    Attributes:
        ids: ids of the ingresses.
        predictions: quality of each ingress's predictions, see OnlinePredictor.status.
        on_positions: called with the positions of the decode workers after each change.
    """

    def __init__(
        self, positions: Positions, placer: Placer, leases: Leases, counters: Counter[str], view: LiveView
    ) -> None:
        self._positions, self._placer, self._leases = positions, placer, leases
        self._counters, self._view = counters, view
        self.ids: set[str] = set()
        self.predictions: dict[str, dict[str, Any]] = {}
        self.on_positions: Callable[[tuple[str | None, ...]], None] = lambda positions: None
        self._last_positions: tuple[str | None, ...] = ()

    def add_ingress(
        self,
        ingress: str,
        workers: tuple[str, ...] | None,
        positions: tuple[str | None, ...] | None = None,
    ) -> None:
        """Add a new ingress, or one that has returned.

        Args:
            workers: workers that the ingress can reach, which replace an earlier report; None: not known yet,
                so an earlier report stays.
            positions: the positions that the ingress knows; see Positions.set_reachable.
        """
        self.ids.add(ingress)
        if workers is not None:
            self._positions.set_reachable(ingress, workers, positions)
            self._update_workers()

    def set_reachable_workers(self, ingress: str, workers: Iterable[str]) -> None:
        """Set the decode workers that an ingress can reach.

        Leases of lost workers stay until their ingresses release them.
        """
        self._positions.set_reachable(ingress, workers)
        self._update_workers()
        self._leases.dispatch()

    def add_report(self, ingress: str, report: IngressReport) -> None:
        """Add what an ingress has counted since its last report."""
        self._counters.update(report.events)
        self._view.add_answers(report.streams)
        if report.prediction is not None:
            self.predictions[ingress] = report.prediction

    def drop_ingress(self, ingress: str) -> None:
        """Remove an ingress and release all its leases; it restores them if it is alive."""
        num_running, num_queued = self._leases.finish_requests_of(ingress)
        self.ids.discard(ingress)
        self.predictions.pop(ingress, None)
        if self._positions.remove_ingress(ingress):
            self._update_workers()
        self._counters[RouterEvent.LEASES_OF_LOST_INGRESSES] += num_running
        self._counters[RouterEvent.QUEUED_OF_LOST_INGRESSES] += num_queued
        if num_running:
            self._leases.dispatch()

    def _update_workers(self) -> None:
        self._placer.set_workers(self._positions.workers, unreachable=self._positions.unreachable)
        self._view.discard_other_workers(self._positions.live_workers)
        positions = tuple(self._positions.workers)
        if positions != self._last_positions:
            self._last_positions = positions
            self.on_positions(positions)
