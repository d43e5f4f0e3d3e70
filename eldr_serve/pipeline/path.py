"""The path of one request: prefill, place, decode, release, and retries of failed steps.

An answer whose engine is lost continues on another one, which recomputes the prompt and the tokens generated
so far (see continuation.py for the engine's part).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from eldr_serve.channel import Call, CallFailed, CallLate, ChannelLost
from eldr_serve.errors import Overloaded, Refused
from eldr_serve.pipeline.decode_failure import DecodeFailed, record_failure
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill_step import Health, PrefillFailed, PrefillStep
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.pipeline.request_record import Decoding, RequestRecord, Stage
from eldr_serve.pipeline.request_run import Engines, Prefilled, Run
from eldr_serve.pipeline.retry_turns import RetryTurns
from eldr_serve.pipeline.stages import Stages
from eldr_serve.queues.prefill_queue import Ticket
from eldr_serve.replicas.decode_turns import DecodeTurns
from eldr_serve.replicas.true_signature import METHOD, TrueSignature
from eldr_serve.request_fields import (
    WAITED_S,
    Generation,
    decode_header,
    error_event,
    max_new_tokens,
    needs_whole_engine,
    prompt_key,
    signature_of,
)
from eldr_serve.router.client import RouterClient
from eldr_serve.scheduling import Placement, PlacementRequest, PromptBlocks, prompt_blocks

logger = logging.getLogger(__name__)

_ROOM_CHECK_S = 0.05
_LOST = error_event("engine_lost", "the decode engine was lost while it generated; send the request again")
_NOTICE_S = 5.0  # time for a decode engine to notify the prefill engine that it has read the blocks


class RequestPath:
    """Runs the requests of one ingress on the prefill and decode deployments.

    Args:
        tokens: tokenises prompts that are placed before an engine has tokenised them.
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
        self._retries = RetryTurns(options)
        self._health = Health(engines.decode, client)
        self._decode_turns = DecodeTurns(engines.decode)
        self._background: set[asyncio.Task[Any]] = set()
        self.stages = Stages()
        self.prefill = PrefillStep(
            engines=engines,
            options=options,
            client=client,
            stages=self.stages,
            health=self._health if engines.whole else Health(engines.prefill, client),
            release=self._release_kv,
        )

    async def generate(
        self,
        request: Generation,
        record: RequestRecord | None = None,
        *,
        on_lease: Callable[[Placement], None] = lambda lease: None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the decode engine's answer: the bytes of a stream as they arrive, or of one response.

        Args:
            record: record of the request, to be filled in.
            on_lease: called with each new lease.
            on_overflow: called when the consumer is too slow and too much is buffered; the answer ends there.

        Raises:
            Overloaded: no engine could take the request; nothing was generated.
            CallFailed: an engine refuses the request itself; its status is below 500.
        """
        run = Run(request, record or RequestRecord(), on_lease, on_overflow, key=hash(request.body))
        failures = run.record.failures
        with run.record:
            while len(run.failed) < self._options.decode_tries:
                try:
                    async with aclosing(self._try(run)) as answer:
                        async for payload in answer:
                            yield payload
                    return
                except PrefillFailed as failure:
                    failures.append(f"{failure}")
                    run.failed_prefills += 1
                    run.passed_over += 1
                    if run.failed_prefills >= self._options.prefill_tries and self._engines.prefill.live:
                        break
                    self._client.count("prefill_retries")
                except DecodeFailed as failure:
                    failures.append(f"decode replica {failure.replica} failed: {failure}")
                    run.failed.append(failure.replica)
                    # If the replica is alive, the blocks may be at fault: use another prefill engine.
                    run.passed_over += failure.alive
                    run.stream_failures += run.sent and failure.begun
                    if run.sent and (run.stream_failures > 1 or not run.can_continue):
                        break
                    if not run.can_continue:
                        run.discard_answer()
                except (Refused, CallFailed) as error:
                    if not run.sent:
                        raise
                    failures.append(f"the answer could not continue on another engine: {error}")
                    break
            if not run.sent:
                tries = f"{run.failed_prefills} prefill attempts failed and {len(run.failed)} decode calls"
                raise Overloaded(f"{tries} of this request")
            self._client.count("streams_lost")
            run.record.error = "engine_lost"
            yield _LOST

    async def _try(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Make one attempt: prefill, place and decode."""
        ticket: Ticket | None = None
        try:
            async with self._retries.turn(run):
                await self._wait_for_decode()
                self._check_seats(run)
                prefilled = await self.prefill.prefilled(run) if self._splits(run.request) else None
                if run.token_ids is None and self._tokens is not None:
                    run.local_token_ids = await self._tokens.of(run.request.asked)
                if self._engines.whole:
                    ticket = await self.prefill.admit_whole(run)
                with run.record.stage("place") as placing:
                    lease = await self._place(run, prefilled)
            async with aclosing(self._answer(run, lease, prefilled, ticket, placing)) as answer:
                async for payload in answer:
                    yield payload
        finally:
            if ticket is not None:
                self.prefill.queues.leave(ticket)

    def _check_seats(self, run: Run) -> None:
        """Raise Overloaded if a new request would wait too long for a seat of a decode engine."""
        if run.is_retry:
            return
        wait_s, bound_s = self._decode_turns.wait_s(), self._options.seat_wait_s
        if wait_s > bound_s:
            self._client.count("refused_decode_backlog")
            why = f"a request would wait {wait_s:.0f} s for a decode engine's seat; {bound_s:g} s are allowed"
            # Spread over the time in which that many seats become free.
            raise Overloaded(why, retry_after_s=math.ceil(wait_s - bound_s * random.random()))

    async def _answer(
        self, run: Run, lease: Placement, prefilled: Prefilled | None, ticket: Ticket | None, placing: Stage
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer of the leased engine, then release the lease."""
        resumed = run.tokens > 0
        run.record.lease = lease
        run.on_lease(lease)
        if resumed:
            self._client.progress(run.request_id, run.tokens)
        first = True
        decoding = run.record.decode(lease.replica)
        chunks = self._decode(run, lease, prefilled, decoding, ticket)
        try:
            with decoding:
                async for payload in chunks:
                    if first:
                        first = False
                        self._first_chunk(run, prefilled, placing, decoding)
                        if resumed:
                            self._client.count("resumed")
                    if payload:
                        yield payload
        finally:
            await chunks.aclose()
            self._client.release(run.request_id)

    def _first_chunk(self, run: Run, prefilled: Prefilled | None, placing: Stage, decoding: Decoding) -> None:
        """Record the arrival of the first chunk."""
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

    def _splits(self, request: Generation) -> bool:
        return not self._engines.whole and needs_whole_engine(request.method, request.asked) is None

    async def _wait_for_decode(self) -> None:
        """Wait until some decode replica can be reached; placement raises Overloaded if none appears."""
        until = time.monotonic() + self._options.prefill_wait_s
        while not self._engines.decode.live and time.monotonic() < until:
            await asyncio.sleep(_ROOM_CHECK_S)

    async def _place(self, run: Run, prefilled: Prefilled | None) -> Placement:
        fleet = self._engines.decode
        usable = self._health.usable
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
        wait_s = 0.0 if run.failed else self._options.queue_ttl_s  # retries are not queued
        try:
            return await self._client.place(placement, counts, token_ids=run.token_ids, wait_s=wait_s)
        except BaseException:
            if prefilled is not None:
                self._release_kv(prefilled.request_id, prefilled.replica)
            raise

    def _blocks(self, run: Run) -> PromptBlocks | None:
        """Return the prompt's blocks if the decode engine also prefills."""
        if not self._engines.whole or run.token_ids is None:
            return None
        salt = run.request.cache_salt or run.request.asked.cache_salt or ""
        return prompt_blocks(run.token_ids, self._engines.decode.directory.block_tokens, salt)

    async def _decode(
        self,
        run: Run,
        lease: Placement,
        prefilled: Prefilled | None,
        decoding: Decoding,
        ticket: Ticket | None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the engine's bytes as they arrive; empty bytes if only tokens have arrived.

        From here on this call owns the prompt's blocks. When an engine has read them, the prefill engine
        reuses them at once, so no second call may name them. They are not freed while the first call may
        still read them either, since the decode engine would keep wrong data in its prefix cache.
        An engine whose channel is lost may be alive; then the blocks are freed when their lease ends.

        Raises:
            DecodeFailed: the answer is not complete.
            CallFailed: the engine refuses the request itself.
        """
        request = run.request
        header = self._decode_header(run, lease, prefilled, ticket)
        turn = self._decode_turns.enter(lease.replica, self.prefill.queues.left_s(ticket))
        call: Call | None = None
        signature: TrueSignature | None = None
        begun = ended = False
        unread = prefilled
        try:
            signature = self._true_signature(lease, run)
            call = self._engines.decode.call(lease.replica, "generate", header, request.body)
            call.on_overflow = run.on_overflow
            if request.asked.stream or prefilled is not None:  # others send only complete answers
                since = partial(self._decode_turns.since_s, turn)
                call.expect(self._options.first_token_limit_s, self._options.gap_limit_s, since=since)
            while (chunk := await call.read()) is not None:
                if not begun:
                    begun, unread = True, None
                    self._decode_turns.leave(turn, answered=True)
                    self._record_prefill(run, ticket)
                run.append_chunk(chunk)
                self._client.progress(lease.request_id, run.tokens)
                yield chunk.payload
            ended = True
            if prefilled is not None:
                decoding.transport_s = call.about.get(WAITED_S)
            if not begun:
                raise DecodeFailed("the answer was empty", lease.replica, alive=True, begun=False)
            self._health.succeeded(lease.replica)
        except (CallLate, CallFailed, ChannelLost) as error:
            ended = not isinstance(error, CallLate)
            if isinstance(error, ChannelLost) and call is not None:
                unread = None
            record_failure(run, self._health, lease.replica, error, begun=begun)
        finally:
            self._decode_turns.leave(turn, answered=ended)
            if call is not None and not ended:
                call.cancel()
            if signature is not None:
                signature.finish()
            if unread is not None:
                self._release_kv(unread.request_id, unread.replica, reader=call)

    def _decode_header(
        self, run: Run, lease: Placement, prefilled: Prefilled | None, ticket: Ticket | None
    ) -> dict[str, Any]:
        """Return the header of the decode call; assign a whole engine's prefill ticket to that engine."""
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
        if ticket is not None:
            self.prefill.queues.place(ticket, lease.replica)
            header["prompt_tokens"] = ticket.tokens
        return header

    def _record_prefill(self, run: Run, ticket: Ticket | None) -> None:
        """Record that a whole engine has computed the prompt."""
        if ticket is not None:
            known = None if run.token_ids is None else len(run.token_ids)
            self.prefill.computed(ticket, round(ticket.tokens) if known is None else known)

    def _true_signature(self, lease: Placement, run: Run) -> TrueSignature | None:
        """Report the prompt's expert counts to the router once a whole engine has prefilled it."""
        token_ids = run.token_ids
        if not self._engines.whole or token_ids is None or run.tokens:
            return None
        return TrueSignature(
            self._engines.decode.call(lease.replica, METHOD, {"id": lease.request_id}),
            lambda counts, tokens: self._client.counted(lease.request_id, token_ids, counts, tokens),
        )

    def _release_kv(self, request_id: str, replica: str, *, reader: Call | None = None) -> None:
        """Free a prompt's blocks in the background, since this also runs while a request is being cancelled.

        Args:
            reader: the decode call that may still read the blocks. When the read is over, its engine
                notifies the prefill engine, which frees them; the call may end earlier. The release is sent
                in any case, because an engine that never got the request sends no notice.
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
            logger.info("could not release KV blocks of %s; their lease will end: %s", request_id, error)
