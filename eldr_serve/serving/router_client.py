"""An ingress's side of the DecodeRouter actor: scoring, batching, and going on without it.

Concurrent placements share one call: while a call is under way the next ones wait and then go
together, with every release and progress report since. If the actor does not answer, requests are
placed by the client's own ledger, and the actor learns of them when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.actor import ActorHandle

from eldr_serve.artifacts import RoutingTable
from eldr_serve.routing import LoadLedger, reads_counts
from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.messages import Exchange, Lease, PlacementRequest, Reply, Restore, Restored, Settings
from eldr_serve.serving.replicas import ReplicaDirectory

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
_PROGRESS_S = 0.25
_RECONNECT_S = 0.25
_RESCORES = 2


@dataclass(frozen=True)
class _Asked:
    request: PlacementRequest
    counts: NDArray[np.unsignedinteger[Any]] | None
    answer: asyncio.Future[Lease | None]


class RouterClient:
    """Places, tracks and releases the requests of one process. Lives in one event loop.

    Args:
        connect: returns the actor's handle, starting the actor if need be.
        replicas: the live decode replicas, as this process's request router knows them.
        timeout_s: how long a placement waits for the actor before it is made by own load.
    """

    def __init__(
        self,
        connect: Callable[[], ActorHandle],
        replicas: ReplicaDirectory,
        *,
        timeout_s: float = 1.0,
    ) -> None:
        self._connect = connect
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._id = uuid.uuid4().hex
        self._actor: ActorHandle | None = None
        self._epoch = ""
        self._workers_told: tuple[str, ...] = ()
        self._settings: Settings | None = None
        self._table: RoutingTable | None = None
        self._leases: dict[str, Lease] = {}
        self._counts: dict[
            str, NDArray[np.unsignedinteger[Any]]
        ] = {}  # of leases, where the policy reads them
        self._ledger = LoadLedger()
        self._waiting: list[_Asked] = []
        self._released: list[str] = []
        self._progress: dict[str, int] = {}
        self._held: dict[str, Lease] = {}
        self._events: Counter[str] = Counter()
        self._away = False
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin talking to the actor; safe to call again."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._talk()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        """Stop talking; leases that are still held expire in the actor."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    @property
    def router_away(self) -> bool:
        """The actor did not answer the last call; placements are made by own load."""
        return self._away

    @property
    def leases(self) -> int:
        """Requests of this process that hold a decode worker now."""
        return len(self._leases)

    async def call(self, method: str, *args: Any) -> Any:
        """Call any other method of the actor (status, set_policy, swap_table)."""
        self._actor = self._actor or self._connect()
        result = await asyncio.wait_for(getattr(self._actor, method).remote(*args), 10 * self._timeout_s)
        if isinstance(result, Settings):
            self._take_settings(result)
        return result

    # -- one request -----------------------------------------------------------------------------

    async def place(
        self, request: PlacementRequest, counts: NDArray[np.unsignedinteger[Any]] | None
    ) -> Lease:
        """Lease a decode worker. Never fails because routing could not decide.

        Args:
            request: similarity and table_version are filled in here.
            counts: unsigned[L,E], the prompt's expert counts; None if prefill gave none.

        Raises:
            Overloaded: no decode replica is known at all.
        """
        lease: Lease | None = None
        if not self.router_away:
            for _ in range(1 + _RESCORES):
                lease = await self._ask(request, counts)
                if lease is not None or self.router_away:
                    break
            else:  # swapped faster than we could score: load alone decides
                lease = await self._ask(request, None)
        if lease is None:
            if counts is not None:
                self._remember(request.request_id, counts)
            return self._place_by_own_load(request)
        self._keep(lease)
        return lease

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """Tell how many tokens the request has generated so far; sent now and then."""
        lease = self._leases.get(request_id)
        if lease is not None:
            self._leases[request_id] = replace(lease, generated_tokens=generated_tokens)
            self._ledger.progress(request_id, generated_tokens)
            self._progress[request_id] = generated_tokens

    def served_by(self, request_id: str, replica: str) -> None:
        """Correct a lease if another replica than the leased one really serves the request."""
        lease = self._leases.get(request_id)
        if lease is not None and lease.replica != replica:
            corrected = replace(lease, replica=replica, worker=-1, best=False, reason="served-elsewhere")
            self._keep(corrected)
            self._tell(corrected)

    def release(self, request_id: str) -> None:
        """The request no longer runs on its worker; calling it again does nothing."""
        if self._leases.pop(request_id, None) is not None:
            self._ledger.release(request_id)
            self._progress.pop(request_id, None)
            self._held.pop(request_id, None)
            self._counts.pop(request_id, None)
            self._released.append(request_id)
            self._news.set()

    def count(self, event: str) -> None:
        """Add one to a counter that `/eldr/status` shows."""
        self._events[event] += 1

    # -- scoring and own placement -----------------------------------------------------------------

    def _scored(
        self, request: PlacementRequest, counts: NDArray[np.unsignedinteger[Any]] | None
    ) -> PlacementRequest:
        if counts is None:
            return replace(request, signature_missing=True)
        self._remember(request.request_id, counts)
        request = replace(request, counts=self._counts.get(request.request_id))
        if self._table is None or self._settings is None:
            return request
        try:
            similarity = self._table.similarity(counts)
        except ValueError as error:
            logger.warning("signature not usable with the live table: %s", error)
            return replace(request, signature_missing=True)
        return replace(request, similarity=similarity, table_version=self._settings.table_version)

    def _remember(self, request_id: str, counts: NDArray[np.unsignedinteger[Any]]) -> None:
        """Keep what the live policy reads, for the actor and for the one after it."""
        if self._settings is not None and reads_counts(self._settings.policy):
            self._counts[request_id] = _narrow(counts)

    def _place_by_own_load(self, request: PlacementRequest) -> Lease:
        candidates = [r for r in self._replicas.live if r not in request.exclude] or list(self._replicas.live)
        if not candidates:
            self._counts.pop(request.request_id, None)
            raise Overloaded("no decode replica is running yet", retry_after_s=5)
        replica = min(candidates, key=lambda r: self._ledger.load(r).in_flight)
        lease = Lease(
            request.request_id,
            replica,
            request.prompt_tokens,
            band=len(candidates),
            reason="router-away" if self.router_away else "no-worker",
            policy="own-load",
        )
        self.count("placed_by_own_load")
        self._keep(lease)
        self._tell(lease)
        return lease

    def _keep(self, lease: Lease) -> None:
        self._leases[lease.request_id] = lease
        self._ledger.release(lease.request_id)
        self._ledger.add(lease.request_id, lease.replica, lease.prompt_tokens)
        self._ledger.progress(lease.request_id, lease.generated_tokens)

    def _tell(self, lease: Lease) -> None:
        self._held[lease.request_id] = lease
        self._news.set()

    # -- talking to the actor ------------------------------------------------------------------------

    async def _ask(
        self, request: PlacementRequest, counts: NDArray[np.unsignedinteger[Any]] | None
    ) -> Lease | None:
        answer: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(request, counts, answer))
        self._news.set()
        try:
            # No wait_for here: in Python 3.11 it swallows a cancellation that meets a finished answer,
            # and the request of a client that has gone would run on.
            return await answer
        except asyncio.CancelledError:
            # The answer may still come, with a lease that nobody will use.
            self._counts.pop(request.request_id, None)
            self._released.append(request.request_id)
            self._news.set()
            raise

    async def _beat(self) -> None:
        last = 0.0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            due = time.monotonic() - last > _HEARTBEAT_S
            if self._progress or self._events or due or self._workers_told != self._replicas.live:
                last = time.monotonic()
                self._news.set()

    async def _talk(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._waiting = self._waiting, []
            try:
                leases = await self._exchange(batch)
                self._away = False
            except Exception as error:  # whatever it is: no request waits for a router that is broken
                leases = (None,) * len(batch)
                self._lose_actor(error)
            for asked, lease in zip(batch, leases, strict=True):
                if not asked.answer.done():
                    asked.answer.set_result(lease)
                elif lease is not None:
                    self._released.append(asked.request.request_id)
                    self._news.set()
            if self.router_away:
                await asyncio.sleep(_RECONNECT_S)
                self._news.set()

    def _lose_actor(self, error: BaseException) -> None:
        if not self._away:
            logger.warning("DecodeRouter does not answer (%s); placing by own load", type(error).__name__)
            self.count("router_lost")
        self._away = True
        self._actor = None

    async def _exchange(self, batch: list[_Asked]) -> tuple[Lease | None, ...]:
        if self._actor is None:
            self._actor = self._connect()
        if not self._epoch:
            await self._restore(self._actor)
        if self._workers_told != self._replicas.live:
            workers = self._replicas.live
            await self._wait(self._actor.update_workers.remote(workers))
            self._workers_told = workers
        reply = await self._send(self._actor, batch)
        if reply.refused is not None:
            await self._restore(self._actor)
            reply = await self._send(self._actor, batch)
        if self._settings is None or reply.settings_version != self._settings.version:
            self._take_settings(await self._wait(self._actor.settings.remote()))
        return reply.leases if reply.refused is None else (None,) * len(batch)

    async def _send(self, actor: ActorHandle, batch: list[_Asked]) -> Reply:
        placements = tuple(self._scored(asked.request, asked.counts) for asked in batch)
        released, self._released = self._released, []
        progress, self._progress = self._progress, {}
        held, self._held = self._held, {}
        with_counts = tuple(self._with_counts(lease) for lease in held.values())
        events, self._events = self._events, Counter()
        message = Exchange(
            self._id, placements, tuple(released), progress, with_counts, self._epoch, dict(events)
        )
        try:
            reply: Reply = await self._wait(actor.exchange.remote(message))
        except BaseException:
            self._released = released + self._released
            self._held = {r: lease for r, lease in held.items() if r in self._leases} | self._held
            self._events.update(events)
            raise
        if reply.refused is not None:
            self._events.update(events)
        return reply

    async def _restore(self, actor: ActorHandle) -> None:
        self._released.clear()  # the snapshot of leases says it all
        self._held.clear()
        workers = self._replicas.live
        leases = tuple(self._with_counts(lease) for lease in self._leases.values())
        message = Restore(self._id, workers, self._settings, leases)
        restored: Restored = await self._wait(actor.restore.remote(message))
        self._epoch = restored.epoch
        self._workers_told = workers
        self._take_settings(restored.settings)

    def _with_counts(self, lease: Lease) -> Lease:
        return replace(lease, counts=self._counts.get(lease.request_id))

    async def _wait(self, reference: Any) -> Any:
        return await asyncio.wait_for(reference, self._timeout_s)

    def _take_settings(self, settings: Settings) -> None:
        old = self._settings
        self._settings = settings
        if old is None or old.table_version != settings.table_version or old.table != settings.table:
            self._table = RoutingTable.from_bytes(settings.table) if settings.table is not None else None


def _narrow(counts: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.unsignedinteger[Any]]:
    """The same counts in the fewest bytes: they travel with every placement."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
