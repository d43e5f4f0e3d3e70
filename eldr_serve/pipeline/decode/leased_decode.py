"""The decode of a request on its leased worker: the queue, the call, and measured expert counts."""

from __future__ import annotations

from functools import partial

from eldr_serve.channel import Call, CallFailedError, ChannelLostError, Chunk
from eldr_serve.engine.calls import split_expert_counts
from eldr_serve.engine.methods import GENERATE, WAIT_FOR_COUNTS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.fleet.measured_counts import MeasuredCounts
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill.prompt import Prompt
from eldr_serve.queues.call_start import WaitingCall
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling.types import Lease


class LeasedDecode:
    """The decode of a request on its leased worker, used as a context manager.

    The request is in the queue of the worker until its first token. At the exit it leaves the queue, and a
    call on which the engine may still work is cancelled.

    Args:
        counts_prompts: whether the decode engine counts the experts of prompts, as whole replicas do.

    Attributes:
        prompt: the prompt of the request.
        lease: the lease of the decode worker.
        worker: the decode worker.
        call: the call to the worker's engine; None until it is sent.
        has_begun: part of the answer has arrived over the call.
        has_ended: the engine no longer works on the call.
    """

    def __init__(
        self,
        context: RequestContext,
        prompt: Prompt,
        lease: Lease,
        *,
        fleet: Fleet,
        decode_starts: DecodeStartEstimator,
        router_client: RouterClient,
        options: PathOptions,
        counts_prompts: bool,
    ) -> None:
        self.prompt = prompt
        self.lease = lease
        self.worker = lease.worker
        self.call: Call | None = None
        self.has_begun = False
        self.has_ended = False
        self._context = context
        self._fleet = fleet
        self._decode_starts = decode_starts
        self._router_client = router_client
        self._options = options
        self._counts_prompts = counts_prompts
        self._queue_entry: WaitingCall | None = None
        self._measured: MeasuredCounts | None = None
        self._engine_request = self._make_engine_request()

    def __enter__(self) -> LeasedDecode:
        self.prompt.enter(self.worker)
        self._queue_entry = self._decode_starts.enter(self.worker, self.prompt.remaining_s)
        return self

    def __exit__(self, *raised: object) -> None:
        self._leave_queue(answered=self.has_ended)
        if self.call is not None and not self.has_ended:
            self.call.cancel()
        if self._measured is not None:
            self._measured.finish()

    def send(self) -> Call:
        """Send and return the call; raise ChannelLostError if there is no channel to the worker's replica."""
        assert self._queue_entry is not None
        request = self._context.request
        self._measured = self._request_measured_counts()
        self.call = self._fleet.call(self.worker, GENERATE, self._engine_request)
        self.call.on_overflow = self._context.on_overflow
        # An engine that also prefills sends nothing of an unstreamed answer before its end.
        if request.fields.stream or self.prompt.kv_transfer_params is not None:
            options = self._options
            since = partial(self._decode_starts.postpone_if_full, self._queue_entry)
            self.call.set_timeouts(options.first_token_timeout_s, options.next_token_timeout_s, since=since)
        return self.call

    async def read(self) -> Chunk | None:
        """Return the next part of the answer, None at its end; raise what Call.read raises."""
        assert self.call is not None
        try:
            chunk = await self.call.read()
        except CallFailedError:
            self.has_ended = True
            raise
        except ChannelLostError:
            self.has_ended = True
            self._leave_queue(answered=False)
            raise
        if chunk is None:
            self.has_ended = True
        elif not self.has_begun:
            self.has_begun = True
            self._leave_queue(answered=True)
            self.prompt.on_first_token()
        return chunk

    def _leave_queue(self, *, answered: bool) -> None:
        assert self._queue_entry is not None
        self._decode_starts.leave(self._queue_entry, answered=answered)

    def _make_engine_request(self) -> EngineRequest:
        context = self._context
        request, prefilled_ids = context.request, context.prefilled_ids
        params, expert_counts = split_expert_counts(self.prompt.kv_transfer_params)
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
            tokens_to_compute=self.prompt.tokens_to_compute,
            domain=request.hints.domain or "",
            expert_counts=expert_counts,
        )

    def _request_measured_counts(self) -> MeasuredCounts | None:
        """Ask a whole replica for the prompt's expert counts, which are then reported to the router.

        Returns:
            None if the engine does not count prompts, the prompt's ids are unknown or the answer has begun.
        """
        request_id = self._context.request_id
        prompt_ids = self.prompt.ids_to_compute
        if not self._counts_prompts or prompt_ids is None or self._context.answer.num_tokens:
            return None
        token_ids = self._context.predictable_ids
        set_counts = partial(self._router_client.set_measured_counts, request_id, token_ids)
        request = EngineRequest(id=request_id)
        return MeasuredCounts(self._fleet.call(self.worker, WAIT_FOR_COUNTS, request), set_counts)
