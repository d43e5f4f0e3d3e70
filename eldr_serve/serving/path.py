"""The path of one request: prefill, place, decode, release; and what happens when a step fails."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, model_validator
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eldr_serve.serving.compat import ErrorResponse
from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.messages import Lease, PlacementRequest
from eldr_serve.serving.replicas import Engines
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.servers import ReleaseKv
from eldr_serve.serving.stages import Stages
from eldr_serve.serving.wire import (
    REPLICA,
    GenerationRequest,
    decode_request,
    from_client,
    generated_tokens,
    max_new_tokens,
    needs_whole_engine,
    prefill_request,
    prompt_key,
    signature_of,
    transfer_params,
)

logger = logging.getLogger(__name__)

_ENGINE_LOST = (RayError, RayServeException)
_ROOM_CHECK_S = 0.05
_LEASE_SHARE = 0.8  # of a KV lease within which decode must have been found; the rest is for its pull


class PathOptions(BaseModel, frozen=True, extra="forbid"):
    """How often a step is tried, and how long a prompt's KV blocks stand."""

    prefill_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="how long a request waits while every prefill replica's KV cache is full, before it gets "
        "503, s",
    )
    prefill_tries: int = Field(default=3, ge=1, description="prefill replicas tried for one request")
    decode_tries: int = Field(default=3, ge=1, description="decode replicas tried before the first token")
    retry_backoff_s: float = Field(
        default=0.05, ge=0, description="wait before the first retry, s; then doubled"
    )
    kv_lease_s: float = Field(
        default=30.0, gt=0, description="how long a prefill engine keeps a finished prompt's blocks, s"
    )
    pool_ttl_s: float = Field(
        default=10.0,
        gt=0,
        description="how long a prefilled request may wait for a worker under a pooled policy before it "
        "gets 503, s; less than 0.8 of kv_lease_s",
    )

    @model_validator(mode="after")
    def _pool_within_lease(self) -> PathOptions:
        if self.pool_ttl_s >= _LEASE_SHARE * self.kv_lease_s:
            raise ValueError(
                f"pool_ttl_s is {self.pool_ttl_s:g} s, it must be less than {_LEASE_SHARE:g} of kv_lease_s "
                f"({self.kv_lease_s:g} s): a prompt's blocks must outlive its wait"
            )
        return self


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks wait on a prefill replica."""

    request_id: str
    replica: str | None
    params: dict[str, Any] | None
    prompt_tokens: int
    done_at: float  # time.monotonic()


class RequestPath:
    """Runs requests of one ingress over the prefill and the decode deployment."""

    def __init__(
        self,
        *,
        engines: Engines,
        client: RouterClient,
        options: PathOptions,
    ) -> None:
        self._engines = engines
        self._prefill_handle = engines.prefill.options(stream=True)
        self._decode_handle = engines.decode.options(stream=True)
        self._client = client
        self._options = options
        self._background: set[asyncio.Task[Any]] = set()
        self.stages = Stages()

    async def generate(
        self,
        request: GenerationRequest,
        method: str,
        raw_info: Any = None,
        *,
        domain: str | None = None,
        placed: Callable[[Lease], None] = lambda lease: None,
        handed_over: Callable[[float], None] = lambda seconds: None,
    ) -> AsyncGenerator[Any, None]:
        """Yield what the decode engine answers (chunks of a stream, or one response).

        Args:
            method: "chat" or "completions".
            domain: the client's own name for the kind of request, for policy `domain`.
            placed: told of each lease as it is made.
            handed_over: told the time from the end of prefill to the first answer of decode, s.

        Raises:
            Overloaded: no engine could take the request; nothing was generated.
        """
        request = from_client(request)
        request_id = uuid.uuid4().hex
        split = needs_whole_engine(request) is None
        prefilled: Prefilled | None = None
        failed: list[str] = []
        try:
            for attempt in range(self._options.decode_tries):
                if split and (prefilled is None or self._lease_ended(prefilled)):
                    await self._room()
                    answer = await self._prefill(request, method, raw_info, f"{request_id}-p{attempt}")
                    if isinstance(answer, ErrorResponse):
                        yield answer
                        return
                    prefilled = answer
                placing_at = time.monotonic()
                lease = await self._place(request, request_id, prefilled, domain, failed)
                placed(lease)
                placed_at = time.monotonic()
                stream = self._decode(request, method, raw_info, f"{request_id}-d{attempt}", lease, prefilled)
                try:
                    first = await anext(stream, None)
                    if first is not None and not _engine_failed(first):
                        if not isinstance(first, ErrorResponse):
                            if prefilled is not None:
                                now = time.monotonic()
                                handed_over(now - prefilled.done_at)
                                self.stages.record(
                                    place=placed_at - placing_at,
                                    first_chunk=now - placed_at,
                                    handover=now - prefilled.done_at,
                                )
                            prefilled = None  # read by the decode engine, which tells the prefill engine
                        yield first
                        async for chunk in stream:
                            yield chunk
                        return
                    logger.warning("decode replica %s refused a request: %s", lease.replica, first)
                except _ENGINE_LOST as error:
                    logger.warning("decode replica %s failed before a token: %r", lease.replica, error)
                finally:
                    await stream.aclose()
                    self._client.release(request_id)
                failed.append(lease.replica)
                await asyncio.sleep(self._options.retry_backoff_s * 2**attempt)
            raise Overloaded(f"{len(failed)} decode replicas failed this request")
        finally:
            if prefilled is not None:
                self._release_kv(prefilled.request_id, prefilled.replica)

    # -- steps -----------------------------------------------------------------------------------

    async def _room(self) -> None:
        """Wait until some prefill replica has room for a prompt."""
        until = time.monotonic() + self._options.prefill_wait_s
        while not self._engines.prefill_replicas.has_room:
            if time.monotonic() >= until:
                self._client.count("refused_prefill_full")
                raise Overloaded("the KV caches of all prefill replicas are full")
            await asyncio.sleep(_ROOM_CHECK_S)

    async def _prefill(
        self, request: GenerationRequest, method: str, raw_info: Any, base_id: str
    ) -> Prefilled | ErrorResponse:
        for attempt in range(self._options.prefill_tries):
            request_id = f"{base_id}.{attempt}"
            call = getattr(self._prefill_handle, method).remote(
                prefill_request(request, request_id, attempt), raw_info
            )
            finished = False
            called_at = time.monotonic()
            try:
                response = await anext(call)
                finished = True
                replica = self._engines.prefill_replicas.take_routed(request_id)
                if not isinstance(response, ErrorResponse):
                    self._client.count("prefills")
                    self.stages.record(prefill=time.monotonic() - called_at)
                    return Prefilled(
                        request_id,
                        replica,
                        transfer_params(response) or None,
                        response.usage.prompt_tokens,
                        time.monotonic(),
                    )
                if response.error.code < 500:
                    return response
                logger.warning("prefill replica %s refused a request: %s", replica, response.error.message)
            except (*_ENGINE_LOST, StopAsyncIteration) as error:
                logger.warning("a prefill replica failed: %r", error)
            finally:
                if not finished:
                    call.cancel()
                    self._release_kv(request_id, self._engines.prefill_replicas.take_routed(request_id))
            self._client.count("prefill_retries")
            await asyncio.sleep(self._options.retry_backoff_s * 2**attempt)
        raise Overloaded(f"{self._options.prefill_tries} prefill attempts failed")

    async def _place(
        self,
        request: GenerationRequest,
        request_id: str,
        prefilled: Prefilled | None,
        domain: str | None,
        failed: list[str],
    ) -> Lease:
        placement = PlacementRequest(
            request_id,
            prompt_tokens=prefilled.prompt_tokens if prefilled else 0,
            max_new_tokens=max_new_tokens(request),
            domain=domain,
            exclude=tuple(failed),
            prompt_key=prompt_key(request),
        )
        counts = signature_of(prefilled.params or {}) if prefilled else None
        # One that has failed somewhere has used up part of its KV lease: it is placed at once.
        return await self._client.place(placement, counts, wait_s=0.0 if failed else self._options.pool_ttl_s)

    async def _decode(
        self,
        request: GenerationRequest,
        method: str,
        raw_info: Any,
        engine_id: str,
        lease: Lease,
        prefilled: Prefilled | None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the engine's chunks; an engine lost in mid-stream ends them with an error event."""
        call = getattr(self._decode_handle, method).remote(
            decode_request(request, engine_id, lease.replica, prefilled.params if prefilled else None),
            raw_info,
        )
        started = finished = False
        tokens = 0
        try:
            async for chunk in call:
                if not started:
                    started = True
                    served_by = self._engines.decode_replicas.take_routed(engine_id)
                    if served_by is not None:
                        self._client.served_by(lease.request_id, served_by)
                tokens += generated_tokens(chunk)
                self._client.progress(lease.request_id, tokens)
                yield chunk
            finished = True
        except _ENGINE_LOST as error:
            finished = True
            if not started:
                raise
            logger.warning("decode replica %s was lost in mid-stream: %r", lease.replica, error)
            self._client.count("streams_lost")
            yield _error_event("the decode engine was lost while it generated; send the request again")
        finally:
            if not finished:
                call.cancel()

    def _lease_ended(self, prefilled: Prefilled) -> bool:
        return time.monotonic() - prefilled.done_at > _LEASE_SHARE * self._options.kv_lease_s

    def _release_kv(self, request_id: str, replica: str | None) -> None:
        """Free a prompt's blocks without waiting: this also runs while a request is being cancelled."""
        if replica is None:
            return
        task = asyncio.get_running_loop().create_task(self._send_release(request_id, replica))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_release(self, request_id: str, replica: str) -> None:
        try:
            await self._engines.prefill.release_kv.remote(ReleaseKv(request_id, {REPLICA: replica}))
        except _ENGINE_LOST as error:
            logger.info("could not release KV of %s, its lease will end: %r", request_id, error)


def _engine_failed(chunk: Any) -> bool:
    """The first answer says that the engine, not the request, is at fault."""
    if isinstance(chunk, ErrorResponse):
        return bool(chunk.error.code >= 500)
    first = chunk[0] if isinstance(chunk, list) and chunk else chunk
    if not (isinstance(first, str) and first.startswith('data: {"error"')):
        return False
    try:
        return int(json.loads(first[len("data: ") :])["error"].get("code") or 500) >= 500
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


def _error_event(message: str) -> str:
    error = {"error": {"message": message, "type": "engine_lost", "code": 503}}
    return f"data: {json.dumps(error)}\n\n"
