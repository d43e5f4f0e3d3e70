"""One call to a decode engine, with its place in the engine's queue and the measurement of expert counts."""

from __future__ import annotations

from functools import partial

from eldr_serve.channel import Call, CallFailedError, ChannelLostError, Chunk
from eldr_serve.engine.calls import split_expert_counts
from eldr_serve.engine.methods import WAIT_FOR_COUNTS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.fleet.measured_counts import MeasuredCounts
from eldr_serve.pipeline.prompt import Prompt
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.pipeline.services import Services
from eldr_serve.scheduling import Lease


class DecodeCall:
    """One call to a decode engine, used as a context manager.

    The request is in the queue of the leased engine until its first token. At the exit it leaves the queue,
    and a call that the engine may still work on is cancelled.

    Attributes:
        worker: the decode worker.
        call: the call; None until it is sent.
        begun: part of the answer has arrived by this call.
        ended: the engine no longer works on the call.
    """

    def __init__(self, services: Services, context: RequestContext, prompt: Prompt, lease: Lease) -> None:
        self.worker = lease.worker
        self.call: Call | None = None
        self.begun = False
        self.ended = False
        self._services = services
        self._context = context
        self._prompt = prompt
        self._measured: MeasuredCounts | None = None

    def __enter__(self) -> DecodeCall:
        self._engine_request = self._make_engine_request()
        self._prompt.enter(self.worker)
        self._queued = self._services.decode_starts.enter(self.worker, self._prompt.remaining_s)
        return self

    def __exit__(self, *raised: object) -> None:
        self._services.decode_starts.leave(self._queued, answered=self.ended)
        if self.call is not None and not self.ended:
            self.call.cancel()
        if self._measured is not None:
            self._measured.finish()

    def send(self) -> Call:
        """Send and return the call; raise ChannelLostError if there is no channel to the worker's replica."""
        services = self._services
        request = self._context.request
        self._measured = self._measure_counts()
        self.call = services.fleets.decode.call(self.worker, "generate", self._engine_request)
        self.call.on_overflow = self._context.on_overflow
        # Without a stream, an engine that also prefills sends nothing before its whole answer.
        if request.fields.stream or self._prompt.kv_transfer_params is not None:
            options = services.options
            since = partial(services.decode_starts.postpone_if_full, self._queued)
            self.call.set_timeouts(options.first_token_timeout_s, options.next_token_timeout_s, since=since)
        return self.call

    async def read(self) -> Chunk | None:
        """Return the next part of the answer, None at its end; raise what Call.read raises."""
        assert self.call is not None
        try:
            chunk = await self.call.read()
        except CallFailedError:
            self.ended = True
            raise
        except ChannelLostError:
            self.ended = True
            self._services.decode_starts.leave(self._queued, answered=False)
            raise
        if chunk is None:
            self.ended = True
        elif not self.begun:
            self.begun = True
            self._services.decode_starts.leave(self._queued, answered=True)
            self._prompt.on_first_token()
        return chunk

    def _make_engine_request(self) -> EngineRequest:
        context = self._context
        request, prefilled_ids = context.request, context.prefilled_ids
        params, expert_counts = split_expert_counts(self._prompt.kv_transfer_params)
        return EngineRequest(
            request.method,
            request.body,
            context.request_id,
            headers=request.headers,
            kv_transfer_params=params,
            token_ids=b"" if prefilled_ids is None else prefilled_ids.tobytes(),
            cache_salt=request.cache_salt,
            generated=bytes(context.answer.encoded_ids),
            created=context.answer.created,
            prompt_tokens=self._prompt.tokens_to_compute,
            domain=request.domain or "",
            expert_counts=expert_counts,
        )

    def _measure_counts(self) -> MeasuredCounts | None:
        """Report the prompt's expert counts to the router once a whole replica has computed it."""
        services = self._services
        request_id = self._context.request_id
        prompt_ids = self._prompt.ids_to_compute
        if prompt_ids is None or self._context.answer.num_tokens:
            return None
        if not services.fleets.whole:  # a decode engine beside prefill engines counts no prompts
            return None
        set_counts = partial(services.router_client.set_measured_counts, request_id, prompt_ids)
        request = EngineRequest(id=request_id)
        return MeasuredCounts(services.fleets.decode.call(self.worker, WAIT_FOR_COUNTS, request), set_counts)
