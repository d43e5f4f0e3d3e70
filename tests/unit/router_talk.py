"""A router's state, a client of it over a channel without a network, a queued policy, and what tests say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
from tables import counts_for, request, unit_table

from eldr_serve.channel import Answer, Channel, ChannelLost, ChannelServer
from eldr_serve.channel.server import _Connection
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.router.actor import _ARGUMENTS, _describe
from eldr_serve.router.calls import RouterCalls
from eldr_serve.router.client import RouterClient
from eldr_serve.router.directory import ReplicaDirectory
from eldr_serve.router.messages import Counted, Place, Restore, decoder, encode
from eldr_serve.router.sessions import Sessions
from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import Decision, Lease, Loads, PlacementRequest, QueuedPolicy, State


def make(
    workers: int = 3, table: int | None = 3, policy: str = "locality-band", clients: str = "c", **options: Any
) -> RouterState:
    """A router whose clients (a letter each) have told it of workers r0, r1, ..."""
    data = unit_table(table).to_bytes() if table else None
    state = RouterState(model_id="m", policy=policy, table=data, **options)
    for client in clients:
        state.restore(Restore(client, tuple(f"r{w}" for w in range(workers))))
    return state


def say(
    state: RouterState,
    *ask: str | PlacementRequest,
    client: str = "c",
    progress: dict[str, int] | None = None,
    released: Sequence[str] = (),
    held: Sequence[Lease] = (),
    counted: Sequence[PlacementRequest] = (),
) -> list[Lease]:
    """Ask for workers, by name alone for a request that may wait, after all the other news."""
    asked = [request(a, may_wait=True) if isinstance(a, str) else a for a in ask]
    state.progress(progress or {})
    for name in released:
        state.finish(name)
    for lease in held:
        state.hold(replace(lease, client=client))
    for known in counted:
        state.counted(known)
    placements = [Lease(one, State.SENT, client) for one in asked]
    state.place(placements)
    return placements


def ask(state: RouterState, name: str, centroid: int | None = None, **fields: Any) -> Lease:
    """The answer to a request, which must not wait, of a centroid's signature."""
    if centroid is not None:
        table = RoutingTable.from_bytes(state.settings.table or b"")
        fields["similarity"] = table.similarity(counts_for(centroid))
    asked = request(name, **{"table_version": state.settings.table_version, **fields})
    (answer,) = say(state, asked)
    return answer


def release(state: RouterState, *names: str) -> None:
    say(state, released=names)


def leased(name: str, replica: str, **fields: Any) -> Lease:
    """What a client that placed by itself tells."""
    asked = request(name, **{"max_new_tokens": 0, **fields})
    return Lease(asked, State.LEASED, replica=replica, policy="own-load")


def loads(state: RouterState) -> dict[str, tuple[int, int]]:
    """Requests and KV tokens of each worker."""
    return {w["replica"]: (w["in_flight"], w["kv_tokens"]) for w in state.status()["workers"]}


