"""A bound on the estimated waiting time of prompts in the prefill queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.queues.prefill_queue import PrefillQueues, Ticket
from eldr_serve.queues.prompt_sizes import PromptSizes
from eldr_serve.request import conversation

_MEASURE_S = 1.0  # maximum wait for the first measurement before a request is refused


class PrefillAdmission:
    """Admits prompts to the prefill queues of one fleet, and refuses prompts that would wait too long.

    Args:
        fleet: the engines that prefill.
        bound_s: maximum estimated wait, s.

    Attributes:
        queues: the prompts of this ingress that each engine has yet to compute.
    """

    def __init__(self, fleet: Fleet, *, bound_s: float, counters: IngressCounters) -> None:
        self._fleet = fleet
        self._bound_s = bound_s
        self._counters = counters
        self._measured = asyncio.Event()
        self._sizes = PromptSizes()
        self.queues = PrefillQueues(
            bound_s,
            reports=lambda: fleet.directory.reports,
            clock=lambda: asyncio.get_running_loop().time(),
        )

    def discard_dead_queues(self) -> None:
        """Discard the empty queues of workers that are not live."""
        self.queues.keep_only(self._fleet.live_workers)

    def estimate_waits(self) -> dict[str, float]:
        """Estimate the wait for prefill at each live worker, s."""
        return {name: round(self.queues.estimate_wait_s(name), 3) for name in self._fleet.live_workers}

    def estimate_tokens(self, context: RequestContext) -> float:
        """Estimate the number of tokens to compute: the prompt and the tokens generated so far."""
        if context.prompt_ids is not None:
            prompt = float(len(context.prompt_ids))
        else:
            fields = context.request.fields
            prompt = self._sizes.estimate(fields.prompt, conversation(fields))
        return prompt + context.answer.num_ids

    def learn_size(self, context: RequestContext, prompt_tokens: int) -> None:
        """Learn the true number of a prompt's tokens, for the estimates of later prompts."""
        fields = context.request.fields
        self._sizes.learn(fields.prompt, conversation(fields), prompt_tokens)

    async def admit(
        self, context: RequestContext, num_tokens: float, list_workers: Callable[[], list[str]]
    ) -> list[str]:
        """Return the workers whose queue the prompt may join.

        Before the first measurement no retry time can be estimated, so the prompt waits briefly for it.

        Raises:
            OverloadedError: there are workers, but none of their queues is short enough.
        """
        workers = list_workers()
        admitting = self.queues.workers_with_room(workers, context.resend_key)
        if workers and not admitting and not self.queues.is_measured(workers):
            try:
                async with asyncio.timeout(_MEASURE_S):
                    await self._measured.wait()
            except TimeoutError:
                pass
            workers = list_workers()
            admitting = self.queues.workers_with_room(workers, context.resend_key)
        if workers and not admitting:
            self._counters.count(IngressEvent.REFUSED_PREFILL_BACKLOG)
            wait_s = min(map(self.queues.estimate_wait_s, workers))
            why = f"a prompt would wait {wait_s:.0f} s for its prefill; {self._bound_s:g} s are allowed"
            raise self.make_refusal(why, workers, num_tokens, context.resend_key)
        return admitting

    def make_refusal(self, why: str, workers: list[str], num_tokens: float, key: bytes) -> OverloadedError:
        """Return the error of a refused request, with the estimated time until there is room."""
        return OverloadedError(why, retry_after_s=self.queues.retry_s(workers, num_tokens, key))

    def finish(self, ticket: Ticket, num_tokens: int) -> None:
        """Record that the prefill of a prompt has ended.

        Args:
            num_tokens: number of its tokens.
        """
        self.queues.leave(ticket, num_tokens)
        if not self._measured.is_set() and self.queues.is_measured(self._fleet.live_workers):
            self._measured.set()
