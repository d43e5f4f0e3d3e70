"""Prefill before placement, so that the router knows the experts of a prompt."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from eldr_serve.channel import Call, CallFailedError, CallTimeoutError, ChannelLostError
from eldr_serve.engine.calls import PrefillReply
from eldr_serve.engine.methods import PREFILL
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.admission.latency_admission import AdmissionResult
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.context.failures import PrefillFailedError
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.context.stage_latencies import StageLatencies
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill.kv_release import KvRelease
from eldr_serve.pipeline.prefill.local_prefill import LocalPrefill
from eldr_serve.pipeline.prefill.prompt import HeldPrompt, Prompt, UncomputedPrompt
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.queues.call_rate_limiter import CallRateLimiter
from eldr_serve.queues.prefill_queue import Ticket
from eldr_serve.queues.prefill_replica_choice import choose_prefill_replica
from eldr_serve.request import prompt_head, why_not_split


async def read_prefill_reply(call: Call) -> PrefillReply:
    """Return the reply to a prefill call; raise CallFailedError without one."""
    chunk = await call.read()
    if chunk is None:
        raise CallFailedError(500, b"the answer was empty")
    return msgspec.msgpack.decode(chunk.payload, type=PrefillReply)


class SplitPrefill:
    """Prefill on the engines of the prefill deployment.

    Args:
        fleets: the replicas of prefill and of decode engines.
        admission: limits the prompts in prefill, and keeps the prefill engines' queues.
        options: timeouts, and the rate of prompts without a prefill engine.
        counters: counters of the ingress.
        kv_release: frees a prompt's blocks on its prefill engine when no decode engine will read them.
        stage_latencies: latencies of the prefill stage.
        tokenizer: tokenises prompts that decode engines prefill; None: their token ids are unknown.

    Attributes:
        local_prefill: chooses the prompts that decode engines compute.
    """

    def __init__(
        self,
        *,
        fleets: Fleets,
        admission: PrefillAdmission,
        options: PathOptions,
        counters: IngressCounters,
        kv_release: KvRelease,
        stage_latencies: StageLatencies,
        local_prefill: LocalPrefill,
        tokenizer: PromptTokenizer | None,
    ) -> None:
        self._fleets = fleets
        self._fleet = fleets.prefill
        self._admission = admission
        self._options = options
        self._counters = counters
        self._kv_release = kv_release
        self._stage_latencies = stage_latencies
        self.local_prefill = local_prefill
        self._tokenizer = tokenizer
        self._outliers = OutlierDetector(fleets.prefill, counters)
        self._without_prefill = CallRateLimiter(
            options.prefilled_by_decode_per_s, clock=lambda: asyncio.get_running_loop().time()
        )

    async def prepare(self, context: RequestContext, admission_result: AdmissionResult) -> Prompt:
        """Return the prompt, prefilled if the request can be split between two engines.

        A short prompt that a decode engine computes sooner is left to that engine (see LocalPrefill).
        If prefill fails for an answer that has already begun, the next decode engine computes the prompt.

        Raises:
            OverloadedError: no engine has room, or none can be reached.
            PrefillFailedError: the engine is at fault.
            CallFailedError: the request is at fault.
        """
        prompt: Prompt = UncomputedPrompt()
        if why_not_split(context.request.method, context.request.fields) is None:
            local_prompt = await self.local_prefill.choose(context)
            if local_prompt is not None:
                return local_prompt
            try:
                prompt = await self._prefill(context, admission_result)
            except (OverloadedError, CallFailedError, PrefillFailedError) as error:
                if not context.answer.num_tokens:
                    raise
                context.failures.messages.append(
                    f"prefill failed, so the next decode engine computes the prompt: {error}"
                )
                self._counters.count(IngressEvent.PREFILLED_BY_DECODE)
        if self._tokenizer is not None and prompt.prefilled_ids is None:
            await self._tokenizer.add_ids_to(context)
        return prompt

    async def _prefill(self, context: RequestContext, admission_result: AdmissionResult) -> Prompt:
        """Prefill the prompt; return it uncomputed if a decode engine must prefill it.

        Raises:
            OverloadedError: no engine has room, or none can be reached.
            PrefillFailedError: the engine is at fault.
            CallFailedError: the request is at fault.
        """
        num_tokens = self._admission.estimate_tokens(context)
        replicas = await self._eligible_replicas(context, num_tokens)
        if not replicas:
            self._counters.count(IngressEvent.PREFILLED_BY_DECODE)
            return UncomputedPrompt()
        replicas = admission_result.timely_workers(replicas)
        open_calls, other_calls = self._fleet.open_calls, self._admission.queues.other_calls(replicas)
        replica = choose_prefill_replica(
            context.request.adapter.encode() + prompt_head(context.request.fields),
            {name: open_calls[name] + other_calls[name] for name in replicas},
            max_load_ratio=self._fleets.prefill_options.max_load_ratio,
            failed_replicas=context.failures.prefill_replicas,
        )
        ticket = self._admission.queues.enter(replica, num_tokens, context.resend_key)
        try:
            return await self._call(context, replica, ticket)
        finally:
            self._admission.queues.leave(ticket)

    async def _call(self, context: RequestContext, replica: str, ticket: Ticket) -> HeldPrompt:
        request = context.request
        waiting_call = ticket.waiting_call
        assert waiting_call is not None
        request_id = f"{context.request_id}-p{context.record.num_prefills}"
        call: Call | None = None
        try:
            engine_request = EngineRequest(
                request.method,
                request.body,
                request_id,
                headers=request.headers,
                cache_salt=request.cache_salt,
                generated=bytes(context.answer.encoded_ids),
                tokens_to_compute=ticket.num_tokens,
            )
            with context.record.stage("prefill", replica) as stage:
                call = self._fleet.call(replica, PREFILL, engine_request)
                timeout_s = self._options.prefill_timeout_s
                call.set_timeouts(timeout_s, timeout_s, since=lambda: waiting_call.expected_start_at_s)
                reply = await read_prefill_reply(call)
        except CallFailedError as error:
            if error.status < 500:
                raise
            self._outliers.record_failure(replica, error)
            raise PrefillFailedError(replica, f"failed: {error}") from error
        except ChannelLostError as error:
            context.failures.lost_engines += call is not None and not error.silent
            raise PrefillFailedError(replica, f"was lost: {error}") from error
        except CallTimeoutError as error:
            self._abandon(call, request_id, replica)
            self._outliers.record_failure(replica, error)
            raise PrefillFailedError(replica, "took too long") from error
        except BaseException:
            self._abandon(call, request_id, replica)
            raise
        self._outliers.record_success(replica)
        prompt_ids = np.frombuffer(reply.token_ids, np.uint32)
        self._admission.finish(ticket, len(prompt_ids) + context.answer.num_ids)
        self._admission.learn_size(context, len(prompt_ids))
        self._counters.count(IngressEvent.PREFILLS)
        self._stage_latencies.record(prefill=stage.seconds)
        return HeldPrompt(
            request_id,
            replica,
            prefilled_ids=prompt_ids,
            kv_transfer_params=reply.kv_transfer_params,
            prefilled_at_s=stage.ended_at_s,
            kv_release=self._kv_release,
        )

    def _abandon(self, call: Call | None, request_id: str, replica: str) -> None:
        """Cancel a prefill, and release the blocks that it may hold."""
        if call is not None:
            call.cancel()
            self._kv_release.release(request_id, replica)

    # -- room --------------------------------------------------------------------------------------

    async def _eligible_replicas(self, context: RequestContext, num_tokens: float) -> list[str]:
        """Return the prefill replicas that may take the prompt; empty if a decode engine must prefill it."""
        while await self._wait_for_kv_room(context, num_tokens):
            if context.has_earlier_attempt:
                return self._replicas_with_room()
            if replicas := await self._admission.admit(context, num_tokens, self._replicas_with_room):
                return replicas
        return []

    async def _wait_for_kv_room(self, context: RequestContext, num_tokens: float) -> bool:
        """Wait until a prefill replica has room; return False if a decode engine must prefill the prompt.

        A decode engine must prefill the prompt while no prefill replica can be reached. Requests then proceed
        in order of arrival, at a limited rate.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._options.replica_wait_s
        turn_s = None
        try:
            with self._fleet.waiters.take_turn() as turn:
                while not self._replicas_with_room():
                    now_s = clock()
                    is_reachable = bool(self._fleet.live_workers)
                    if turn_s is None and not is_reachable:
                        after_s = self._without_prefill.reserve(max(0.0, until_s - now_s))
                        turn_s = None if after_s is None else now_s + after_s
                    if turn_s is not None and now_s >= turn_s and not is_reachable:
                        turn_s = None  # the reservation is used
                        return False
                    if now_s >= until_s:
                        raise self._make_refusal(context, num_tokens, is_reachable)
                    await turn.wait_until(
                        until_s if turn_s is None or turn_s <= now_s else min(turn_s, until_s)
                    )
            return True
        finally:
            if turn_s is not None:
                self._without_prefill.give_back()

    def _make_refusal(
        self, context: RequestContext, num_tokens: float, is_reachable: bool
    ) -> OverloadedError:
        """Return the error of a request for which no engine had room in time."""
        if not context.answer.num_tokens:  # otherwise the answer continues on a decode engine
            self._counters.count(IngressEvent.REFUSED_PREFILL_FULL)
        if not is_reachable:
            return OverloadedError("no prefill replica can be reached")
        why = "the KV caches of all prefill replicas are full"
        return self._admission.make_refusal(why, [*self._fleet.live_workers], num_tokens, context.resend_key)

    def _replicas_with_room(self) -> list[str]:
        return self._fleet.directory.kv_usage.replicas_with_room(self._outliers.usable_workers)