class _End(asyncio.Transport):
    """One end of a connection in this process; what is written arrives in order, after the actor's delay."""

    other: _End

    def __init__(self, actor: FakeActor, protocol: Any) -> None:
        super().__init__()
        self.actor, self.protocol = actor, protocol
        self.open = True
        self._last_s = 0.0

    def _later(self, callback: Callable[..., None], *args: Any) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self.actor.delay_s)
        loop.call_at(self._last_s, callback, *args)

    def writelines(self, list_of_data: Any) -> None:
        self._later(self.other._arrive, b"".join(list_of_data))

    def _arrive(self, data: bytes) -> None:
        if self.open:
            self.protocol.data_received(data)

    def abort(self) -> None:
        if self.open:
            self.open = False
            self._later(self.other._lose)

    def _lose(self) -> None:
        if self.open:
            self.open = False
            self.protocol.connection_lost(None)

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class FakeActor(RouterCalls):
    """The actor's state and sessions without Ray, and the calls of a client of it.

    Attributes:
        delay_s: time that a message is on its way.
        messages: notes and requests of clients.
    """

    def __init__(self, *, grace_s: float = 6.0, **options: Any) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        table = unit_table(2).to_bytes()
        self.options = {"model_id": "m", "policy": "locality-band", "table": table} | options
        self.state = RouterState(**self.options)
        self.sessions = Sessions(self.state, Mock(), grace_s)
        self.server = ChannelServer(
            "secret", self._answer, describe=_describe, limit=10**6, full=RuntimeError,
            held={"subscribe": self._subscribe, "place": self._place},
        )  # fmt: skip
        self._alive = True
        self.delay_s = 0.0
        self.messages: list[Any] = []

    @property
    def running(self) -> dict[str, Lease]:
        return self.state.placer.running

    @property
    def asked(self) -> list[PlacementRequest]:
        return [one.request for one in self.messages if isinstance(one, Place)]

    @property
    def alive(self) -> bool:
        """Whether it can be reached; it keeps what it knows."""
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        self._alive = alive
        if not alive:
            self.disconnect()

    def disconnect(self) -> None:
        """Lose all connections."""
        for connection in list(self.server.connections):
            connection.close("it is lost")

    def restart(self) -> None:
        """Forget everything."""
        self.disconnect()
        self.state = RouterState(**self.options)
        self.sessions = Sessions(self.state, Mock(), self.sessions.grace_s)
        self.alive = True

    def _subscribe(self, body: bytes, answer: Answer) -> Any:
        held = self.sessions.held["subscribe"](body, answer)
        return self._heard(held, decoder(Any))

    def _place(self, body: bytes, answer: Answer) -> Any:
        held = self.sessions.held["place"](body, answer)
        self.messages.append(decoder(Place)(body))
        return self._heard(held, decoder(Place | Counted))

    def _heard(self, held: Any, decode: Callable[[bytes], Any]) -> Any:
        def noted(payload: bytes, tokens: int) -> None:
            self.messages.append(decode(payload) if payload else tokens)
            held.noted(payload, tokens)

        return Mock(noted=noted, closed=held.closed, lost=held.lost)

    async def _answer(self, method: str, header: Any, body: bytes, answer: Answer) -> None:
        found = getattr(self.state, method)
        result = found(*_ARGUMENTS[method](body)) if callable(found) else found
        answer.send(encode(result))

    async def configure(self, settings: Any) -> None:
        """Nothing was deployed anew."""

    def calls(self) -> RouterCalls:
        """Of another client."""
        made = RouterCalls(lambda: None)  # type: ignore[arg-type, return-value]
        made._connect = self._connect  # type: ignore[method-assign]
        return made

    async def _connect(self) -> Channel:
        if not self.alive:
            raise ChannelLost("it is dead")
        channel = Channel("secret", lambda: None)
        here, there = _End(self, channel), _End(self, _Connection(self.server))
        here.other, there.other = there, here
        there.protocol.connection_made(there)
        channel.connection_made(here)
        await channel.welcome
        return channel


@asynccontextmanager
async def connected(
    actor: FakeActor,
    *replicas: str,
    timeout_s: float = 0.3,
    directory: ReplicaDirectory | None = None,
) -> AsyncIterator[RouterClient]:
    """A client of the actor."""
    directory = directory or ReplicaDirectory()
    directory.publish({replica: {} for replica in replicas})
    client = RouterClient(actor.calls(), directory, timeout_s=timeout_s)
    client.start()
    try:
        yield client
    finally:
        await client.stop()


async def settled(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def all_is_over(client: RouterClient, actor: FakeActor) -> None:
    """Wait until neither router nor client holds anything."""
    await settled(lambda: not actor.state.queue_size and not actor.running)
    assert set(loads(actor.state).values()) <= {(0, 0)}
    assert not client.lease_count
    assert not client.leases
    assert not client._calls
    assert not list(client._waiting)
    assert not actor.sessions.open


SLOTS = "router_talk:Slots"  # loads the policy


class Slots(QueuedPolicy):
    """First come, first served, on the first worker with a free slot. Remembers what it was told."""

    class Parameters(QueuedPolicy.Parameters):
        slots: int = 1
        queue: bool = True

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.waiting: list[PlacementRequest] = []  # at the last dispatch
        self.running: dict[str, int] = {}  # request id -> worker
        self.placed_as: dict[str, PlacementRequest] = {}  # the same requests
        self.generated: dict[str, int] = {}
        self.lengths: list[int] = []  # of requests that have ended

    @property
    def queues(self) -> bool:
        return self.parameters.queue

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.workers[0]), 1, None, "at-once")

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        self.waiting = list(waiting)
        slots = np.maximum(self.parameters.slots - loads.in_flight[loads.workers], 0)
        free = np.repeat(loads.workers, slots).tolist()
        return [(i, Decision(w, len(loads), None, "slot")) for i, w in enumerate(free[: len(waiting)])]

    def on_assigned(self, request: PlacementRequest, worker: int, decision: Decision | None = None) -> None:
        self.running[request.request_id] = worker
        self.placed_as[request.request_id] = request

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self.generated |= generated_tokens

    def on_finished(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.lengths.append(self.generated.pop(request_id, 0))
