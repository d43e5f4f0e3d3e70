"""A prompt before its decode call: the engine that computes it, and the resources that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eldr_serve.channel import Call
from eldr_serve.engine.calls import expert_counts_of
from eldr_serve.pipeline.admission.latency_admission import AdmissionResult
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.prefill.kv_release import KvRelease
from eldr_serve.queues.prefill_queue import PrefillQueues, Ticket


class Prompt:
    """The interface of a prompt before its decode call; its defaults are for a prompt without resources.

    Attributes:
        prefill_replica: the prefill replica that holds its blocks; "" if the decode engine computes it.
        kv_transfer_params: vLLM's parameters of the KV transfer; None if the decode engine computes the
            prompt.
        prefilled_at_s: end of its prefill, time.monotonic(); None if the decode engine computes it.
        prefilled_ids: uint32[n], its token ids from the prefill engine; None if a decode engine computes it.
        ids_to_compute: uint32[n], its token ids if it has a ticket and they are known.
        tokens_to_compute: estimated number of tokens that the decode engine computes; 0 without a ticket.
        workers_to_avoid: decode workers that would compute the prompt or the answer too late.
    """

    prefill_replica = ""
    kv_transfer_params: dict[str, Any] | None = None
    prefilled_at_s: float | None = None
    prefilled_ids: NDArray[np.uint32] | None = None
    ids_to_compute: NDArray[np.uint32] | None = None
    tokens_to_compute = 0.0
    workers_to_avoid: tuple[str, ...] = ()

    @property
    def expert_counts(self) -> NDArray[np.uint32] | None:
        """Return the prompt's expert counts, uint32[L,E]; None if unknown."""
        return None

    @property
    def remaining_s(self) -> float:
        """Return the predicted time until the decode engine has computed the prompt, s."""
        return 0.0

    def enter(self, worker: str) -> None:
        """Enter the queue of the leased worker."""

    def on_first_token(self) -> None:
        """Record that the decode engine has read or computed the prompt."""

    def on_engine_lost(self) -> None:
        """Record that the channel to the decode engine was lost; the engine itself may be alive."""

    def close(self, reader: Call | None) -> None:
        """Release the prompt's resources.

        Args:
            reader: the decode call, if there was one.
        """


class PrefillStep(Protocol):
    """Prefill on engines of its own (SplitPrefill) or on the decode engines (WholePrefill)."""

    async def prepare(self, context: RequestContext, admission_result: AdmissionResult) -> Prompt:
        """Return the prompt, ready for placement."""


class UncomputedPrompt(Prompt):
    """A prompt that the decode engine computes, and that holds no resources."""


class HeldPrompt(Prompt):
    """A prompt whose KV blocks a prefill replica holds for one decode call.

    When an engine has read the blocks, the prefill engine reuses them at once, so no second call may name
    them. They must not be freed while the first call may still read them, because the decode engine would
    keep wrong data in its prefix cache. An engine whose channel is lost may be alive; then the blocks are
    freed when their lease ends.

    Args:
        request_id: id of the prefill call.
    """

    def __init__(
        self,
        request_id: str,
        prefill_replica: str,
        *,
        prefilled_ids: NDArray[np.uint32],
        kv_transfer_params: dict[str, Any],
        prefilled_at_s: float,
        kv_release: KvRelease,
    ) -> None:
        self.prefilled_ids = prefilled_ids
        self.kv_transfer_params: dict[str, Any] = kv_transfer_params
        self.prefilled_at_s = prefilled_at_s
        self._request_id = request_id
        self.prefill_replica = prefill_replica
        self._kv_release = kv_release
        self._held = True

    @property
    def expert_counts(self) -> NDArray[np.uint32] | None:
        return expert_counts_of(self.kv_transfer_params)

    def on_first_token(self) -> None:
        self._held = False

    def on_engine_lost(self) -> None:
        self._held = False

    def close(self, reader: Call | None) -> None:
        if self._held:
            self._held = False
            self._kv_release.release(self._request_id, self.prefill_replica, reader=reader)


class TicketedPrompt(Prompt):
    """A prompt that the decode engine computes, with a ticket for its prefill queue.

    Args:
        num_tokens: estimated number of tokens to compute; a resumed answer's tokens are computed too.
        on_computed: removes the ticket from its queue, and records the number of computed tokens.
    """

    def __init__(
        self,
        context: RequestContext,
        num_tokens: float,
        queues: PrefillQueues,
        on_computed: Callable[[Ticket, int], None],
        workers_to_avoid: tuple[str, ...],
    ) -> None:
        self.ids_to_compute = context.prompt_ids
        self.workers_to_avoid = workers_to_avoid
        self.tokens_to_compute = num_tokens
        self._num_generated = context.answer.num_ids
        self._ticket = queues.enter(None, num_tokens, context.resend_key)
        self._queues = queues
        self._on_computed = on_computed

    @property
    def remaining_s(self) -> float:
        return self._queues.remaining_s(self._ticket)

    def enter(self, worker: str) -> None:
        self._queues.assign(self._ticket, worker)

    def on_first_token(self) -> None:
        if self.ids_to_compute is None:
            num_computed = round(self._ticket.num_tokens)
        else:
            num_computed = len(self.ids_to_compute) + self._num_generated
        self._on_computed(self._ticket, num_computed)

    def close(self, reader: Call | None) -> None:
        self._queues.leave(self._ticket)
