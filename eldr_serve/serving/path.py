"""The path of one request: prefill, place, decode, release; and what happens when a step fails.

An answer whose engine is lost goes on at another one, which computes the prompt and the tokens generated so
far anew (see continuation.py for the engine's part).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from eldr_serve.channel import Call, CallFailed, CallLate, ChannelLost, Chunk
from eldr_serve.errors import Overloaded, Refused
from eldr_serve.routing import Placement, PlacementRequest, PromptBlocks, prompt_blocks
from eldr_serve.routing.prefill import choose_prefill
from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.outliers import Outliers
from eldr_serve.serving.prompt_tokens import PromptTokens
from eldr_serve.serving.rate import Rate
from eldr_serve.serving.request_record import Decoding, RequestRecord, Stage
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.stages import Stages
from eldr_serve.serving.true_signature import METHOD, TrueSignature
from eldr_serve.serving.wire import (
    WAITED_S,
    Generation,
    created_at,
    decode_header,
    error_event,
    is_end,
    max_new_tokens,
    needs_whole_engine,
    prefill_header,
    prompt_head,
    prompt_key,
    signature_of,
)

logger = logging.getLogger(__name__)

_ROOM_CHECK_S = 0.05
_LOST = error_event("engine_lost", "the decode engine was lost while it generated; send the request again")
_NOTICE_S = 5.0  # for a decode engine to tell the prefill engine that it reads a prompt's blocks no longer
_LEASE_SHARE = 0.8  # of a KV lease that a wait for a worker may use up; the rest is for the pull


class PathOptions(BaseModel, frozen=True, extra="forbid"):
    """How often a step is tried, and how long a prompt's KV blocks stand."""

    prefill_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="how long a request waits while every prefill replica's KV cache is full, or no decode "
        "replica can be reached, before it gets 503, s",
    )
    prefill_tries: int = Field(
        default=3, ge=1, description="prefill calls of one request that may fail, in all, before it gets 503"
    )
    decode_tries: int = Field(
        default=3,
        ge=1,
        description="decode calls of one request before its first token; each is of a prefill of its own",
    )
    retries_at_once: int = Field(
        default=64,
        ge=1,
        description="requests that one ingress has prefilled and placed again at once, after an engine has "
        "failed them or was lost; more wait",
    )
    retry_wait_s: float = Field(
        default=10.0, ge=0, description="how long such a request waits for its turn before it is given up, s"
    )
    prefill_limit_s: float = Field(
        default=60.0, gt=0, description="a prefill call that takes longer has failed, s"
    )
    first_token_limit_s: float = Field(
        default=60.0, gt=0, description="so has a decode call without a token for longer, s"
    )
    gap_limit_s: float = Field(
        default=15.0, gt=0, description="so has one without a further token for longer, s"
    )
    stall_limit_s: float = Field(
        default=10.0,
        gt=0,
        description="an engine whose core finishes no step for longer, though it has calls, is taken as lost "
        "until it does, s; more than the longest step takes, a compilation in it included. Before its first "
        "answer to a client there is no limit",
    )
    whole_per_s: float = Field(
        default=8.0,
        ge=0,
        description="requests a second that one ingress sends whole to decode engines while it reaches no "
        "prefill replica; more wait as for a full KV cache",
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
    """The two deployments of an application; where decode engines are whole, `prefill` has no replicas."""

    prefill: Fleet
    decode: Fleet
    max_load_ratio: float = 1.25  # a prefill replica above this times the mean load is passed over
    whole: bool = False  # decode engines prefill too


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks wait on a prefill replica, for one decode call."""

    request_id: str
    replica: str
    params: dict[str, Any]
    done_at: float  # time.monotonic()


@dataclass
class _Run:
    """One request on its way, what has come of it, and what has failed it so far."""

    request: Generation
    record: RequestRecord
    placed: Callable[[Placement], None]
    cut_off: Callable[[], None]
    prefills: int = 0  # calls, whatever came of them
    failed_prefills: int = 0
    passed_over: int = 0  # prefill replicas, from the first in the prefix's rank
    failed: list[str] = field(default_factory=list)  # decode replicas
    cuts: int = 0  # of them after the client had got some of the answer
    prompt: bytes = b""  # uint32 ids, once a prefill engine has told them
    foreseen: NDArray[np.uint32] | None = None  # the prompt's ids where no prefill engine tells them
    tokens: int = 0  # generated
    ids: bytearray = field(default_factory=bytearray)  # uint32, of those tokens whose engine told them
    sent: bool = False  # the client has got some of the answer
    ended: bool = False  # it has got all of it
    created: int | None = None  # the time in its chunks, s since 1970

    def took(self, chunk: Chunk) -> None:
        """The next part of the answer has come."""
        self.tokens += chunk.tokens
        self.ids += chunk.ids
        if not chunk.payload:
            return
        if not self.sent and self.request.asked.stream:
            self.created = created_at(chunk.payload)
        self.sent = True
        self.ended = not self.request.asked.stream or is_end(chunk.payload)

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def can_go_on(self) -> bool:
        """Another engine can go on after the last token."""
        return 0 < 4 * self.tokens == len(self.ids)

    @property
    def token_ids(self) -> NDArray[np.uint32] | None:
        """uint32[n] of the prompt, as far as they are known before it is decoded."""
        return np.frombuffer(self.prompt, np.uint32) if self.prompt else self.foreseen

    def start_again(self) -> None:
        """Nothing that has come is of any use."""
        self.tokens, self.ids = 0, bytearray()


async def prefill_answer(call: Call) -> Any:
    """What a prefill call says of the prompt (see PrefillServer.answer); ChannelLost if it says nothing."""
    chunk = await call.read()
    if chunk is None:
        raise ChannelLost("it answered nothing")
    return msgspec.msgpack.decode(chunk.payload)


class _PrefillFailed(Exception):  # noqa: N818
    """A prefill call has failed, and the request is not at fault."""


class _DecodeFailed(Exception):  # noqa: N818
    """A decode call has ended before its answer.

    Attributes:
        replica: its replica.
        alive: that is there, and said so itself.
        begun: some of the answer had come by this call.
    """

    def __init__(self, reason: Any, replica: str, *, alive: bool, begun: bool) -> None:
        super().__init__(f"{reason}")
        self.replica = replica
        self.alive = alive
        self.begun = begun


class RequestPath:
    """Runs requests of one ingress over the prefill and the decode deployment.

    Args:
        tokens: of prompts, where they must be placed before an engine has tokenised them.
    """

    def __init__(
        self,
        *,
        engines: Engines,
        client: RouterClient,
        options: PathOptions,
        tokens: PromptTokens | None = None,
    ) -> None:
        self._engines = engines
        self._client = client
        self._options = options
        self._tokens = tokens
        self._retries = asyncio.Semaphore(options.retries_at_once)
        self._outliers = {fleet: Outliers() for fleet in (engines.prefill, engines.decode)}
        self._whole = Rate(options.whole_per_s)
        self._background: set[asyncio.Task[Any]] = set()
        self.stages = Stages()

    async def generate(
        self,
        request: Generation,
        record: RequestRecord | None = None,
        *,
        placed: Callable[[Placement], None] = lambda lease: None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield what the decode engine answers: bytes of a stream as they come, or of one response.

        Args:
            record: what becomes of the request is written there.
            placed: told of each lease as it is made.
            cut_off: called when too much waits for whoever iterates over this; nothing more will come.

        Raises:
            Overloaded: no engine could take the request; nothing was generated.
            CallFailed: an engine refuses the request itself; its status is below 500.
        """
        run = _Run(request, record or RequestRecord(), placed, cut_off)
        failures = run.record.failures
        with run.record:
            while len(run.failed) < self._options.decode_tries:
                try:
                    async with aclosing(self._try(run)) as answer:
                        async for payload in answer:
                            yield payload
                    return
                except _PrefillFailed as failure:
                    failures.append(f"{failure}")
                    run.failed_prefills += 1
                    run.passed_over += 1
                    if run.failed_prefills >= self._options.prefill_tries and self._engines.prefill.live:
                        break
                    self._client.count("prefill_retries")
                except _DecodeFailed as failure:
                    failures.append(f"decode replica {failure.replica} failed it: {failure}")
                    run.failed.append(failure.replica)
                    # If the replica is alive, the blocks may be at fault: let another engine prefill.
                    run.passed_over += failure.alive
                    run.cuts += run.sent and failure.begun
                    if run.sent and (run.cuts > 1 or not run.can_go_on):
                        break
                    if not run.can_go_on:
                        run.start_again()
                except (Refused, CallFailed) as error:
                    if not run.sent:
                        raise
                    failures.append(f"it could not go on elsewhere: {error}")
                    break
            if not run.sent:
                tries = f"{run.failed_prefills} prefill attempts failed and {len(run.failed)} decode calls"
                raise Overloaded(f"{tries} of this request")
            self._client.count("streams_lost")
            run.record.error = "engine_lost"
            yield _LOST

    async def _try(self, run: _Run) -> AsyncGenerator[bytes, None]:
        """One decode call, with a prefill of its own."""
        resumed = run.tokens > 0
        async with self._turn(run):
            await self._decode_reached()
            prefilled = await self._prefilled(run) if self._splits(run.request) else None
            if run.token_ids is None and self._tokens is not None:
                run.foreseen = await self._tokens.of(run.request.asked)
            with run.record.stage("place") as placing:
                lease = await self._place(run, prefilled)
        run.record.lease = lease
        run.placed(lease)
        if resumed:
            self._client.progress(run.request_id, run.tokens)
        first = True
        decoding = run.record.decode(lease.replica)
        chunks = self._decode(run, lease, prefilled, decoding)
        try:
            with decoding:
                async for payload in chunks:
                    if first:
                        first = False
                        self._begun(run, prefilled, placing, decoding)
                        if resumed:
                            self._client.count("resumed")
                    if payload:
                        yield payload
        finally:
            await chunks.aclose()
            self._client.release(run.request_id)

    def _begun(self, run: _Run, prefilled: Prefilled | None, placing: Stage, decoding: Decoding) -> None:
        """The first chunk has come."""
        decoding.first_s = now = time.monotonic()
        if run.request.asked.stream:
            run.record.status = 200
        if prefilled is not None:
            run.record.handover_s = now - prefilled.done_at
            self.stages.record(
                place=placing.seconds,
                first_token=now - decoding.begun_s,
                handover=run.record.handover_s,
            )

    # -- steps -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self, run: _Run) -> AsyncIterator[None]:
        """When a request may be tried: many are tried again when an engine is lost, a few at once."""
        failures = len(run.failed) + run.failed_prefills
        if not failures:
            yield
            return
        # Not in step with the others that failed at the same time.
        await asyncio.sleep(self._options.retry_backoff_s * 2 ** (failures - 1) * random.uniform(0.5, 1.5))
        try:
            async with asyncio.timeout(self._options.retry_wait_s):
                await self._retries.acquire()
        except TimeoutError:
            raise Overloaded("too many requests have lost their engine") from None
        try:
            yield
        finally:
            self._retries.release()

    def _splits(self, request: Generation) -> bool:
        return not self._engines.whole and needs_whole_engine(request.method, request.asked) is None

    async def _room(self) -> bool:
        """Wait until some prefill replica has room; False if none can be reached and it goes without.

        Those who go without do so in the order in which they came.
        """
        until_s, turn_s = time.monotonic() + self._options.prefill_wait_s, None
        try:
            while not self._with_room():
                now_s, reached = time.monotonic(), bool(self._engines.prefill.live)
                if turn_s is None and not reached:
                    after_s = self._whole.reserve(max(0.0, until_s - now_s))
                    turn_s = None if after_s is None else now_s + after_s
                if turn_s is not None and now_s >= turn_s and not reached:
                    turn_s = None  # it is taken
                    return False
                if now_s >= until_s:
                    why = "the KV caches of all prefill replicas are full"
                    raise Overloaded(why if reached else "no prefill replica can be reached")
                await asyncio.sleep(_ROOM_CHECK_S)
            return True
        finally:
            if turn_s is not None:
                self._whole.give_back()

    async def _decode_reached(self) -> None:
        """Wait until some decode replica can be reached; who places without one says so."""
        until = time.monotonic() + self._options.prefill_wait_s
        while not self._engines.decode.live and time.monotonic() < until:
            await asyncio.sleep(_ROOM_CHECK_S)

    def _with_room(self) -> list[str]:
        fleet = self._engines.prefill
        return fleet.directory.budget.with_room(self._outliers[fleet].usable(fleet.live))

    async def _prefilled(self, run: _Run) -> Prefilled | None:
        """As `_prefill`; an answer that has begun goes on whole where prefill does not take it again."""
        try:
            return await self._prefill(run)
        except (Overloaded, CallFailed, _PrefillFailed) as error:
            if run.tokens:
                run.record.failures.append(f"it goes on whole: {error}")
                self._client.count("whole_without_prefill")
                return None
            if isinstance(error, Overloaded):
                self._client.count("refused_prefill_full")
            raise

    async def _prefill(self, run: _Run) -> Prefilled | None:
        """The prompt's blocks; None if a decode engine is to compute it.

        Raises:
            Overloaded: no engine has room, or none can be reached.
            _PrefillFailed: the engine is at fault.
            CallFailed: the request is.
        """
        if not await self._room():
            self._client.count("whole_without_prefill")
            return None
        request, fleet = run.request, self._engines.prefill
        request_id = f"{run.request_id}-p{run.prefills}"
        run.prefills += 1
        in_flight = fleet.in_flight
        replica = choose_prefill(
            prompt_head(request.asked),
            {name: in_flight[name] for name in self._with_room()},
            max_load_ratio=self._engines.max_load_ratio,
            attempt=run.passed_over,
        )
        call: Call | None = None
        try:
            header = prefill_header(
                request.method, request_id, request.headers, request.cache_salt, generated=bytes(run.ids)
            )
            with run.record.stage("prefill", replica) as stage:
                call = fleet.call(replica, "prefill", header, request.body)
                call.expect(self._options.prefill_limit_s, self._options.prefill_limit_s)
                found = await prefill_answer(call)
        except CallFailed as error:
            if error.status < 500:
                raise
            self._judge(fleet, replica, error)
            raise _PrefillFailed(f"prefill replica {replica} failed it: {error}") from error
        except ChannelLost as error:
            raise _PrefillFailed(f"prefill replica {replica} was lost: {error}") from error
        except BaseException as error:
            if call is not None:
                call.cancel()
                self._release_kv(request_id, replica)
            if not isinstance(error, CallLate):
                raise
            self._judge(fleet, replica, error)
            raise _PrefillFailed(f"prefill replica {replica} took too long") from error
        self._outliers[fleet].succeeded(replica)
        run.prompt = found["token_ids"]
        self._client.count("prefills")
        self.stages.record(prefill=stage.seconds)
        return Prefilled(request_id, replica, found["kv"], stage.ended_s)

    def _judge(self, fleet: Fleet, replica: str, error: Exception) -> None:
        """A replica that only says that it is full is well."""
        full = isinstance(error, CallFailed) and error.status == 503
        if not full and self._outliers[fleet].failed(replica):
            logger.warning("replica %s fails again and again and is set aside for a while", replica)
            self._client.count("set_aside")

    async def _place(self, run: _Run, prefilled: Prefilled | None) -> Placement:
        fleet = self._engines.decode
        usable = self._outliers[fleet].usable(fleet.live)
        placement = PlacementRequest(
            run.request_id,
            None,
            prompt_tokens=len(run.token_ids) if run.token_ids is not None else 0,
            max_new_tokens=max_new_tokens(run.request.asked),
            domain=run.request.domain,
            blocks=self._blocks(run),
            exclude=(*run.failed, *(name for name in fleet.live if name not in usable)),
            prompt_key=prompt_key(run.request.asked),
            tenant=run.request.tenant,
            priority=run.request.priority,
        )
        counts = signature_of(prefilled.params) if prefilled else None
        wait_s = 0.0 if run.failed else self._options.queue_ttl_s  # a request is queued once
        try:
            return await self._client.place(placement, counts, token_ids=run.token_ids, wait_s=wait_s)
        except BaseException:
            if prefilled is not None:
                self._release_kv(prefilled.request_id, prefilled.replica)
            raise

    def _blocks(self, run: _Run) -> PromptBlocks | None:
        """Of the prompt, where the engine that decodes it prefills it too."""
        if not self._engines.whole or run.token_ids is None:
            return None
        salt = run.request.cache_salt or run.request.asked.cache_salt or ""
        return prompt_blocks(run.token_ids, self._engines.decode.directory.block_tokens, salt)

    async def _decode(
        self, run: _Run, lease: Placement, prefilled: Prefilled | None, decoding: Decoding
    ) -> AsyncGenerator[bytes, None]:
        """Yield the engine's bytes as they come; none where only tokens have come.

        From here on the prompt's blocks are this call's. An engine that reads them tells the prefill
        engine, which gives them to other prompts at once, so no second call may ever name them. Nor are
        they freed while the first one may still read them: it would keep what it finds in its prefix cache.
        An engine whose channel is lost may be alive; then the blocks' lease frees them.

        Raises:
            _DecodeFailed: the answer has not ended.
            CallFailed: the engine refuses the request itself.
        """
        request = run.request
        header = decode_header(
            request.method,
            run.request_id,
            prefilled.params if prefilled else None,
            run.prompt,
            request.headers,
            request.cache_salt,
            generated=bytes(run.ids),
            created=run.created,
            domain=request.domain,
        )
        call: Call | None = None
        signature: TrueSignature | None = None
        begun = ended = False
        unread = prefilled
        try:
            if self._engines.whole and run.token_ids is not None and not run.tokens:
                signature = self._true_signature(lease, run.token_ids)
            call = self._engines.decode.call(lease.replica, "generate", header, request.body)
            call.on_overflow = run.cut_off
            if request.asked.stream or prefilled is not None:  # others say nothing before their end
                call.expect(self._options.first_token_limit_s, self._options.gap_limit_s)
            while (chunk := await call.read()) is not None:
                begun, unread = True, None
                run.took(chunk)
                self._client.progress(lease.request_id, run.tokens)
                yield chunk.payload
            ended = True
            if prefilled is not None:
                decoding.transport_s = call.about.get(WAITED_S)
            if not begun:
                raise _DecodeFailed("it answered nothing", lease.replica, alive=True, begun=False)
            self._outliers[self._engines.decode].succeeded(lease.replica)
        except CallLate as error:
            self._judge(self._engines.decode, lease.replica, error)
            if not run.ended:
                # Before its first token the blocks may be at fault.
                raise _DecodeFailed(error, lease.replica, alive=not begun, begun=begun) from error
        except CallFailed as error:
            ended = True
            if not run.sent and not begun and error.status < 500:
                raise
            self._judge(self._engines.decode, lease.replica, error)
            if not run.ended:
                raise _DecodeFailed(error, lease.replica, alive=True, begun=begun) from error
        except ChannelLost as error:
            ended = True
            if call is not None:
                unread = None
            if not run.ended:
                raise _DecodeFailed(error, lease.replica, alive=False, begun=begun) from error
        finally:
            if call is not None and not ended:
                call.cancel()
            if signature is not None:
                signature.over()
            if unread is not None:
                self._release_kv(unread.request_id, unread.replica, reader=call)

    def _true_signature(self, lease: Placement, token_ids: NDArray[np.uint32]) -> TrueSignature:
        """The router is told what the prompt uses once its engine has prefilled it."""
        return TrueSignature(
            self._engines.decode.call(lease.replica, METHOD, {"id": lease.request_id}),
            lambda counts, tokens: self._client.counted(lease.request_id, token_ids, counts, tokens),
        )

    def _release_kv(self, request_id: str, replica: str, *, reader: Call | None = None) -> None:
        """Free a prompt's blocks without waiting: this also runs while a request is being cancelled.

        Args:
            reader: the decode call that may still read them. Its engine tells the prefill engine, which frees
                them, when the read is over, though the call may end before that; only an engine that has
                not got the request tells nothing.
        """
        task = asyncio.get_running_loop().create_task(self._send_release(request_id, replica, reader))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send_release(self, request_id: str, replica: str, reader: Call | None) -> None:
        try:
            if reader is not None:
                await reader.end()
                await asyncio.sleep(_NOTICE_S)
            await self._engines.prefill.call(replica, "release", {"id": request_id}).end()
        except ChannelLost as error:
            logger.info("could not release KV of %s, its lease will end: %s", request_id, error)
