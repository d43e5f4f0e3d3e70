"""A router without Ray and without a network: its real state, a fake actor around it, and real clients.

`router_state` and `place` test the state alone. `FakeActor` also has the real ingress calls and channel
server. A `RouterClient` talks to it through connections within this process, which the test can delay or cut.
`SlotPolicy` is a policy with a decode queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np

from eldr_serve.channel import Channel, ChannelLostError, ChannelServer, Reply
from eldr_serve.channel.server import ServerConnection
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.router.actor import _error_response
from eldr_serve.router.ingress_calls import IngressCalls
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import live_status, router_status
from eldr_serve.router_client.calls import RouterCalls
from eldr_serve.router_client.client import RouterClient
from eldr_serve.router_protocol import methods
from eldr_serve.router_protocol.messages import Counted, Place, Restore, decoder
from eldr_serve.scheduling import Decision, Loads, PlacementRequest, QueuedPolicy
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.tables import counts_for, request, unit_table


def router_state(
    workers: int = 3,
    table: int | None = 3,
    policy: str = "locality-band",
    ingresses: str = "c",
    **options: Any,
) -> RouterState:
    """Return a router whose ingresses (a letter each) have reported the workers r0, r1, ..."""
    data = unit_table(table).to_bytes() if table else None
    state = RouterState(model_id="m", policy=policy, table=data, **options)
    for ingress in ingresses:
        state.restore_from_ingress(Restore(ingress, tuple(f"r{w}" for w in range(workers))))
    return state


def place(state: RouterState, *requests: str | PlacementRequest, ingress: str = "c") -> list[Lease]:
    """Place requests in one call, and return their leases. A name stands for a request that may wait."""
    leases = [
        Lease(request(one, may_wait=True) if isinstance(one, str) else one, LeaseState.SENT, ingress)
        for one in requests
    ]
    state.leases.place(leases)
    return leases


def place_one(state: RouterState, name: str, centroid: int | None = None, **fields: Any) -> Lease:
    """Place a request that must not wait, with the signature of this centroid."""
    if centroid is not None:
        table = RoutingTable.from_bytes(state.settings.table or b"")
        fields["similarity"] = table.similarity(counts_for(centroid))
    (lease,) = place(state, request(name, **{"table_version": state.settings.table_version, **fields}))
    return lease


def release(state: RouterState, *names: str) -> None:
    """End requests, and place the requests that wait for a free worker."""
    for name in names:
        state.leases.finish(name)
    state.leases.place([])  # each iteration of the event loop does so


def ingress_lease(name: str, worker: str, ingress: str = "c", **fields: Any) -> Lease:
    """Return the lease of a request that its ingress has placed by local fallback."""
    fields = {"max_new_tokens": 0, **fields}
    return Lease(request(name, **fields), LeaseState.GRANTED, ingress, worker, policy="local-fallback")


def loads(state: RouterState) -> dict[str, tuple[int, int]]:
    """Return the requests and KV tokens of each worker."""
    return {w["worker"]: (w["in_flight"], w["kv_tokens"]) for w in router_status(state)["workers"]}


class _End(asyncio.Transport):
    """One end of a connection in this process. Data arrives in order, after the actor's delay."""

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
    """The actor's state and ingress calls without Ray, and a client's calls to it.

    Attributes:
        delay_s: travel time of a message.
        messages: received requests and notes.
        restored: received Restore messages, as dicts.
    """

    def __init__(self, *, grace_s: float = 6.0, **options: Any) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        table = unit_table(2).to_bytes()
        self.options = {"model_id": "m", "policy": "locality-band", "table": table} | options
        self.state = RouterState(**self.options)
        self._grace_s = grace_s
        self.ingress_calls = IngressCalls(self.state, Mock(), grace_s)
        self.server = ChannelServer(
            "secret",
            self._handle_call,
            error_response=_error_response,
            max_calls=10**6,
            full_error=RuntimeError,
            open_methods={"subscribe": self._subscribe, "place": self._place},
        )
        self._alive = True
        self.delay_s = 0.0
        self.messages: list[Any] = []
        self.restored: list[dict[str, Any]] = []

    @property
    def running(self) -> dict[str, Lease]:
        return self.state.placer.running

    @property
    def requests(self) -> list[PlacementRequest]:
        return [message.request for message in self.messages if isinstance(message, Place)]

    @property
    def alive(self) -> bool:
        """Return whether ingresses can reach the actor. Its state is kept meanwhile."""
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        self._alive = alive
        if not alive:
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connections of all ingresses."""
        for connection in list(self.server.connections):
            connection.close("it is lost")

    def restart(self) -> None:
        """Begin with a new state and no connections, as after the actor's death."""
        self.disconnect()
        self.state = RouterState(**self.options)
        self.ingress_calls = IngressCalls(self.state, Mock(), self._grace_s)
        self.alive = True

    def _subscribe(self, body: bytes, reply: Reply) -> Any:
        handler = self.ingress_calls.open_methods["subscribe"](body, reply)
        self.restored.append(decoder(Any)(body))
        return self._record_notes(handler, decoder(Any))

    def _place(self, body: bytes, reply: Reply) -> Any:
        handler = self.ingress_calls.open_methods["place"](body, reply)
        self.messages.append(decoder(Place)(body))
        return self._record_notes(handler, decoder(Place | Counted))

    def _record_notes(self, handler: Any, decode: Callable[[bytes], Any]) -> Any:
        def on_note(payload: bytes, tokens: int) -> None:
            self.messages.append(decode(payload) if payload else tokens)
            handler.on_note(payload, tokens)

        return Mock(on_note=on_note, on_close=handler.on_close, on_lost=handler.on_lost)

    async def _handle_call(self, method: str, header: Any, body: bytes, reply: Reply) -> None:
        reply.send(await self._methods()[method](body))

    def _methods(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        state, live = self.state, self.state.live_settings

        def bind(method: Any, function: Callable[[Any], Any]) -> Any:
            async def run(arguments: Any) -> Any:
                return function(arguments)

            return method.bind(run)

        return dict(
            [
                bind(methods.SETTINGS, lambda call: state.settings),
                bind(methods.STATUS, lambda call: router_status(state)),
                bind(methods.LIVE, lambda call: live_status(state)),
                bind(
                    methods.EXPECT_COUNTS, lambda call: state.expect_counts(call.num_layers, call.num_experts)
                ),
                bind(methods.SET_POLICY, lambda call: live.set_policy(call.policy, call.parameters)),
                bind(methods.SET_SHADOW, lambda call: live.set_shadow(call.shadow)),
                bind(methods.SWAP_TABLE, lambda call: live.swap_table(call.table)),
                bind(
                    methods.SWAP_PREDICTOR, lambda call: live.swap_predictor(call.predictor, call.tokenizer)
                ),
                bind(methods.DECODE_LOADS, lambda call: state.decode_loads(call.blocks)),
            ]
        )

    def calls(self) -> RouterCalls:
        """Return the calls of another router client."""
        calls = RouterCalls(lambda: None)  # type: ignore[arg-type, return-value]
        calls._connect = self._connect  # type: ignore[method-assign]
        return calls

    async def _connect(self) -> Channel:
        if not self.alive:
            raise ChannelLostError("the actor is dead")
        channel = Channel("secret", lambda: None)
        client_end, server_end = _End(self, channel), _End(self, ServerConnection(self.server))
        client_end.other, server_end.other = server_end, client_end
        server_end.protocol.connection_made(server_end)
        channel.connection_made(client_end)
        await channel.welcome
        return channel


@asynccontextmanager
async def connected_client(
    actor: FakeActor,
    *replicas: str,
    timeout_s: float = 0.3,
    release: bool = True,
    directory: ReplicaDirectory | None = None,
) -> AsyncIterator[RouterClient]:
    """Run a client of the actor. At the end release its leases, and wait until both sides are idle.

    Args:
        directory: where the client finds the replicas; None: a new one.
    """
    directory = ReplicaDirectory() if directory is None else directory
    directory.publish({replica: {} for replica in replicas})
    client = RouterClient(actor.calls(), lambda: directory.known_workers, timeout_s=timeout_s)
    client.start()
    try:
        yield client
        if release:
            for name in list(client.leases):
                client.release(name)
            await wait_until_idle(client, actor)
    finally:
        await client.stop()


@asynccontextmanager
async def router_and_client(
    *replicas: str, timeout_s: float = 0.3, **options: Any
) -> AsyncIterator[tuple[FakeActor, RouterClient]]:
    """Run an actor with these options and a client of it."""
    actor = FakeActor(**options)
    async with connected_client(actor, *replicas, timeout_s=timeout_s) as client:
        yield actor, client


async def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Poll until the condition holds. Raise TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def wait_until_idle(client: RouterClient, actor: FakeActor) -> None:
    """Wait until neither router nor client has a lease or a waiting request."""
    await wait_until(
        lambda: not (actor.state.leases.queue_size or actor.running or actor.ingress_calls.place_calls)
    )
    assert set(loads(actor.state).values()) <= {(0, 0)}
    assert not client.held_leases()
    assert not client.leases
    assert not client._place_calls
    assert not list(client._waiting)
    assert not actor.ingress_calls.place_calls


SLOTS = "tests.support.fake_router:SlotPolicy"  # its import path


class SlotPolicy(QueuedPolicy):
    """A policy that serves requests in order of arrival, on the first free slot. It records its callbacks.

    Attributes:
        waiting: requests that waited at the last dispatch.
        running: worker by request id.
        assigned: all requests that have been assigned to a worker, by id.
        lengths: generated tokens of the requests that have ended.
        aborted: requests that have ended without a complete answer.
    """

    class Parameters(QueuedPolicy.Parameters):
        slots: int = 1
        queue: bool = True

    parameters: Parameters

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.waiting: list[PlacementRequest] = []
        self.running: dict[str, int] = {}
        self.assigned: dict[str, PlacementRequest] = {}
        self.generated: dict[str, int] = {}
        self.lengths: list[int] = []
        self.aborted: list[str] = []

    @property
    def has_queue(self) -> bool:
        return self.parameters.queue

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.available_positions[0]), reason="at-once")

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        self.waiting = list(waiting)
        slots = np.maximum(self.parameters.slots - loads.in_flight[loads.available_positions], 0)
        free = np.repeat(loads.available_positions, slots).tolist()
        return [
            (i, Decision(w, num_candidates=len(loads), reason="slot"))
            for i, w in enumerate(free[: len(waiting)])
        ]

    def on_assigned(self, request: PlacementRequest, position: int, decision: Decision | None = None) -> None:
        self.running[request.request_id] = position
        self.assigned[request.request_id] = request

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        self.generated |= generated_tokens

    def on_finished(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.lengths.append(self.generated.pop(request_id, 0))

    def on_aborted(self, request_id: str) -> None:
        self.aborted.append(request_id)
        super().on_aborted(request_id)
