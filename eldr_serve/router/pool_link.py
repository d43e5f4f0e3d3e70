"""The router's side of the signature pool: start and stop of its actors, and their last status."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.exceptions import RayError

from eldr_serve.errors import one_line_message
from eldr_serve.metrics import RouterEvent
from eldr_serve.router.state import RouterState
from eldr_serve.signatures.coordinator import RouterView
from eldr_serve.signatures.pool import POLL_S, end_pool, start_pool
from eldr_serve.signatures.settings import PoolSettings

logger = logging.getLogger(__name__)

_UNREACHABLE_S = 5 * POLL_S  # silence after which the status reports the pool as unavailable


class PoolLink:
    """The router's link to the signature pool, for one event loop."""

    def __init__(self) -> None:
        self._settings: PoolSettings | None = None
        self._status: dict[str, Any] | None = None
        self._status_at_s = time.monotonic()
        self._seen_refused = 0  # refused tables that the current actor has reported
        self._changing: asyncio.Task[None] | None = None

    def apply_settings(self, settings: PoolSettings | None) -> None:
        """Start the pool with these settings in the background; stop surplus actors."""
        before, self._settings = self._settings, settings
        if settings == before:
            return
        if settings is None:
            self._status = None
        earlier = self._changing
        self._changing = asyncio.get_event_loop().create_task(self._change(earlier, before, settings))

    async def _change(
        self, earlier: asyncio.Task[None] | None, before: PoolSettings | None, now: PoolSettings | None
    ) -> None:
        if earlier is not None:
            await earlier
        try:
            if before is not None:
                await asyncio.to_thread(end_pool, before, 0 if now is None else now.options.actors)
            if now is not None:
                await asyncio.to_thread(start_pool, now)
        except (RayError, ValueError, RuntimeError) as error:
            logger.warning("the signature pool was not started: %s", one_line_message(error))

    async def end(self) -> None:
        """Stop all actors."""
        self.apply_settings(None)
        if self._changing is not None:
            await self._changing

    def report(self, state: RouterState, status: dict[str, Any]) -> RouterView:
        """Store the pool's status; return the router's state for the pool.

        Raises:
            RuntimeError: there is no pool, or the router has restarted and no ingress has configured it yet.
        """
        if self._settings is None:
            raise RuntimeError("the router has no settings of a signature pool")
        self._status, self._status_at_s = status, time.monotonic()
        num_refused = status["tables_refused"]
        if num_refused < self._seen_refused:  # the actor was restarted
            self._seen_refused = 0
        state.counters[RouterEvent.TABLES_REFUSED] += num_refused - self._seen_refused
        self._seen_refused = num_refused
        settings = state.settings
        return RouterView(
            epoch=state.epoch,
            model_id=state.model_id,
            workers=state.positions.num_live,
            ingresses=len(state.ingresses.ids),
            table_version=settings.table_version,
            has_table=settings.table is not None,
            pool=self._settings,
        )

    def status(self) -> dict[str, Any]:
        """Return the `signatures` entry of the status, which is None without a pool."""
        if self._settings is None:
            return {"signatures": None}
        silent_s = time.monotonic() - self._status_at_s
        if self._status is None or silent_s > _UNREACHABLE_S:
            note = f"the signature pool has not answered for {silent_s:.0f} s; the table stays as it is"
            return {"signatures": (self._status or {}) | {"note": note, "actors": 0}}
        return {"signatures": self._status}
