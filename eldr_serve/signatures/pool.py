"""The SignaturePool actors. Each keeps a share of the samples; actor 0 coordinates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from eldr_serve.actors import find_actor, start_actor
from eldr_serve.errors import SwapRefusedError, one_line_message
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.monitoring.supervision import start_supervised
from eldr_serve.signatures.coordinator import Coordinator, RouterView
from eldr_serve.signatures.sample_share import SampleShare
from eldr_serve.signatures.settings import PoolSettings, pool_actor_name
from eldr_serve.signatures.window import KeptSample, SampleWindow, trace_of_samples

logger = logging.getLogger(__name__)

POLL_S = 2.0  # interval at which actor 0 polls the router and the other actors
_EXIT_S = 900.0  # time without a router before an actor exits; a router that exits stops its pool


class _RouterUnavailableError(Exception):
    """There is no router."""


class SignaturePool:
    """One actor of an application's pool.

    Args:
        index: number of the actor. Actor 0 coordinates: it finds the router and other actors by name.
    """

    def __init__(self, settings: PoolSettings, index: int = 0) -> None:
        self._window = SampleWindow(1)
        self._share = SampleShare(1.0)
        self._configure(settings)
        self._last_contact_at_s = time.monotonic()  # last contact of actor 0 with the router
        self._others: dict[int, Any] = {}  # index -> handle
        self._num_alive = 1
        self._refused: dict[str, int] = {}  # refused samples by reason, over all actors
        self._tasks = [start_supervised("the exit of an actor without a router", self._exit_without_router)]
        if index == 0:
            router = _RemoteRouter(settings.router, self._record_contact)
            self._coordinator = Coordinator(settings, router, self._trace)
            self._tasks.append(start_supervised("the coordination of the pool", self._coordinate))

    def _configure(self, settings: PoolSettings) -> None:
        options = settings.options
        actors = max(1, options.actors)
        self._settings = settings
        self._window.resize(
            -(-options.window // actors), options.window_mib * 2**20 // actors, options.keep_token_ids
        )
        self._share.rate = options.rate / actors

    def _record_contact(self, age_s: float = 0.0) -> None:
        """Record that actor 0 had an answer of the router `age_s` seconds ago."""
        self._last_contact_at_s = max(self._last_contact_at_s, time.monotonic() - age_s)

    async def add(self, samples: list[ExpertSample]) -> float:
        """Add samples; return the share of requests to sample next."""
        self._window.add(samples)
        self._share.count(len(samples))
        return self._share.current

    async def apply_settings(
        self, settings: PoolSettings, has_table: bool, contact_age_s: float = 0.0
    ) -> dict[str, Any]:
        """Apply the coordinator's settings; return this actor's status.

        Args:
            has_table: whether the router has a table.
            contact_age_s: time since the router's last answer to actor 0, s.
        """
        self._record_contact(contact_age_s)
        if settings != self._settings:
            self._configure(settings)
        self._share.sample_all = not has_table
        return {"samples": len(self._window), "share": self._share.current, "refused": self._window.refused}

    async def samples(self) -> list[KeptSample]:
        """Return the samples of this actor, oldest first."""
        return self._window.samples

    async def trace(self, tokenizer: str, vocabulary: int) -> bytes:
        """Return the samples of all actors as a CalibrationTrace file.

        Args:
            tokenizer: fingerprint of the served tokenizer.
            vocabulary: size of its vocabulary.

        Raises:
            SwapRefusedError: there is no sample yet.
        """
        try:
            trace = await self._trace(tokenizer, vocabulary)
        except ValueError as error:
            raise SwapRefusedError(str(error)) from error
        return await asyncio.to_thread(trace.to_bytes)

    async def refit(self) -> dict[str, Any]:
        """Fit a table now and return its entry in the status; see Coordinator.refit."""
        await self._poll_actors()
        return await self._coordinator.refit(self._status)

    async def _trace(self, tokenizer: str = "", vocabulary: int = 0) -> CalibrationTrace:
        shards = await self._call_others("samples")
        samples = [*self._window.samples, *(sample for shard in shards.values() for sample in shard)]
        samples.sort(key=lambda kept: kept.arrived_at_s)
        return await asyncio.to_thread(
            trace_of_samples, samples, self._settings.model_id, tokenizer=tokenizer, vocabulary=vocabulary
        )

    async def _coordinate(self) -> None:
        while True:
            try:
                await self._poll()
            except (RayError, _RouterUnavailableError) as error:
                logger.info("the router or an actor cannot be reached: %s", one_line_message(error))
            await asyncio.sleep(POLL_S)

    async def _poll(self) -> None:
        await self._poll_actors()
        status = self._status()
        view = await self._coordinator.poll(status)
        new_status = self._status()
        if new_status["table"] != status["table"]:  # report the new table at once
            view = await self._coordinator.poll(new_status)
        await self.apply_settings(view.pool, view.has_table)

    def _status(self) -> dict[str, Any]:
        return self._coordinator.status() | {
            "actors": self._num_alive,
            "of": self._settings.options.actors,
            "share": round(self._share.current, 4),
            "samples_refused": dict(self._refused),
        }

    async def _poll_actors(self) -> None:
        """Send the current settings to all actors, and count their samples."""
        view = self._coordinator.view
        has_table = view is not None and view.has_table
        arguments = (self._settings, has_table, time.monotonic() - self._last_contact_at_s)
        others = await self._call_others("apply_settings", *arguments)
        statuses = [await self.apply_settings(*arguments), *others.values()]
        self._coordinator.samples = sum(status["samples"] for status in statuses)
        self._num_alive = len(statuses)
        self._refused = {}
        for status in statuses:
            for reason, count in status["refused"].items():
                self._refused[reason] = self._refused.get(reason, 0) + count

    async def _call_others(self, method: str, *args: Any) -> dict[int, Any]:
        """Call a method of all other live actors; return their answers by index."""
        indices = range(1, self._settings.options.actors)
        answers = await asyncio.gather(*(self._call_other(index, method, args) for index in indices))
        return {index: answer for index, answer in zip(indices, answers, strict=True) if answer is not None}

    async def _call_other(self, index: int, method: str, args: tuple[Any, ...]) -> Any:
        try:
            if index not in self._others:
                name = pool_actor_name(self._settings.application, index)
                self._others[index] = await asyncio.to_thread(find_actor, name)
            return await asyncio.wait_for(getattr(self._others[index], method).remote(*args), 30)
        except (RayError, ValueError, TimeoutError, TypeError) as error:  # later requests replace its samples
            # TypeError: an actor of an older version lacks an argument.
            self._others.pop(index, None)
            logger.info("signature pool: actor %d cannot be reached: %s", index, one_line_message(error))
            return None

    async def _exit_without_router(self) -> None:
        while time.monotonic() - self._last_contact_at_s < _EXIT_S:
            await asyncio.sleep(POLL_S)
        ray.kill(ray.get_runtime_context().current_actor)


class _RemoteRouter:
    """Client of the DecodeRouter actor, which is found by its name.

    Args:
        on_contact: called when the router has answered a report.
    """

    def __init__(self, name: str, on_contact: Callable[[], None]) -> None:
        self._name, self._on_contact = name, on_contact
        self._handle: Any = None

    async def _call(self, method: str, *args: Any) -> Any:
        if self._handle is None:
            try:
                self._handle = await asyncio.to_thread(find_actor, self._name)
            except ValueError as error:
                raise _RouterUnavailableError(str(error)) from error
        try:
            return await getattr(self._handle, method).remote(*args)
        except SwapRefusedError:
            raise
        except RayError:
            self._handle = None
            raise

    async def report_status(self, status: dict[str, Any]) -> RouterView:
        """Send the pool's status to the router; return the router's state."""
        view: RouterView = await self._call("report_pool", status)
        self._on_contact()
        return view

    async def table(self) -> bytes | None:
        """Return the live table's file; None if there is no table."""
        table: bytes | None = (await self._call("settings")).table
        return table

    async def swap(self, table: bytes, view: RouterView, *, refit: bool) -> int | None:
        """Swap in a table and return its version; None if its table or state is no longer the view's."""
        version: int | None = await self._call(
            "swap_fitted_table", table, view.epoch, view.table_version, refit
        )
        return version


def find_pool(application: str) -> ActorHandle:
    """Return the coordinating actor; raise ValueError if the application has no pool."""
    return find_actor(pool_actor_name(application, 0))


def start_pool(settings: PoolSettings) -> None:
    """Start the actors that do not exist yet. Block while Ray's GCS is unavailable."""
    for index in range(settings.options.actors):
        start_actor(SignaturePool, pool_actor_name(settings.application, index), settings, index)


def end_pool(settings: PoolSettings, first_index: int = 0) -> None:
    """Stop the actors whose index is `first_index` or higher."""
    for index in range(first_index, settings.options.actors):
        try:
            ray.kill(find_actor(pool_actor_name(settings.application, index)))
        except ValueError:
            continue
