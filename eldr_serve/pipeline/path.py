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
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from eldr_serve.channel import Call, CallFailed, CallLate, ChannelLost
from eldr_serve.engine.calls import WAITED_S, decode_header, error_event, expert_counts_of
from eldr_serve.errors import Overloaded, Refused
from eldr_serve.pipeline.decode_failure import DecodeFailed, record_failure
from eldr_serve.pipeline.engines import Engines, HeldPrompt
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill_step import PrefillFailed, PrefillStep
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.retry_turns import RetryTurns
from eldr_serve.pipeline.stage import DecodeStages, Stage
from eldr_serve.pipeline.stage_latencies import StageLatencies
from eldr_serve.queues.prefill_queue import Ticket
from eldr_serve.replicas.decode_turns import DecodeTurns
from eldr_serve.replicas.measured_counts import METHOD, MeasuredCounts
from eldr_serve.replicas.outliers import ReplicaHealth
from eldr_serve.request import Request, max_new_tokens, needs_whole_engine, prompt_key
from eldr_serve.router.client import RouterClient
from eldr_serve.scheduling import Lease, PlacementRequest, PromptBlocks, prompt_blocks

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
        self._health = ReplicaHealth(engines.decode, client.count)
        self._decode_turns = DecodeTurns(engines.decode)
        self._background: set[asyncio.Task[Any]] = set()
        self.stage_latencies = StageLatencies()
        self.prefill = PrefillStep(
            engines=engines,
            options=options,
            client=client,
            stage_latencies=self.stage_latencies,
            health=self._health if engines.whole else ReplicaHealth(engines.prefill, client.count),
            release=self._release_kv,
        )

    async def generate(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Yield the decode engine's answer: the bytes of a stream as they arrive, or of one response.

        Raises:
            Overloaded: no engine could take the request; nothing was generated.
            CallFailed: an engine refuses the request itself; its status is below 500.
        """
        failures = context.failure_messages
        with context:
            while len(context.failed_replicas) < self._options.decode_tries:
                try:
                    async with aclosing(self._try(context)) as answer:
                        async for payload in answer:
                            yield payload
                    return
                except PrefillFailed as failure:
                    failures.append(f"{failure}")
                    context.failed_prefills += 1
                    context.passed_over += 1
                    if context.failed_prefills >= self._options.prefill_tries and self._engines.prefill.live:
                        break
                    self._client.count("prefill_retries")
                except DecodeFailed as failure:
                    failures.append(f"decode replica {failure.replica} failed: {failure}")
                    context.failed_replicas.append(failure.replica)
                    if failure.alive:  # the blocks may be at fault: use another prefill engine
                        context.passed_over += 1
                    if context.sent and failure.begun:
                        context.stream_failures += 1
                    if context.sent and (context.stream_failures > 1 or not context.can_continue):
                        break
                    if not context.can_continue:
                        context.discard_answer()
                except (Refused, CallFailed) as error:
                    if not context.sent:
                        raise
                    failures.append(f"the answer could not continue on another engine: {error}")
                    break
            if not context.sent:
                prefills, decodes = context.failed_prefills, len(context.failed_replicas)
                raise Overloaded(
                    f"{prefills} prefill attempts failed and {decodes} decode calls of this request"
                )
            self._client.count("streams_lost")
            context.error = "engine_lost"
            yield _LOST

    async def _try(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Make one attempt: prefill, place and decode."""
        ticket: Ticket | None = None
        try:
            async with self._retries.turn(context):
                await self._wait_for_decode()
                self._check_slots(context)
                prefilled = await self.prefill.try_prefill(context) if self._splits(context.request) else None
                if context.token_ids is None and self._tokens is not None:
                    context.local_token_ids = await self._tokens.of(context.request.fields)
                if self._engines.whole:
                    ticket = await self.prefill.admit_whole(context)
                with context.stage("place") as placing:
                    lease = await self._place(context, prefilled)
            async with aclosing(self._answer(context, lease, prefilled, ticket, placing)) as answer:
                async for payload in answer:
                    yield payload
        finally:
            if ticket is not None:
                self.prefill.queues.leave(ticket)

    def _check_slots(self, context: RequestContext) -> None:
        """Raise Overloaded if a new request would wait too long for a slot of a decode engine."""
        if context.is_retry:
            return
        wait_s, bound_s = self._decode_turns.wait_s(), self._options.slot_wait_s
        if wait_s > bound_s:
            self._client.count("refused_decode_backlog")
            why = f"a request would wait {wait_s:.0f} s for a decode engine's slot; {bound_s:g} s are allowed"
            # Spread over the time in which that many slots become free.
            raise Overloaded(why, retry_after_s=math.ceil(wait_s - bound_s * random.random()))

    async def _answer(
        self,
        context: RequestContext,
        lease: Lease,
        prefilled: HeldPrompt | None,
        ticket: Ticket | None,
        placing: Stage,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer of the leased engine, then release the lease."""
        resumed = context.num_generated > 0
        context.lease = lease
        if resumed:
            self._client.progress(context.request_id, context.num_generated)
        first = True
        decoding = context.decode_stages(lease.replica)
        chunks = self._decode(context, lease, prefilled, decoding, ticket)
        try:
            with decoding:
                async for payload in chunks:
                    if first:
                        first = False
                        self._first_chunk(context, prefilled, placing, decoding)
                        if resumed:
                            self._client.count("resumed")
                    if payload:
                        yield payload
        finally:
            await chunks.aclose()
            self._client.release(context.request_id)

    def _first_chunk(
        self, context: RequestContext, prefilled: HeldPrompt | None, placing: Stage, decoding: DecodeStages
    ) -> None:
        """Record the arrival of the first chunk."""
        decoding.first_s = now = time.monotonic()
        if context.request.fields.stream:
            context.status = 200
        if prefilled is not None:
            context.handover_s = now - prefilled.done_at
            self.stage_latencies.record(
                place=placing.seconds,
                first_token=now - decoding.begun_s,
                handover=context.handover_s,
            )

    # -- steps -----------------------------------------------------------------------------------

    def _splits(self, request: Request) -> bool:
        return not self._engines.whole and needs_whole_engine(request.method, request.fields) is None

    async def _wait_for_decode(self) -> None:
        """Wait until some decode replica can be reached; placement raises Overloaded if none appears."""
        until = time.monotonic() + self._options.prefill_wait_s
        while not self._engines.decode.live and time.monotonic() < until:
            await asyncio.sleep(_ROOM_CHECK_S)

    async def _place(self, context: RequestContext, prefilled: HeldPrompt | None) -> Lease:
        fleet = self._engines.decode
        usable = self._health.usable
        request = PlacementRequest(
            context.request_id,
            None,
            prompt_tokens=len(context.token_ids) if context.token_ids is not None else 0,
            max_new_tokens=max_new_tokens(context.request.fields),
            domain=context.request.domain,
            blocks=self._blocks(context),
            exclude=(*context.failed_replicas, *(name for name in fleet.live if name not in usable)),
            prompt_key=prompt_key(context.request.fields),
            tenant=context.request.tenant,
            priority=context.request.priority,
        )
        counts = expert_counts_of(prefilled.params) if prefilled else None
        wait_s = 0.0 if context.failed_replicas else self._options.queue_ttl_s  # retries are not queued
        try:
            return await self._client.place(request, counts, token_ids=context.token_ids, wait_s=wait_s)
        except BaseException:
            if prefilled is not None:
                self._release_kv(prefilled.request_id, prefilled.replica)
            raise

    def _blocks(self, context: RequestContext) -> PromptBlocks | None:
        """Return the prompt's blocks if the decode engine also prefills."""
        if not self._engines.whole or context.token_ids is None:
            return None
        salt = context.request.cache_salt or context.request.fields.cache_salt or ""
        return prompt_blocks(context.token_ids, self._engines.decode.directory.block_tokens, salt)

    async def _decode(
        self,
        context: RequestContext,
        lease: Lease,
        prefilled: HeldPrompt | None,
        decoding: DecodeStages,
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
        request = context.request
        header = self._decode_header(context, lease, prefilled, ticket)
        turn = self._decode_turns.enter(lease.replica, self.prefill.queues.left_s(ticket))
        call: Call | None = None
        measured: MeasuredCounts | None = None
        begun = ended = False
        unread = prefilled
        try:
            measured = self._measured_counts(lease, context)
            call = self._engines.decode.call(lease.replica, "generate", header, request.body)
            call.on_overflow = context.on_overflow
            if request.fields.stream or prefilled is not None:  # others send only complete answers
                since = partial(self._decode_turns.since_s, turn)
                call.expect(self._options.first_token_limit_s, self._options.gap_limit_s, since=since)
            while (chunk := await call.read()) is not None:
                if not begun:
                    begun, unread = True, None
                    self._decode_turns.leave(turn, answered=True)
                    self._record_prefill(context, ticket)
                context.append_chunk(chunk)
                self._client.progress(lease.request_id, context.num_generated)
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
            record_failure(context, self._health, lease.replica, error, begun=begun)
        finally:
            self._decode_turns.leave(turn, answered=ended)
            if call is not None and not ended:
                call.cancel()
            if measured is not None:
                measured.finish()
            if unread is not None:
                self._release_kv(unread.request_id, unread.replica, reader=call)

    def _decode_header(
        self, context: RequestContext, lease: Lease, prefilled: HeldPrompt | None, ticket: Ticket | None
    ) -> dict[str, Any]:
        """Return the header of the decode call; assign a whole engine's prefill ticket to that engine."""
        request = context.request
        header = decode_header(
            request.method,
            context.request_id,
            prefilled.params if prefilled else None,
            context.prompt_ids,
            request.headers,
            request.cache_salt,
            generated=bytes(context.generated_ids),
            created=context.created,
            domain=request.domain,
        )
        if ticket is not None:
            self.prefill.queues.assign(ticket, lease.replica)
            header["prompt_tokens"] = ticket.tokens
        return header

    def _record_prefill(self, context: RequestContext, ticket: Ticket | None) -> None:
        """Record that a whole engine has computed the prompt."""
        if ticket is not None:
            known = None if context.token_ids is None else len(context.token_ids)
            self.prefill.computed(ticket, round(ticket.tokens) if known is None else known)

    def _measured_counts(self, lease: Lease, context: RequestContext) -> MeasuredCounts | None:
        """Report the prompt's expert counts to the router once a whole engine has prefilled it."""
        token_ids = context.token_ids
        if not self._engines.whole or token_ids is None or context.num_generated:
            return None
        return MeasuredCounts(
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
