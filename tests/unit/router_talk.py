"""A router's state, a client of it over a fake actor, a queued policy, and what tests say to them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from tables import counts_for, request, unit_table

from eldr_serve.channel import ChannelLost
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.router.client import RouterClient
from eldr_serve.router.directory import ReplicaDirectory
from eldr_serve.router.messages import Exchange, Reply, Restore
from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import Decision, Loads, Placement, PlacementRequest, QueuedPolicy, State


def make(
    workers: int = 3, table: int | None = 3, policy: str = "locality-band", clients: str = "c", **options: Any
) -> RouterState:
    """A router whose clients (a letter each) have told it of workers r0, r1, ..."""
    data = unit_table(table).to_bytes() if table else None
    state = RouterState(model_id="m", policy=policy, table=data, **options)
    for client in clients:
        state.restore(Restore(client, tuple(f"r{w}" for w in range(workers)), None, ()))
    return state


def say(state: RouterState, *ask: str | PlacementRequest, client: str = "c", **fields: Any) -> Reply:
    """Ask for workers, by name alone for a request that may wait, and tell what is in `fields`."""
    asked = tuple(request(a, may_wait=True) if isinstance(a, str) else a for a in ask)
    return state.exchange(Exchange(client, asked, known_epoch=state.epoch, **fields))


def ask(state: RouterState, name: str, centroid: int | None = None, **fields: Any) -> Placement:
    """The answer to a request, which must not wait, of a centroid's signature."""
    if centroid is not None:
        table = RoutingTable.from_bytes(state.settings.table or b"")
        fields["similarity"] = table.similarity(counts_for(centroid))
    asked = request(name, **{"table_version": state.settings.table_version, **fields})
    (answer,) = say(state, asked).placements
    return answer


def release(state: RouterState, *names: str) -> None:
    say(state, released=names)


def leased(name: str, replica: str, **fields: Any) -> Placement:
    """What a client that placed by itself tells."""
    return Placement(request(name, **{"max_new_tokens": 0, **fields}), State.LEASED, replica=replica)


def loads(state: RouterState) -> dict[str, tuple[int, int]]:
    """Requests and KV tokens of each worker."""
    return {w["replica"]: (w["in_flight"], w["kv_tokens"]) for w in state.status()["workers"]}


class FakeActor:
    """A RouterState in place of the actor."""

    def __init__(self, **options: Any) -> None:
        table = unit_table(2).to_bytes()
        self.options = {"model_id": "m", "policy": "locality-band", "table": table} | options
        self.state = RouterState(**self.options)
        self.alive = True
        self.delay_s = 0.0
        self.grant_delay_s = 0.0  # of a poll's answer, after it has left the outbox
        self.exchanges: list[Exchange] = []
        self.polls = 0

    @property
    def running(self) -> dict[str, Placement]:
        return self.state.placer.running

    def die(self) -> None:
        self.alive = False
        self.state.outbox.close()

    def restart(self) -> None:
        old, self.state = self.state, RouterState(**self.options)
        self.alive = True
        old.outbox.close()

    async def poll(self, *args: Any) -> tuple[Placement, ...]:
        self.polls += 1
        leases = await self.state.outbox.take(*args)
        await asyncio.sleep(self.grant_delay_s)
        if not self.alive:
            raise ChannelLost("it is dead")
        return leases

    async def call(self, method: str, *args: Any) -> Any:
        args = pickle.loads(pickle.dumps(args))
        await asyncio.sleep(self.delay_s)
        if not self.alive:
            raise ChannelLost("it is dead")
        if method == "exchange":
            self.exchanges.append(args[0])
        if method == "configure":
            return None
        if method == "settings":
            return self.state.settings
        if method == "granted":
            return await self.poll(*args)
        return getattr(self.state, method)(*args)

    def close(self) -> None:
        """There is no connection."""


@asynccontextmanager
async def connected(
    actor: FakeActor,
    *replicas: str,
    timeout_s: float = 0.3,
    directory: ReplicaDirectory | None = None,
) -> AsyncIterator[RouterClient]:
    """A client of the actor."""
    directory = directory or ReplicaDirectory()
    directory.publish(replicas)
    client = RouterClient(actor, directory, timeout_s=timeout_s)
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
    assert not client.leases
    assert not client.placements
    assert not client.has_queued


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
