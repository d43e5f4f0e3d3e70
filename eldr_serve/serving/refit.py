"""A table that is fitted anew by itself, where a deployment says so: on drift, or for other replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayError

from eldr_serve.errors import SwapRefused, sentence
from eldr_serve.routing import PolicyError
from eldr_serve.routing.loading import load
from eldr_serve.serving.router_settings import RefitOptions
from eldr_serve.serving.router_state import RouterState

logger = logging.getLogger(__name__)

_JOB = "offline.live_refit:refitted"  # a job, so it comes with the package but is not imported by it

Fit = Callable[..., Awaitable[tuple[bytes, str] | None]]


async def in_a_process(*arguments: Any) -> tuple[bytes, str] | None:
    """Run the job in a process of Ray's, so that no request waits for its clustering.

    Raises:
        PolicyError: it cannot be imported here.
        RayError: it has failed.
    """
    found: tuple[bytes, str] | None = await (await asyncio.to_thread(_submit, *arguments))
    return found


def _submit(*arguments: Any) -> Any:
    """In a thread: the import takes long, and Ray waits for GCS before a function's first call."""
    job = ray.remote(num_cpus=0, max_retries=0)(load(_JOB, "the job that refits"))
    return job.remote(*arguments)


class LiveRefit:
    """Looks at a router's state now and then, and swaps a better table in.

    Args:
        state: the router's, as it is now: a changed deployment begins a new one.
        fit: the table to swap in and why, or None; it gets the live table, recent signatures, the number of
            decode replicas now and at the last look, and the least gain.
    """

    def __init__(
        self, options: RefitOptions, state: Callable[[], RouterState], fit: Fit = in_a_process
    ) -> None:
        self._options = options
        self._state = state
        self._fit = fit
        self._before: int | None = None

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._options.every_s)
            try:
                await self.look()
            except SwapRefused as error:
                logger.warning("a refitted table is refused: %s", error)
            except (RayError, PolicyError, ValueError) as error:
                logger.warning("the table was not refitted: %s", sentence(error))

    async def look(self) -> None:
        """Swap a table in if it is time to.

        Raises:
            SwapRefused: the router does not take it.
        """
        state = self._state()
        workers, before = state.num_workers, self._before
        self._before = workers
        table, version = state.settings.table, state.settings.table_version
        if table is None or not workers:
            return
        found = await self._fit(table, list(state.recent), workers, before, self._options.min_gain)
        if found is None:
            return
        if self._state() is not state or state.settings.table_version != version:
            return  # somebody else has changed it meanwhile
        fitted, why = found
        state.swap_table(fitted)
        state.counters.update(refits=1)
        logger.warning("%s: refitted table version %d is live", why, state.settings.table_version)
