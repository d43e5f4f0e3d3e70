"""The first step of a request: prefill, with a bound on the queues for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from eldr_serve.channel import Call, CallFailed, CallLate, ChannelLost
from eldr_serve.engine.calls import prefill_header
from eldr_serve.errors import Overloaded
from eldr_serve.pipeline.engines import Engines, HeldPrompt
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.stage_latencies import StageLatencies
from eldr_serve.queues.prefill_queue import PrefillQueues, Ticket
from eldr_serve.queues.rate import Rate
from eldr_serve.replicas.outliers import ReplicaHealth
from eldr_serve.request import needs_whole_engine, prompt_head
from eldr_serve.router.client import RouterClient
from eldr_serve.scheduling.prefill import choose_prefill

_ROOM_CHECK_S = 0.05
_MEASURE_S = 1.0  # maximum wait for the first measurement before a request is refused


async def prefill_answer(call: Call) -> Any:
    """Return the answer to a prefill call (see PrefillServer.answer); raise ChannelLost if it is empty."""
    chunk = await call.read()
    if chunk is None:
        raise ChannelLost("the answer was empty")
    return msgspec.msgpack.decode(chunk.payload)


class PrefillFailed(Exception):  # noqa: N818
    """A prefill call has failed through no fault of the request."""


class PrefillStep:
    """Prefills prompts on the prefill deployment, or admits them if decode engines prefill themselves.

    Args:
        release: frees the blocks of a prompt; called with its request id and the replica.
    """

    def __init__(
        self,
        *,
        engines: Engines,
        options: PathOptions,
        client: RouterClient,
        stage_latencies: StageLatencies,
        health: ReplicaHealth,
        release: Callable[[str, str], None],
    ) -> None:
        self._engines = engines
        self._fleet = engines.decode if engines.whole else engines.prefill
        self._options = options
        self._client = client
        self._stage_latencies = stage_latencies
        self._health = health
        self._release = release
        self._without_prefill = Rate(options.whole_per_s)
        self._measured = asyncio.Event()
        self.queues = PrefillQueues(
            options.prefill_queue_s,
            reports=lambda: self._fleet.directory.reports,
            clock=lambda: asyncio.get_running_loop().time(),
        )

    @property
    def waits_s(self) -> dict[str, float]:
        """Return the predicted wait for prefill at each live replica, s."""
        self.queues.keep(self._fleet.live)
        return {name: round(self.queues.wait_s(name), 3) for name in self._fleet.live}

    # -- prefill engines ---------------------------------------------------------------------------

    async def try_prefill(self, context: RequestContext) -> HeldPrompt | None:
        """Prefill the prompt; return None also if prefill fails for an answer that has already begun.

        Such an answer continues on a decode engine that also prefills.
        """
        try:
            return await self.prefill(context)
        except (Overloaded, CallFailed, PrefillFailed) as error:
            if context.num_generated:
                context.failure_messages.append(f"continues on a decode engine without prefill: {error}")
                self._client.count("whole_without_prefill")
                return None
            raise

    async def prefill(self, context: RequestContext) -> HeldPrompt | None:
        """Prefill the prompt; return None if a decode engine is to compute it.

        Raises:
            Overloaded: no engine has room, or none can be reached.
            PrefillFailed: the engine is at fault.
            CallFailed: the request is at fault.
        """
        tokens = self._tokens(context)
        replicas = await self._replicas(context, tokens)
        if not replicas:
            self._client.count("whole_without_prefill")
            return None
        in_flight = self._fleet.in_flight
        replica = choose_prefill(
            prompt_head(context.request.fields),
            {name: in_flight[name] for name in replicas},
            max_load_ratio=self._engines.max_load_ratio,
            attempt=context.passed_over,
        )
        ticket = self.queues.enter(replica, tokens, context.retry_key)
        try:
            return await self._call(context, replica, ticket)
        finally:
            self.queues.leave(ticket)

    async def _call(self, context: RequestContext, replica: str, ticket: Ticket) -> HeldPrompt:
        request, turn = context.request, ticket.turn
        assert turn is not None
        request_id = f"{context.request_id}-p{context.prefills}"
        context.prefills += 1
        call: Call | None = None
        try:
            header = prefill_header(
                request.method,
                request_id,
                request.headers,
                request.cache_salt,
                generated=bytes(context.generated_ids),
            )
            header["prompt_tokens"] = ticket.tokens
            with context.stage("prefill", replica) as stage:
                call = self._fleet.call(replica, "prefill", header, request.body)
                limit_s = self._options.prefill_limit_s
                call.expect(limit_s, limit_s, since=lambda: turn.since_s)
                found = await prefill_answer(call)
        except CallFailed as error:
            if error.status < 500:
                raise
            self._health.failed(replica, error)
            raise PrefillFailed(f"prefill replica {replica} failed: {error}") from error
        except ChannelLost as error:
            context.lost_engines += 1
            raise PrefillFailed(f"prefill replica {replica} was lost: {error}") from error
        except BaseException as error:
            if call is not None:
                call.cancel()
                self._release(request_id, replica)
            if not isinstance(error, CallLate):
                raise
            self._health.failed(replica, error)
            raise PrefillFailed(f"prefill replica {replica} took too long") from error
        self._health.succeeded(replica)
        context.prompt_ids = found["token_ids"]
        self.computed(ticket, context.num_prompt_ids)
        self._client.count("prefills")
        self._stage_latencies.record(prefill=stage.seconds)
        return HeldPrompt(request_id, replica, found["kv"], stage.ended_s)

    # -- whole engines -----------------------------------------------------------------------------

    async def admit_whole(self, context: RequestContext) -> Ticket:
        """Return the ticket of a prompt that a decode engine prefills; raise Overloaded if none has room.

        If an answer arrives only as a whole, it does not show when its prompt has been computed. Such
        prompts are not counted in the queue.
        """
        fields = context.request.fields
        if not fields.stream and needs_whole_engine(context.request.method, fields) is not None:
            return self.queues.enter(None, 0.0, context.retry_key)
        tokens = self._tokens(context)
        if (live := list(self._fleet.live)) and not context.is_retry:
            await self._join(context, tokens, lambda: live)
        return self.queues.enter(None, tokens, context.retry_key)

    def computed(self, ticket: Ticket, tokens: int) -> None:
        """Record that the prefill of a prompt has ended."""
        self.queues.leave(ticket, tokens)
        if not self._measured.is_set() and self.queues.is_measured(self._fleet.live):
            self._measured.set()

    # -- room --------------------------------------------------------------------------------------

    def _tokens(self, context: RequestContext) -> float:
        """Estimate the number of tokens to compute: the prompt and the tokens generated so far."""
        if context.token_ids is not None:
            prompt = float(len(context.token_ids))
        else:
            prompt = self.queues.sizes.estimate(
                context.request.fields.prompt, context.request.fields.messages
            )
        return prompt + context.num_generated_ids

    async def _replicas(self, context: RequestContext, tokens: float) -> list[str]:
        """Return the prefill replicas that may take the prompt; empty if it continues without prefill."""
        while await self._room(context, tokens):
            if context.is_retry:
                return self._with_room()
            if found := await self._join(context, tokens, self._with_room):
                return found
        return []

    async def _join(
        self, context: RequestContext, tokens: float, replicas: Callable[[], list[str]]
    ) -> list[str]:
        """Return the replicas whose queue the prompt may join.

        Before the first measurement the prompt waits for it briefly, since no retry time can be predicted
        until then.

        Raises:
            Overloaded: there are replicas, but none of their queues is short enough.
        """
        names = replicas()
        found = self.queues.with_room(names, context.retry_key)
        if names and not found and not self.queues.is_measured(names):
            try:
                async with asyncio.timeout(_MEASURE_S):
                    await self._measured.wait()
            except TimeoutError:
                pass
            names = replicas()
            found = self.queues.with_room(names, context.retry_key)
        if names and not found:
            self._client.count("refused_prefill_backlog")
            wait_s, bound_s = min(map(self.queues.wait_s, names)), self._options.prefill_queue_s
            why = f"a prompt would wait {wait_s:.0f} s for its prefill; {bound_s:g} s are allowed"
            raise self._overloaded(why, names, tokens, context.retry_key)
        return found

    def _overloaded(self, why: str, replicas: list[str], tokens: float, key: bytes) -> Overloaded:
        return Overloaded(why, retry_after_s=self.queues.retry_s(replicas, tokens, key))

    async def _room(self, context: RequestContext, tokens: float) -> bool:
        """Wait until some prefill replica has room; return False to run without prefill if none is reachable.

        Requests without prefill proceed in order of arrival, at a limited rate.
        """
        until_s, turn_s = time.monotonic() + self._options.prefill_wait_s, None
        try:
            while not self._with_room():
                now_s, reached = time.monotonic(), bool(self._fleet.live)
                if turn_s is None and not reached:
                    after_s = self._without_prefill.reserve(max(0.0, until_s - now_s))
                    turn_s = None if after_s is None else now_s + after_s
                if turn_s is not None and now_s >= turn_s and not reached:
                    turn_s = None  # the reservation is used
                    return False
                if now_s >= until_s:
                    if not context.num_generated:  # otherwise it continues on a decode engine
                        self._client.count("refused_prefill_full")
                    if not reached:
                        raise Overloaded("no prefill replica can be reached")
                    why = "the KV caches of all prefill replicas are full"
                    raise self._overloaded(why, list(self._fleet.live), tokens, context.retry_key)
                await asyncio.sleep(_ROOM_CHECK_S)
            return True
        finally:
            if turn_s is not None:
                self._without_prefill.give_back()

    def _with_room(self) -> list[str]:
        return self._fleet.directory.budget.with_room(self._health.usable)
