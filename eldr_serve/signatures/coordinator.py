"""The coordinator of a pool: it fits routing tables to the samples and swaps them into the router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from eldr_serve.errors import SwapRefusedError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting import MIN_REQUESTS_PER_WORKER
from eldr_serve.signatures.settings import PoolSettings

if TYPE_CHECKING:
    from eldr_serve.signatures.tables import FittedTable

logger = logging.getLogger(__name__)

_GROWTH = 1.5  # a refused first table is fitted again after this growth of the samples, or after every_s


@dataclass(frozen=True)
class RouterView:
    """The part of the router's state that the pool needs.

    Attributes:
        epoch: identifies the router's state; a table is only swapped in within the same epoch.
        workers: number of live decode workers.
        ingresses: number of connected ingresses. Without one, a restarted router may lack its settings.
        pool: current settings of the pool.
    """

    epoch: str
    model_id: str
    workers: int
    ingresses: int
    table_version: int
    has_table: bool
    pool: PoolSettings


class TableTarget(Protocol):
    """The router's interface for the coordinator."""

    async def report_status(self, status: dict[str, Any]) -> RouterView:
        """Report the pool's status; return the router's state."""

    async def table(self) -> bytes | None:
        """Return the live table."""

    async def swap(self, table: bytes, view: RouterView, *, refit: bool) -> int | None:
        """Swap in a table and return its version; None if its table or state is no longer the view's."""


