"""Placement of another Ray Serve LLM application's calls on its decode replicas, behind its own ingress."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from eldr_serve.engine.calls import REPLICA_KEY, expert_counts_of, kv_transfer_params_of
from eldr_serve.fleet.replica_publisher import ReplicaPublisher
from eldr_serve.request import PolicyHints, make_placement_request
from eldr_serve.router.actor import connect
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_client.calls import RouterCalls
from eldr_serve.router_client.client import RouterClient

logger = logging.getLogger(__name__)


class DecodeRequestRouter(ReplicaPublisher):
    """Leases a replica for each call of Serve, by the expert counts in `kv_transfer_params`.

    A call that names a live replica (calls.REPLICA_KEY) goes there. A call without parameters, or whose
    leased replica was lost, goes to the least loaded replica. No call waits in the decode queue, since it
    would block later calls. A policy gets the domain and the labels from the headers in the call's second
    argument, where Ray's ingress passes its RawRequestInfo.

    Serve retries a call if the replica is lost before it accepts the call. That replica may already have read
    the prompt's KV blocks, which frees them for other prompts. Therefore, a retry is sent without the
    blocks, and its engine computes the prompt itself.

    Keyword arguments (request_router_kwargs):
        directory_name: as for ReplicaPublisher.
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
        self._client = RouterClient(
            RouterCalls(lambda: connect(router_name, spec)), lambda: self.directory.known_workers
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent: dict[str, str] = {}  # internal request id -> replica
        self._in_flight: Counter[str] = Counter()
        self._lock = threading.Lock()  # calls end in a thread of Ray's own
        self._lost: set[str] = set()  # internal ids of requests whose replica was lost

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._record_lost_calls(replica_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._record_lost_calls(replica_id)

    def _record_lost_calls(self, replica_id: ReplicaID) -> None:
        with self._lock:
            self._lost |= {call for call, name in self._sent.items() if name == replica_id.unique_id}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the named or leased replica, or the least loaded one without both or if placement fails."""
        if not candidate_replicas:
            return []
        replica = None
        if pending_request is not None and pending_request.args:
            try:
                replica = await self._choose(candidate_replicas, pending_request)
            except Exception as error:  # otherwise the call would wait in Serve forever
                logger.warning(
                    "placement of request %s failed, using the least loaded replica: %r",
                    pending_request.metadata.internal_request_id,
                    error,
                )
        replica = replica or self._least_loaded(candidate_replicas)
        if pending_request is not None:
            self._record_choice(pending_request, replica)
        return [[replica]]

    def _record_choice(self, pending: PendingRequest, replica: RunningReplica) -> None:
        name, call = replica.replica_id.unique_id, pending.metadata.internal_request_id
        with self._lock:
            before = self._sent.get(call)
            if before is not None:
                self._in_flight[before] -= 1
            self._in_flight[name] += 1
            self._sent[call] = name

    def _least_loaded(self, candidates: list[RunningReplica]) -> RunningReplica:
        """Return the least loaded replica; break ties randomly, since processes do not know of each other."""
        with self._lock:
            loads = [self._in_flight[replica.replica_id.unique_id] for replica in candidates]
        least = min(loads)
        return random.choice(
            [replica for replica, load in zip(candidates, loads, strict=True) if load == least]
        )

    async def _choose(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> RunningReplica | None:
        request: Any = pending.args[0]
        request_id = pending.metadata.internal_request_id
        with self._lock:
            is_lost, lost_replica = request_id in self._lost, self._sent.get(request_id)
        if is_lost:
            logger.warning(
                "request %s is retried, since replica %s was lost; the next replica recomputes its prompt",
                request_id,
                lost_replica,
            )
            request.kv_transfer_params = None
        params = kv_transfer_params_of(request)
        replica = _named_replica(candidates, params)
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
        request = make_placement_request(
            pending.metadata.internal_request_id,
            pending.args[0],
            _hints(pending),
            prompt_tokens=int(params.get("remote_num_tokens") or 0),
        )
        lease = await self._client.place(request, expert_counts_of(params))
        return _named_replica(candidates, {REPLICA_KEY: lease.worker})

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._lock:
            sent = self._sent.pop(internal_request_id, None)
            self._lost.discard(internal_request_id)
            if sent is not None:
                self._in_flight[sent] -= 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._client.release, internal_request_id)


def _hints(pending: PendingRequest) -> PolicyHints:
    request_info = pending.args[1] if len(pending.args) > 1 else None
    return PolicyHints.from_headers(getattr(request_info, "headers", {}))


def _named_replica(candidates: list[RunningReplica], params: dict[str, Any]) -> RunningReplica | None:
    name = params.get(REPLICA_KEY)
    return next((r for r in candidates if r.replica_id.unique_id == name), None)
