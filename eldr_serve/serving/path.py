"""The path of one request: prefill, place, decode, release; and what happens when a step fails."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, model_validator
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from eldr_serve.renamed import renamed
from eldr_serve.routing import Placement, PlacementRequest
from eldr_serve.serving.compat import ErrorResponse
from eldr_serve.serving.errors import Overloaded
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
_LEASE_SHARE = 0.8  # of a KV lease that a wait for a worker may use up; the rest is for the pull


class PathOptions(BaseModel, frozen=True, extra="forbid"):
    """How often a step is tried, and how long a prompt's KV blocks stand."""

    prefill_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="how long a request waits while every prefill replica's KV cache is full, before it gets "
        "503, s",
    )
    prefill_tries: int = Field(
        default=3, ge=1, description="prefill calls of one request that may fail, in all, before it gets 503"
    )
    decode_tries: int = Field(
        default=3,
        ge=1,
        description="decode calls of one request before its first token; each is of a prefill of its own",
    )
    retry_backoff_s: float = Field(
        default=0.05, ge=0, description="mean wait before the first retry, s; then doubled"
    )
    kv_lease_s: float = Field(
        default=30.0, gt=0, description="how long a prefill engine keeps a finished prompt's blocks, s"
    )
    queue_ttl_s: float = Field(
        default=10.0,
        gt=0,
        description="how long a prefilled request may wait for a worker in the decode queue before "
        "it gets 503, s; less than 0.8 of kv_lease_s",
    )

    _renamed = renamed(pool_ttl_s="queue_ttl_s")

    @model_validator(mode="after")
    def _queue_within_lease(self) -> PathOptions:
        if self.queue_ttl_s >= _LEASE_SHARE * self.kv_lease_s:
            raise ValueError(
                f"queue_ttl_s is {self.queue_ttl_s:g} s, it must be less than {_LEASE_SHARE:g} of kv_lease_s "
                f"({self.kv_lease_s:g} s): a prompt's blocks must outlive its wait"
            )
        return self


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks wait on a prefill replica, for one decode call."""

    request_id: str
    replica: str | None
    params: dict[str, Any] | None
    prompt_tokens: int
    done_at: float  # time.monotonic()


@dataclass
class _Run:
    """One request on its way, and what has failed it so far."""

    request: GenerationRequest
    method: str
    raw_info: Any
    domain: str | None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prefills: int = 0  # calls, whatever came of them
    failed_prefills: int = 0
    passed_over: int = 0  # prefill replicas, from the first in the prefix's rank
    failed: list[str] = field(default_factory=list)  # decode replicas


class _DecodeFailed(Exception):  # noqa: N818
    """A decode call ended before its first token. `alive`: its replica is there and said so itself."""

    def __init__(self, reason: Any, *, alive: bool) -> None:
        super().__init__(f"{reason}")
        self.alive = alive


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
        placed: Callable[[Placement], None] = lambda lease: None,
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
        run = _Run(from_client(request), method, raw_info, domain)
        split = needs_whole_engine(run.request) is None
        for _ in range(self._options.decode_tries):
            if run.failed:
                await self._back_off(len(run.failed))
            prefilled: Prefilled | None = None
            if split:
                await self._room()
                answer = await self._prefill(run)
                if isinstance(answer, ErrorResponse):
                    yield answer
                    return
                prefilled = answer
            placing_at = time.monotonic()
            lease = await self._place(run, prefilled)
            placed(lease)
            placed_at = time.monotonic()
            stream = self._decode(run, lease, prefilled)
            try:
                first = await anext(stream)
                if prefilled is not None and not isinstance(first, ErrorResponse):
                    now = time.monotonic()
                    handed_over(now - prefilled.done_at)
                    self.stages.record(
                        place=placed_at - placing_at,
                        first_chunk=now - placed_at,
                        handover=now - prefilled.done_at,
                    )
                yield first
                async for chunk in stream:
                    yield chunk
                return
            except _DecodeFailed as failure:
                logger.warning("decode replica %s failed before a token: %s", lease.replica, failure)
                run.failed.append(lease.replica)
                # If the replica is alive, the blocks may be at fault: let another engine prefill.
                run.passed_over += failure.alive
            finally:
                await stream.aclose()
                self._client.release(run.request_id)
        raise Overloaded(f"{len(run.failed)} decode replicas failed this request")

    # -- steps -----------------------------------------------------------------------------------

    async def _back_off(self, failures: int) -> None:
        """Wait before a retry, not in step with the others that failed at the same time."""
        await asyncio.sleep(self._options.retry_backoff_s * 2 ** (failures - 1) * random.uniform(0.5, 1.5))

    async def _room(self) -> None:
        """Wait until some prefill replica has room for a prompt."""
        until = time.monotonic() + self._options.prefill_wait_s
        while not self._engines.prefill_replicas.has_room:
            if time.monotonic() >= until:
                self._client.count("refused_prefill_full")
                raise Overloaded("the KV caches of all prefill replicas are full")
            await asyncio.sleep(_ROOM_CHECK_S)

    async def _prefill(self, run: _Run) -> Prefilled | ErrorResponse:
        """The prompt's blocks, or why the request itself is at fault."""
        while (answer := await self._try_prefill(run)) is None:
            run.passed_over += 1
            run.failed_prefills += 1
            if run.failed_prefills >= self._options.prefill_tries:
                raise Overloaded(f"{run.failed_prefills} prefill attempts failed")
            self._client.count("prefill_retries")
            await self._back_off(run.failed_prefills)
        return answer

    async def _try_prefill(self, run: _Run) -> Prefilled | ErrorResponse | None:
        """One prefill call; None if the engine, not the request, is at fault."""
        request_id = f"{run.request_id}-p{run.prefills}"
        run.prefills += 1
        call = getattr(self._prefill_handle, run.method).remote(
            prefill_request(run.request, request_id, run.passed_over), run.raw_info
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
        return None

    async def _place(self, run: _Run, prefilled: Prefilled | None) -> Placement:
        placement = PlacementRequest(
            run.request_id,
            None,
            prompt_tokens=prefilled.prompt_tokens if prefilled else 0,
            max_new_tokens=max_new_tokens(run.request),
            domain=run.domain,
            exclude=tuple(run.failed),
            prompt_key=prompt_key(run.request),
        )
        counts = signature_of(prefilled.params or {}) if prefilled else None
        wait_s = 0.0 if run.failed else self._options.queue_ttl_s  # a request is queued once
        try:
            return await self._client.place(placement, counts, wait_s=wait_s)
        except BaseException:
            if prefilled is not None:
                self._release_kv(prefilled.request_id, prefilled.replica)
            raise

    async def _decode(
        self, run: _Run, lease: Placement, prefilled: Prefilled | None
    ) -> AsyncGenerator[Any, None]:
        """Yield the engine's chunks; an engine lost in mid-stream ends them with an error event.

        From here on the prompt's blocks are this call's. An engine that reads them tells the prefill
        engine, which gives them to other prompts at once, so no second call may ever name them. Nor are
        they freed while the first one may still read them: it would keep what it finds in its prefix cache.

        Raises:
            _DecodeFailed: there is no first token.
        """
        engine_id = f"{run.request_id}-d{len(run.failed)}"
        call = getattr(self._decode_handle, run.method).remote(
            decode_request(run.request, engine_id, lease.replica, prefilled.params if prefilled else None),
            run.raw_info,
        )
        started = ended = False
        tokens = 0
        unread = prefilled
        try:
            async for chunk in call:
                if not started:
                    code = _error_code(chunk)
                    if code >= 500:
                        raise _DecodeFailed(chunk, alive=True)
                    started = True
                    if not code:
                        unread = None
                    served_by = self._engines.decode_replicas.take_routed(engine_id)
                    if served_by is not None:
                        self._client.served_by(lease.request_id, served_by)
                tokens += generated_tokens(chunk)
                self._client.progress(lease.request_id, tokens)
                yield chunk
            ended = True
            if not started:
                raise _DecodeFailed("it answered nothing", alive=True)
        except _ENGINE_LOST as error:
            ended = True
            if isinstance(error, ActorUnavailableError):
                unread = None  # it may live and read them yet: their lease frees them
            if not started:
                raise _DecodeFailed(repr(error), alive=isinstance(error, RayTaskError)) from error
            logger.warning("decode replica %s was lost in mid-stream: %r", lease.replica, error)
            self._client.count("streams_lost")
            yield _error_event("the decode engine was lost while it generated; send the request again")
        finally:
            if not ended:
                call.cancel()
            if unread is not None:
                self._release_kv(unread.request_id, unread.replica, reader=None if ended else call)

    def _release_kv(self, request_id: str, replica: str | None, *, reader: Any = None) -> None:
        """Free a prompt's blocks without waiting: this also runs while a request is being cancelled.

        Args:
            reader: the cancelled decode call that may still read them; they are freed when it has ended.
        """
        if replica is None:
            return
        task = asyncio.get_running_loop().create_task(self._send_release(request_id, replica, reader))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_release(self, request_id: str, replica: str, reader: Any) -> None:
        try:
            if reader is not None:
                await _end_of(reader)
            await self._engines.prefill.release_kv.remote(ReleaseKv(request_id, {REPLICA: replica}))
        except _ENGINE_LOST as error:
            logger.info("could not release KV of %s, its lease will end: %r", request_id, error)


async def _end_of(call: Any) -> None:
    """Wait until a cancelled call has ended; ActorUnavailableError if nobody knows whether it has."""
    try:
        async for _ in call:
            pass
    except ActorUnavailableError:
        raise
    except _ENGINE_LOST:
        pass


def _error_code(chunk: Any) -> int:
    """The HTTP status of an answer that is an error, 0 for any other."""
    if isinstance(chunk, ErrorResponse):
        return int(chunk.error.code)
    first = chunk[0] if isinstance(chunk, list) and chunk else chunk
    if not (isinstance(first, str) and first.startswith('data: {"error"')):
        return 0
    try:
        return int(json.loads(first[len("data: ") :])["error"].get("code") or 500)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 500


def _error_event(message: str) -> str:
    error = {"error": {"message": message, "type": "engine_lost", "code": 503}}
    return f"data: {json.dumps(error)}\n\n"