class Coordinator:
    """Fits the first table, and later ones after drift, after scaling and on request.

    Args:
        settings: start settings of the pool; the router sends newer ones.
        router: the router that gets the tables.
        read_trace: returns all samples of the pool.

    Attributes:
        settings: current settings of the pool.
        samples: number of samples over all actors, which the pool sets before each call.
        view: newest state of the router; None until it is known.
    """

    def __init__(
        self,
        settings: PoolSettings,
        router: TableTarget,
        read_trace: Callable[[], Awaitable[CalibrationTrace]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.samples = 0
        self.view: RouterView | None = None
        self._router = router
        self._read_trace = read_trace
        self._clock = clock
        self._fit_lock = asyncio.Lock()
        self._workers_at_last_poll: int | None = None  # number of decode workers at the last poll
        self._next_fit_at_s = 0.0
        self._samples_at_last_fit = 0
        self._table_entry: dict[str, Any] | None = None
        self._last_refusal: dict[str, Any] | None = None
        self._num_refits = self._num_refused = 0

    @property
    def needed_samples(self) -> int:
        """Return the number of samples needed to fit a table automatically."""
        workers = self.view.workers if self.view else 0
        return max(self.settings.options.first_table, MIN_REQUESTS_PER_WORKER * workers)

    def status(self) -> dict[str, Any]:
        """Return the coordinator's part of `GET /eldr/status`, JSON-serialisable."""
        return {
            "samples": self.samples,
            "window": self.settings.options.window,
            "needed": self.needed_samples,
            "note": self._note(),
            "table": self._table_entry,
            "refits": self._num_refits,
            "tables_refused": self._num_refused,
            "last_refusal": self._last_refusal,
        }

    def _note(self) -> str:
        view = self.view
        if view is None or not view.ingresses:
            return "no table is fitted before the router has an ingress"
        if view.has_table:
            return f"table version {view.table_version} is live"
        if view.workers < 2:
            return f"no table yet: a table needs 2 or more decode replicas, but the router has {view.workers}"
        if self.samples >= self.needed_samples and self._last_refusal is not None:
            return f"no table yet: {self._last_refusal['why']}"
        return f"no table yet: {min(self.samples, self.needed_samples)} of {self.needed_samples} samples"

    async def poll(self, status: dict[str, Any]) -> RouterView:
        """Report the status to the router, and fit a table if one is due.

        Raises:
            RayError: the router is unavailable.
        """
        view = self.view = await self._router.report_status(status)
        self.settings = view.pool
        if view.workers != self._workers_at_last_poll:  # workers may still be starting or stopping
            self._workers_at_last_poll, self._next_fit_at_s = view.workers, 0.0
            return view
        if not view.ingresses or view.workers < 2 or self._fit_lock.locked() or not self._is_due(view):
            return view
        self._next_fit_at_s = self._clock() + self.settings.options.every_s
        self._samples_at_last_fit = self.samples
        try:
            async with self._fit_lock:
                await self._fit_and_swap(view, requested=False)
        except SwapRefusedError as error:
            logger.warning("no table was swapped in: %s", error)
        return view

    def _is_due(self, view: RouterView) -> bool:
        has_grown = not view.has_table and self.samples >= _GROWTH * self._samples_at_last_fit
        return self.samples >= self.needed_samples and (has_grown or self._clock() >= self._next_fit_at_s)

    async def refit(self, read_status: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Fit IDF, mask and centroids to the pool's samples now; return the new table's entry in the status.

        An automatic fit that is running ends first.

        Args:
            read_status: returns the pool's status, to report to the router.

        Raises:
            SwapRefusedError: there are too few samples, or the table was refused.
        """
        async with self._fit_lock:
            view = self.view = await self._router.report_status(read_status())
            if view.workers < 2:
                raise SwapRefusedError(
                    f"{view.workers} decode replica(s) serve: a table needs 2 or more, so start another one"
                )
            required = MIN_REQUESTS_PER_WORKER * view.workers
            if self.samples < required:
                raise SwapRefusedError(
                    f"the signature pool holds {self.samples} samples and a table of {view.workers} decode "
                    f"replicas needs {required}: send more requests"
                )
            await self._fit_and_swap(view, requested=True)
            assert self._table_entry is not None
            return self._table_entry

    async def _fit_and_swap(self, view: RouterView, *, requested: bool) -> None:
        """Fit and swap in a table; the caller holds the lock, and the view is not older than the lock."""
        live = await self._router.table() if view.has_table else None
        try:
            trace = await self._read_trace()
            # Fit in a thread, so that the actor stays responsive even while scikit-learn is imported.
            fitted = await asyncio.to_thread(
                _fit, live, trace, view.workers, self.settings.options.min_gain, requested
            )
        except ValueError as error:
            self._record_refusal(str(error))
            raise SwapRefusedError(str(error)) from error
        if fitted is None:
            return
        try:
            version = await self._router.swap(fitted.file, view, refit=live is not None)
        except SwapRefusedError as error:
            why = f"the router refuses the table: {getattr(error, 'cause', None) or error}"
            self._record_refusal(why)
            raise SwapRefusedError(why) from None
        if version is None:
            raise SwapRefusedError(
                "the router has another table, or was restarted or redeployed, since this table was fitted"
            )
        self._record_table(fitted, version, len(trace.ids), view.workers, refit=live is not None)

    def _record_table(
        self, fitted: FittedTable, version: int, samples: int, workers: int, *, refit: bool
    ) -> None:
        self._num_refits += refit
        self._table_entry = {
            "version": version,
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "samples": samples,
            "workers": workers,
            "why": fitted.why,
            "held_out": {
                "requests": fitted.comparison.requests,
                "experts_by_table": round(fitted.comparison.by_table, 3),
                "experts_by_load": round(fitted.comparison.random_mean, 3),
            },
        }
        # A warning, because Ray's actors do not show the level INFO of this package.
        logger.warning("%s: table version %d is live", fitted.why, version)

    def _record_refusal(self, why: str) -> None:
        self._num_refused += 1
        self._last_refusal = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "why": why}


def _fit(
    live: bytes | None, trace: CalibrationTrace, workers: int, min_gain: float, requested: bool
) -> FittedTable | None:
    from eldr_serve.signatures.tables import fit_new_table, refit_if_due

    if live is None or requested:
        why = "requested" if requested else f"first table for {workers} decode replicas"
        return fit_new_table(live, trace, workers, why)
    return refit_if_due(live, trace, workers, min_gain)
