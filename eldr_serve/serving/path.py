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

import msgspec
from pydantic import BaseModel, Field, model_validator

from eldr_serve.channel import Call, CallFailed, ChannelLost
from eldr_serve.renamed import renamed
from eldr_serve.routing import Placement, PlacementRequest
from eldr_serve.routing.prefill import choose_prefill
from eldr_serve.serving.errors import Overloaded
from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.stages import Stages
from eldr_serve.serving.wire import (
    Generation,
    decode_header,
    max_new_tokens,
    needs_whole_engine,
    prefill_header,
    prompt_head,
    prompt_key,
    signature_of,
)

logger = logging.getLogger(__name__)

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
class Engines:
    """The two deployments of an application."""

    prefill: Fleet
    decode: Fleet
    max_load_ratio: float = 1.25  # a prefill replica above this times the mean load is passed over


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks wait on a prefill replica, for one decode call."""

    request_id: str
    replica: str
    params: dict[str, Any]
    prompt_tokens: int
    token_ids: bytes  # uint32
    done_at: float  # time.monotonic()


@dataclass
class _Run:
    """One request on its way, and what has failed it so far."""

    request: Generation
    cut_off: Callable[[], None]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prefills: int = 0  # calls, whatever came of them
    failed_prefills: int = 0
    passed_over: int = 0  # prefill replicas, from the first in the prefix's rank
    failed: list[str] = field(default_factory=list)  # decode replicas


async def prefill_answer(call: Call) -> Any:
    """What a prefill call says of the prompt (see engine_calls.prefill); ChannelLost if it says nothing."""
    chunk = await call.read()
    if chunk is None:
        raise ChannelLost("it answered nothing")
    return msgspec.msgpack.decode(chunk.payload)


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
        self._client = client
        self._options = options
        self._background: set[asyncio.Task[Any]] = set()
        self.stages = Stages()

    async def generate(
        self,
        request: Generation,
        *,
        placed: Callable[[Placement], None] = lambda lease: None,
        handed_over: Callable[[float], None] = lambda seconds: None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield what the decode engine answers: bytes of a stream as they come, or of one response.

        Args:
            placed: told of each lease as it is made.
            handed_over: told the time from the end of prefill to the first answer of decode, s.
            cut_off: called when too much waits for whoever iterates over this; nothing more will come.

        Raises:
            Overloaded: no engine could take the request; nothing was generated.
            CallFailed: an engine refuses the request itself; its status is below 500.
        """
        run = _Run(request, cut_off)
        split = needs_whole_engine(request.method, request.asked) is None
        for _ in range(self._options.decode_tries):
            if run.failed:
                await self._back_off(len(run.failed))
            prefilled: Prefilled | None = None
            if split:
                await self._room()
                prefilled = await self._prefill(run)
            placing_at = time.monotonic()
            lease = await self._place(run, prefilled)
            placed(lease)
            placed_at = time.monotonic()
            stream = self._decode(run, lease, prefilled)
            try:
                first = await anext(stream)
                if prefilled is not None:
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
        while not self._with_room():
            if time.monotonic() >= until:
                self._client.count("refused_prefill_full")
                why = "the KV caches of all prefill replicas are full"
                raise Overloaded(why if self._engines.prefill.live else "no prefill replica can be reached")
            await asyncio.sleep(_ROOM_CHECK_S)

    def _with_room(self) -> list[str]:
        fleet = self._engines.prefill
        return fleet.directory.budget.with_room(fleet.live)

    async def _prefill(self, run: _Run) -> Prefilled:
        """The prompt's blocks; CallFailed if the request itself is at fault."""
        while (found := await self._try_prefill(run)) is None:
            run.passed_over += 1
            run.failed_prefills += 1
            if run.failed_prefills >= self._options.prefill_tries:
                raise Overloaded(f"{run.failed_prefills} prefill attempts failed")
            self._client.count("prefill_retries")
            await self._back_off(run.failed_prefills)
        return found

    async def _try_prefill(self, run: _Run) -> Prefilled | None:
        """One prefill call; None if the engine, not the request, is at fault."""
        request, fleet = run.request, self._engines.prefill
        request_id = f"{run.request_id}-p{run.prefills}"
        run.prefills += 1
        in_flight = fleet.in_flight
        candidates = self._with_room() or list(in_flight)
        if not candidates:
            return None
        replica = choose_prefill(
            prompt_head(request.asked),
            {name: in_flight[name] for name in candidates},
            max_load_ratio=self._engines.max_load_ratio,
            attempt=run.passed_over,
        )
        called_at = time.monotonic()
        call: Call | None = None
        try:
            header = prefill_header(request.method, request_id, request.headers)
            call = fleet.call(replica, "prefill", header, request.body)
            found = await prefill_answer(call)
            self._client.count("prefills")
            self.stages.record(prefill=time.monotonic() - called_at)
            return Prefilled(
                request_id, replica, found["kv"], found["tokens"], found["token_ids"], time.monotonic()
            )
        except CallFailed as error:
            if error.status < 500:
                raise
            logger.warning("prefill replica %s failed a request: %s", replica, error)
        except ChannelLost as error:
            logger.warning("prefill replica %s was lost: %s", replica, error)
        except BaseException:
            if call is not None:
                call.cancel()
                self._release_kv(request_id, replica)
            raise
        return None

    async def _place(self, run: _Run, prefilled: Prefilled | None) -> Placement:
        placement = PlacementRequest(
            run.request_id,
            None,
            prompt_tokens=prefilled.prompt_tokens if prefilled else 0,
            max_new_tokens=max_new_tokens(run.request.asked),
            domain=run.request.domain,
            exclude=tuple(run.failed),
            prompt_key=prompt_key(run.request.asked),
        )
        counts = signature_of(prefilled.params) if prefilled else None
        wait_s = 0.0 if run.failed else self._options.queue_ttl_s  # a request is queued once
        try:
            return await self._client.place(placement, counts, wait_s=wait_s)
        except BaseException:
            if prefilled is not None:
                self._release_kv(prefilled.request_id, prefilled.replica)
            raise

    async def _decode(
        self, run: _Run, lease: Placement, prefilled: Prefilled | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the engine's bytes; an engine lost in mid-stream ends them with an error event.

        From here on the prompt's blocks are this call's. An engine that reads them tells the prefill
        engine, which gives them to other prompts at once, so no second call may ever name them. Nor are
        they freed while the first one may still read them: it would keep what it finds in its prefix cache.
        An engine whose channel is lost may be alive; then the blocks' lease frees them.

        Raises:
            _DecodeFailed: there is no first token.
            CallFailed: the engine refuses the request itself.
        """
        request = run.request
        header = decode_header(
            request.method,
            f"{run.request_id}-d{len(run.failed)}",
            prefilled.params if prefilled else None,
            prefilled.token_ids if prefilled else b"",
            request.headers,
        )
        call: Call | None = None
        tokens = 0
        begun = ended = False
        unread = prefilled
        try:
            call = self._engines.decode.call(lease.replica, "generate", header, request.body)
            call.on_overflow = run.cut_off
            while (chunk := await call.read()) is not None:
                begun, unread = True, None
                tokens += chunk.tokens
                self._client.progress(lease.request_id, tokens)
                yield chunk.payload
            ended = True
            if not begun:
                raise _DecodeFailed("it answered nothing", alive=True)
        except CallFailed as error:
            ended = True
            if not begun and error.status < 500:
                raise
            if not begun:
                raise _DecodeFailed(error, alive=True) from error
            yield self._lost(lease, error)
        except ChannelLost as error:
            ended = True
            if call is not None:
                unread = None
            if not begun:
                raise _DecodeFailed(error, alive=False) from error
            yield self._lost(lease, error)
        finally:
            if call is not None and not ended:
                call.cancel()
            if unread is not None:
                self._release_kv(unread.request_id, unread.replica, reader=None if ended else call)

    def _lost(self, lease: Placement, error: Exception) -> bytes:
        """The event that ends a stream whose engine is gone."""
        logger.warning("decode replica %s was lost in mid-stream: %s", lease.replica, error)
        self._client.count("streams_lost")
        message = "the decode engine was lost while it generated; send the request again"
        body = {"error": {"message": message, "type": "engine_lost", "code": 503}}
        return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()

    def _release_kv(self, request_id: str, replica: str, *, reader: Call | None = None) -> None:
        """Free a prompt's blocks without waiting: this also runs while a request is being cancelled.

        Args:
            reader: the cancelled decode call that may still read them; they are freed when it has ended.
        """
        task = asyncio.get_running_loop().create_task(self._send_release(request_id, replica, reader))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_release(self, request_id: str, replica: str, reader: Call | None) -> None:
        try:
            if reader is not None:
                await reader.end()
            await self._engines.prefill.call(replica, "release", {"id": request_id}).end()
        except ChannelLost as error:
            logger.info("could not release KV of %s, its lease will end: %s", request_id, error)
