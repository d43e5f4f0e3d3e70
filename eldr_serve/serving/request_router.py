"""Ray Serve request routers: which replica of a deployment a call goes to.

`DirectoryRouter` tells the ingress of its process which replicas live; the ingress calls them through
channels. `DecodeRequestRouter` works in somebody else's Ray Serve LLM application: it leases a replica for
each decode call. Both are set by `deployment_config.request_router_config`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from eldr_serve.routing import PlacementRequest
from eldr_serve.serving.decode_router import connect
from eldr_serve.serving.replicas import ReplicaDirectory, directory
from eldr_serve.serving.router_calls import RouterCalls
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.wire import REPLICA, max_new_tokens, signature_of, transfer_params

logger = logging.getLogger(__name__)


class DirectoryRouter(RequestRouter):
    """Publishes the replicas; any of them takes a call.

    Keyword arguments (request_router_kwargs):
        directory_name: under which the ingress of this process finds what the router knows.
    """

    directory: ReplicaDirectory

    def initialize_state(self, *, directory_name: str, **kwargs: Any) -> None:
        self.directory = directory(directory_name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.directory.publish({r.replica_id.unique_id: r.replica_metadata or {} for r in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.directory.drop(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook."""
        return [candidate_replicas]


class DecodeRequestRouter(DirectoryRouter):
    """Leases a replica for each call from the signature in its `kv_transfer_params`, until the call ends.

    A call without one, or that names a replica (wire.REPLICA), or whose replica has gone, takes that one or
    the least loaded. It never waits in the decode queue: it would hold up those behind it.

    Serve sends a call once more when it lost the replica before that had said that it accepts the call. The
    first one may have read the prompt's KV blocks by then, which frees them for other prompts. So such a
    call goes without them, and its engine computes the prompt itself.

    Keyword arguments (request_router_kwargs):
        directory_name: see above.
        router_name: name of the DecodeRouter actor to place with.
        router_spec: the actor's settings (RouterSettings fields) if it must be started.
    """

    def initialize_state(
        self,
        *,
        directory_name: str = "decode",
        router_name: str = "",
        router_spec: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().initialize_state(directory_name=directory_name, **kwargs)
        if not router_name:
            raise ValueError("request_router_kwargs must name the DecodeRouter actor: router_name")
        spec = RouterSettings.model_validate(router_spec or {})
        self._client = RouterClient(RouterCalls(lambda: connect(router_name, spec)), self.directory)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: dict[str, str] = {}  # internal request id -> replica
        self._in_flight: Counter[str] = Counter()
        self._counting = threading.Lock()  # calls end in a thread of Ray's own
        self._lost: set[str] = set()  # internal request ids whose replica was lost

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._lose(replica_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._lose(replica_id)

    def _lose(self, replica_id: ReplicaID) -> None:
        with self._counting:
            self._lost |= {call for call, name in self._sent.items() if name == replica_id.unique_id}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that is leased or named; the least loaded one where there is none or that fails."""
        if not candidate_replicas:
            return []
        replica = None
        if pending_request is not None and pending_request.args:
            try:
                replica = await self._choose(candidate_replicas, pending_request)
            except Exception as error:  # Serve would let the call wait for ever
                logger.warning("a call's replica is chosen by load: %r", error)
        return self._send(pending_request, replica or self._least_loaded(candidate_replicas))

    def _send(self, pending: PendingRequest | None, replica: RunningReplica) -> list[list[RunningReplica]]:
        if pending is not None:
            name, call = replica.replica_id.unique_id, pending.metadata.internal_request_id
            with self._counting:
                before = self._sent.get(call)
                if before is not None:
                    self._in_flight[before] -= 1
                self._in_flight[name] += 1
                self._sent[call] = name
        return [[replica]]

    def _least_loaded(self, candidates: list[RunningReplica]) -> RunningReplica:
        """Of equals any: processes that know nothing of each other do not all take the same one."""
        least = min(self._in_flight[r.replica_id.unique_id] for r in candidates)
        return random.choice([r for r in candidates if self._in_flight[r.replica_id.unique_id] == least])

    async def _choose(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> RunningReplica | None:
        request: Any = pending.args[0]
        if pending.metadata.internal_request_id in self._lost:
            logger.warning("a call is sent once more; its prompt is computed by the decode engine")
            request.kv_transfer_params = None
        params = transfer_params(request)
        replica = _addressed(candidates, params)
        if replica is None and params:
            replica = await self._lease(candidates, pending, params)
        return replica

    async def _lease(
        self,
        candidates: list[RunningReplica],
        pending: PendingRequest,
        params: dict[str, Any],
    ) -> RunningReplica | None:
        self._loop = asyncio.get_running_loop()
        self._client.start()
        request = PlacementRequest(
            pending.metadata.internal_request_id,
            None,
            prompt_tokens=int(params.get("remote_num_tokens") or 0),
            max_new_tokens=max_new_tokens(pending.args[0]),
        )
        lease = await self._client.place(request, signature_of(params))
        return _addressed(candidates, {REPLICA: lease.replica})

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._counting:
            sent = self._sent.pop(internal_request_id, None)
            self._lost.discard(internal_request_id)
            if sent is not None:
                self._in_flight[sent] -= 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._client.release, internal_request_id)


def _addressed(candidates: list[RunningReplica], params: dict[str, Any]) -> RunningReplica | None:
    wanted = params.get(REPLICA)
    return next((r for r in candidates if r.replica_id.unique_id == wanted), None)
