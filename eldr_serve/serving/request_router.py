"""Ray Serve request routers: which replica of a deployment a call goes to.

`DecodeRequestRouter` sends a decode call to the replica that it was leased, or, in somebody else's
Ray Serve LLM application, leases one itself. `PrefillRequestRouter` keeps equal prompt prefixes
together, with a bound on load. Both are set by `deployment_config.request_router_config`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from eldr_serve.routing import PlacementRequest
from eldr_serve.routing.prefill import choose_prefill
from eldr_serve.serving.budget import PrefillBudget
from eldr_serve.serving.decode_router import connect
from eldr_serve.serving.replicas import ReplicaDirectory, directory
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.wire import ATTEMPT, REPLICA, max_new_tokens, signature_of, transfer_params

logger = logging.getLogger(__name__)


class _CountingRouter(RequestRouter):
    """Counts what this process dispatched itself, at once, rather than polling replicas for load."""

    directory: ReplicaDirectory

    def initialize_state(self, *, directory_name: str, **kwargs: Any) -> None:
        """`directory_name`: under which the ingress of this process finds what the router knows."""
        self.directory = directory(directory_name)
        self._sent: dict[str, str] = {}  # internal request id -> replica
        self._in_flight: Counter[str] = Counter()
        self._counting = threading.Lock()  # calls end in a thread of Ray's own

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self.directory.budget.take({r.replica_id.unique_id: r.routing_stats or {} for r in replicas})
        super().update_replicas(replicas)
        self.directory.publish(replica.replica_id.unique_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.directory.publish(r for r in self.directory.live if r != replica_id.unique_id)
        self.directory.lose(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self.directory.lose(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that `_choose` names; the least loaded one where it names none or fails."""
        if not candidate_replicas:
            return []
        replica = None
        if pending_request is not None and pending_request.args:
            try:
                replica = await self._choose(candidate_replicas, pending_request)
            except Exception as error:  # Serve would let the call wait for ever
                logger.warning("a call's replica is chosen by load: %r", error)
        return self._send(pending_request, replica or self._least_loaded(candidate_replicas))

    async def _choose(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> RunningReplica | None:
        """One of the candidates for a call with arguments, or None."""
        raise NotImplementedError

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._counting:
            sent = self._sent.pop(internal_request_id, None)
            if sent is not None:
                self._in_flight[sent] -= 1

    def _send(self, pending: PendingRequest | None, replica: RunningReplica) -> list[list[RunningReplica]]:
        name = replica.replica_id.unique_id
        if pending is not None:
            internal = pending.metadata.internal_request_id
            with self._counting:
                before = self._sent.get(internal)
                if before is not None:
                    self._in_flight[before] -= 1
                self._in_flight[name] += 1
                self._sent[internal] = name
            request_id = getattr(pending.args[0], "request_id", None) if pending.args else None
            if isinstance(request_id, str):
                self.directory.sent(request_id, name)
        return [[replica]]

    def _least_loaded(self, candidates: list[RunningReplica]) -> RunningReplica:
        return min(
            candidates, key=lambda r: (self._in_flight[r.replica_id.unique_id], r.replica_id.unique_id)
        )


def _addressed(candidates: list[RunningReplica], params: dict[str, Any]) -> RunningReplica | None:
    wanted = params.get(REPLICA)
    return next((r for r in candidates if r.replica_id.unique_id == wanted), None)


class DecodeRequestRouter(_CountingRouter):
    """Sends a decode call to its leased replica; to the least loaded one if that is gone.

    Serve sends a call once more when it lost the replica before that had said that it accepts the call. The
    first one may have read the prompt's KV blocks by then, which frees them for other prompts. So such a
    call goes without them, and its engine computes the prompt itself.

    Used alone (`router_name` given), it leases the replica itself from the signature in the call's
    `kv_transfer_params`, and releases it when the call ends. Such a call never waits in the decode
    queue: it would hold up those behind it.

    Keyword arguments (request_router_kwargs):
        directory_name: see above.
        router_name: name of the DecodeRouter actor to place with; None where an ingress places.
        router_spec: the actor's settings (RouterSettings fields) if it must be started.
    """

    def initialize_state(
        self,
        *,
        directory_name: str = "decode",
        router_name: str | None = None,
        router_spec: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().initialize_state(directory_name=directory_name, **kwargs)
        self._client: RouterClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if router_name is not None:
            spec = RouterSettings.model_validate(router_spec)
            self._client = RouterClient(lambda: connect(router_name, spec), self.directory)

    async def _choose(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> RunningReplica | None:
        request: Any = pending.args[0]
        if self.directory.in_doubt(getattr(request, "request_id", "")):
            logger.warning("a call is sent once more; its prompt is computed by the decode engine")
            request.kv_transfer_params = None
        params = transfer_params(request)
        replica = _addressed(candidates, params)
        if replica is None and self._client is not None and params:
            replica = await self._lease(candidates, pending, self._client, params)
        return replica

    async def _lease(
        self,
        candidates: list[RunningReplica],
        pending: PendingRequest,
        client: RouterClient,
        params: dict[str, Any],
    ) -> RunningReplica | None:
        self._loop = asyncio.get_running_loop()
        client.start()
        request = PlacementRequest(
            pending.metadata.internal_request_id,
            None,
            prompt_tokens=int(params.get("remote_num_tokens") or 0),
            max_new_tokens=max_new_tokens(pending.args[0]),
        )
        lease = await client.place(request, signature_of(params))
        return _addressed(candidates, {REPLICA: lease.replica})

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if self._client is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._client.release, internal_request_id)


class PrefillRequestRouter(_CountingRouter):
    """Rendezvous hash of the prompt's head, to the least loaded where that replica is over its bound.

    Keyword arguments (request_router_kwargs):
        max_load_ratio: a replica with more than this times the mean load is passed over.
        max_kv_usage: a replica with more than this share of its KV blocks in use is, too.
    """

    def initialize_state(
        self,
        *,
        directory_name: str = "prefill",
        max_load_ratio: float = 1.25,
        max_kv_usage: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().initialize_state(directory_name=directory_name, **kwargs)
        self.directory.budget = PrefillBudget(max_kv_usage)
        self._max_load_ratio = max_load_ratio

    async def _choose(
        self, candidates: list[RunningReplica], pending: PendingRequest
    ) -> RunningReplica | None:
        request = pending.args[0]
        params = transfer_params(request)
        replica = _addressed(candidates, params)
        if replica is not None:
            return replica
        by_name = {r.replica_id.unique_id: r for r in candidates}
        # The ingress has seen room somewhere; if it is gone by now, all are full alike.
        open_to_it = self.directory.budget.with_room(by_name) or list(by_name)
        chosen = choose_prefill(
            prompt_head(request),
            {name: self._in_flight[name] for name in open_to_it},
            max_load_ratio=self._max_load_ratio,
            attempt=int(params.get(ATTEMPT, 0)),
        )
        return by_name[chosen]


def prompt_head(request: Any, prefix_tokens: int = 64) -> bytes:
    """The bytes that the prefix hash is taken of: first tokens, or 4 characters a token of text."""
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return repr(prompt[:prefix_tokens]).encode()
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if prompt is None:
        prompt = "\n".join(
            f"{message.get('role')}:{message.get('content')}"
            for message in getattr(request, "messages", None) or []
            if isinstance(message, dict)
        )
    return str(prompt)[: 4 * prefix_tokens].encode(errors="surrogatepass")
