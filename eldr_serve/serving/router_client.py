"""An ingress's side of the DecodeRouter actor: scoring, batching, and going on without it.

Concurrent placements share one call: while a call is under way the next ones wait and then go
together, with every release and progress report since. A request that the actor keeps in its pool gets
its lease by a long poll. If the actor does not answer, requests are placed by the client's own ledger,
those of the pool too, and the actor learns of them when it is back.
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
from ray.exceptions import ActorDiedError

from eldr_serve.artifacts import RoutingTable
from eldr_serve.routing import LoadLedger, PlacementRequest, reads_counts
from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.messages import Exchange, Lease, Reply, Restore, Restored, Settings
from eldr_serve.serving.replicas import ReplicaDirectory

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
_PROGRESS_S = 0.25
_RECONNECT_S = 0.25
_RESCORES = 2
_POLL_S = 5.0


@dataclass(frozen=True)
class _Asked:
    request: PlacementRequest
    counts: NDArray[np.unsignedinteger[Any]] | None
    until_s: float  # it leaves the pool then, by the loop's clock
    answer: asyncio.Future[Lease | None]


class RouterClient:
    """Places, tracks and releases the requests of one process. Lives in one event loop.

    Args:
        connect: returns the actor's handle, starting the actor if need be. It may block, as Ray's calls do
            while GCS is away: a thread calls it, one at a time.
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
        self._actor: ActorHandle | None = None  # good for every restart, until the actor is gone for good
        self._connecting: asyncio.Future[ActorHandle] | None = None
        self._epoch = ""
        self._workers_told: tuple[str, ...] = ()
        self._settings: Settings | None = None
        self._table: RoutingTable | None = None
        self._leases: dict[str, Lease] = {}
        self._counts: dict[
            str, NDArray[np.unsignedinteger[Any]]
        ] = {}  # of leases, where the policy reads them
        self._ledger = LoadLedger()
        self._asked: dict[str, _Asked] = {}  # all that wait for an answer, the pooled ones too
        self._unsent: dict[str, _Asked] = {}
        self._pooled: dict[str, asyncio.TimerHandle] = {}  # wait in the actor's pool; ends their wait
        self._pooling = asyncio.Event()  # set while there are such
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
            self._tasks = [asyncio.create_task(run()) for run in (self._talk, self._beat, self._fetch)]

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
        async with asyncio.timeout(10 * self._timeout_s):
            actor = await self._connected()
            try:
                result = await getattr(actor, method).remote(*args)
            except ActorDiedError:
                self._actor = None
                raise
        if isinstance(result, Settings):
            self._take_settings(result)
        return result

    # -- one request -----------------------------------------------------------------------------

    async def place(
        self,
        request: PlacementRequest,
        counts: NDArray[np.unsignedinteger[Any]] | None,
        *,
        wait_s: float = 0.0,
    ) -> Lease:
        """Lease a decode worker. Never fails because routing could not decide.

        Args:
            request: similarity, table_version and may_wait are filled in here.
            counts: unsigned[L,E], the prompt's expert counts; None if prefill gave none.
            wait_s: how long the request may wait in the router's pool, s; 0: it is placed at once.

        Raises:
            Overloaded: no decode replica is known at all, or the pool had none free in time.
        """
        request = replace(request, may_wait=wait_s > 0)
        until_s = asyncio.get_running_loop().time() + wait_s
        lease: Lease | None = None
        if not self.router_away:
            for _ in range(1 + _RESCORES):
                lease = await self._ask(request, counts, until_s)
                if lease is not None or self.router_away:
                    break
            else:  # swapped faster than we could score: load alone decides
                lease = await self._ask(request, None, until_s)
        if lease is None:
            if counts is not None:
                self._remember(request.request_id, counts)
            return self._place_by_own_load(request)
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
            self.count("served_elsewhere")
            corrected = replace(lease, replica=replica, worker=-1, best=False, reason="served-elsewhere")
            self._keep(corrected)
            self._tell(corrected)

    def release(self, request_id: str) -> None:
        """The request no longer runs on its worker; calling it again does nothing.

        What it generated in all is still told, before the release: policies learn lengths from it.
        """
        if self._leases.pop(request_id, None) is not None:
            self._ledger.release(request_id)
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
        request = replace(request, signature=self._counts.get(request.request_id))
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
        in_flight = self._ledger.loads(self._ledger.places(candidates)).in_flight
        replica = candidates[int(in_flight.argmin())]
        lease = Lease(
            request.request_id,
            replica,
            request.prompt_tokens,
            request.max_new_tokens,
            request.prompt_key,
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
        self, request: PlacementRequest, counts: NDArray[np.unsignedinteger[Any]] | None, until_s: float
    ) -> Lease | None:
        request_id = request.request_id
        answer: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = self._unsent[request_id] = _Asked(request, counts, until_s, answer)
        self._news.set()
        try:
            # No wait_for here: in Python 3.11 it swallows a cancellation that meets a finished answer,
            # and the request of a client that has gone would run on.
            return await answer
        except (asyncio.CancelledError, Overloaded):
            # It may wait in the pool, or hold a lease by now, or an answer with one is on its way.
            self.release(request_id)
            self._withdraw(request_id)
            raise
        finally:
            self._asked.pop(request_id, None)
            self._unsent.pop(request_id, None)
            self._leave_pool(request_id)

    def _answer(self, asked: _Asked, lease: Lease | None) -> None:
        self._leave_pool(asked.request.request_id)
        if lease is not None:
            self._keep(lease)
        asked.answer.set_result(lease)

    def _withdraw(self, request_id: str) -> None:
        self._counts.pop(request_id, None)
        self._released.append(request_id)
        self._news.set()

    def _correct(self, lease: Lease) -> None:
        """The actor has leased a worker for a request that has given up or runs elsewhere: tell it."""
        own = self._leases.get(lease.request_id)
        if own is None:
            self._withdraw(lease.request_id)
        elif own.replica != lease.replica:
            self._tell(own)

    # -- requests in the actor's pool ----------------------------------------------------------------

    def _wait_in_pool(self, asked: _Asked) -> None:
        if asked.request.request_id not in self._pooled:
            loop = asyncio.get_running_loop()
            self._pooled[asked.request.request_id] = loop.call_at(asked.until_s, self._expire, asked)
            self._pooling.set()

    def _leave_pool(self, request_id: str) -> None:
        timer = self._pooled.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, asked: _Asked) -> None:
        if not asked.answer.done():
            self.count("pool_expired")
            asked.answer.set_exception(Overloaded("no decode worker was free for this request in time"))

    def _ask_again(self) -> None:
        """What waits in the pool is asked for anew: the pool is another, or the scores are old."""
        self._unsent |= {r: asked for r, asked in self._asked.items() if r in self._pooled}
        self._news.set()

    async def _fetch(self) -> None:
        """Poll for the leases of pooled requests as long as there are any."""
        while True:
            await self._pooling.wait()
            actor, epoch = self._actor, self._epoch
            if not self._pooled or actor is None:
                self._pooling.clear()
                continue
            try:
                poll = actor.granted.remote(self._id, _POLL_S)
                leases: tuple[Lease, ...] = await self._wait(poll, more_s=_POLL_S)
            except Exception as error:
                if self._epoch == epoch:
                    self._lose_actor(error)
                    self._news.set()
            else:
                for lease in leases:
                    self._take_grant(lease)

    def _take_grant(self, lease: Lease) -> None:
        asked = self._asked.get(lease.request_id)
        if asked is not None and not asked.answer.done():
            self._answer(asked, lease)
        else:
            self._correct(lease)

    # -- telling the actor ---------------------------------------------------------------------------

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
            unsent, self._unsent = self._unsent, {}
            batch = [asked for asked in unsent.values() if not asked.answer.done()]
            try:
                reply = await self._exchange(batch)
                self._away = False
                for asked, lease in zip(batch, reply.leases, strict=True):
                    self._take_reply(asked, lease, pooled=asked.request.request_id in reply.pooled)
            except Exception as error:  # whatever it is: no request waits for a router that is broken
                self._lose_actor(error)
                for asked in batch:
                    if not asked.answer.done():
                        self._answer(asked, None)
            if self.router_away:
                await asyncio.sleep(_RECONNECT_S)
                self._news.set()

    def _take_reply(self, asked: _Asked, lease: Lease | None, *, pooled: bool) -> None:
        request_id = asked.request.request_id
        if not asked.answer.done():
            if pooled:
                self._wait_in_pool(asked)
            else:
                self._answer(asked, lease)
        elif lease is not None:
            self._correct(lease)
        elif request_id not in self._leases:  # given up; if leased, the poll was faster
            self._withdraw(request_id)

    def _lose_actor(self, error: BaseException) -> None:
        """From now on own load places, what waits in the pool too."""
        if not self._away:
            logger.warning("DecodeRouter does not answer (%s); placing by own load", type(error).__name__)
            self.count("router_lost")
        self._away = True
        if isinstance(error, ActorDiedError):
            self._actor = None
        for request_id in list(self._pooled):
            asked = self._asked[request_id]
            if not asked.answer.done():
                self._answer(asked, None)

    async def _connected(self) -> ActorHandle:
        """The actor's handle, looked up where there is none; a look-up goes on when nobody waits for it."""
        if self._actor is None:
            if self._connecting is None:
                self._connecting = asyncio.ensure_future(asyncio.to_thread(self._connect))
            connecting = self._connecting
            try:
                self._actor = await asyncio.shield(connecting)
            finally:
                if connecting.done() and self._connecting is connecting:
                    self._connecting = None
        return self._actor

    async def _exchange(self, batch: list[_Asked]) -> Reply:
        actor = await self._wait(self._connected())
        if not self._epoch:
            await self._restore(actor)
        if self._workers_told != self._replicas.live:
            workers = self._replicas.live
            await self._wait(actor.update_workers.remote(workers))
            self._workers_told = workers
        reply = await self._send(actor, batch)
        if reply.refused is not None:
            await self._restore(actor)
            reply = await self._send(actor, batch)
        if self._settings is None or reply.settings_version != self._settings.version:
            self._take_settings(await self._wait(actor.settings.remote()))
        return reply if reply.refused is None else replace(reply, leases=(None,) * len(batch))

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
            self._progress = progress | self._progress
            self._held = {r: lease for r, lease in held.items() if r in self._leases} | self._held
            self._events.update(events)
            raise
        if reply.refused is not None:
            self._events.update(events)
        return reply

    async def _restore(self, actor: ActorHandle) -> None:
        self._released.clear()  # the snapshot of leases says it all
        self._progress.clear()
        self._held.clear()
        workers = self._replicas.live
        leases = tuple(self._with_counts(lease) for lease in self._leases.values())
        message = Restore(self._id, workers, self._settings, leases)
        restored: Restored = await self._wait(actor.restore.remote(message))
        self._epoch = restored.epoch
        self._workers_told = workers
        self._take_settings(restored.settings)
        self._ask_again()

    def _with_counts(self, lease: Lease) -> Lease:
        return replace(lease, counts=self._counts.get(lease.request_id))

    async def _wait(self, reference: Any, *, more_s: float = 0.0) -> Any:
        # No wait_for: where it swallows a cancellation (see _ask), `stop` would wait for ever.
        async with asyncio.timeout(self._timeout_s + more_s):
            return await reference

    def _take_settings(self, settings: Settings) -> None:
        old = self._settings
        self._settings = settings
        if old is None or old.table_version != settings.table_version or old.table != settings.table:
            self._table = RoutingTable.from_bytes(settings.table) if settings.table is not None else None
            self._ask_again()


def _narrow(counts: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.unsignedinteger[Any]]:
    """The same counts in the fewest bytes: they travel with every placement."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
