"""The state of a request over all its attempts, and its line of the log."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.pipeline.context.failures import Failures
from eldr_serve.pipeline.context.partial_answer import PartialAnswer
from eldr_serve.pipeline.context.request_record import RequestRecord
from eldr_serve.request import Request, has_exact_ids
from eldr_serve.scheduling.prefixes import PromptBlocks, prompt_blocks
from eldr_serve.scheduling.types import Lease
from eldr_serve.scheduling.worker_names import replica_of


@dataclass(eq=False)
class RequestContext:
    """A request over all its attempts, and a context manager for the work on it.

    Within an attempt, steps return an AdmissionResult, a Prompt and a Lease, which AttemptSteps passes on.

    Attributes:
        request: the client's request.
        url_path: path of the URL.
        on_end: called when the work has ended.
        on_overflow: called when the client reads too slowly and the buffer is full; the answer ends there.
        trace_id: id of the trace; "" if the request is not traced.
        request_id: id in answers, logs and engines.

        lease: newest lease of a decode worker; set by AttemptSteps.
        prefilled_ids: uint32[n], the prompt's token ids from prefill, set by AttemptSteps; None before.
        tokenised_ids: uint32[n], its token ids from this ingress, set by PromptTokenizer; None before.
        failures: failures of the attempts.
        drained_workers: decode workers that the answer has left because their replicas drain.
        answer: the answer so far; appended to by DecodeStep.
        record: times and outcome, for the log; each step adds its own.
    """

    request: Request
    url_path: str = ""
    on_end: Callable[[RequestContext], None] = lambda context: None
    on_overflow: Callable[[], None] = lambda: None
    trace_id: str = ""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    lease: Lease | None = None
    prefilled_ids: NDArray[np.uint32] | None = None
    tokenised_ids: NDArray[np.uint32] | None = None
    failures: Failures = field(default_factory=Failures)
    drained_workers: list[str] = field(default_factory=list)
    answer: PartialAnswer = field(init=False)
    record: RequestRecord = field(default_factory=RequestRecord)

    def __post_init__(self) -> None:
        self.answer = PartialAnswer(stream=bool(self.request.fields.stream))

    # -- prompt ----------------------------------------------------------------------------------

    @property
    def prompt_ids(self) -> NDArray[np.uint32] | None:
        """Return the prompt's token ids, uint32[n], preferably the prefill engine's; None if unknown."""
        return self.tokenised_ids if self.prefilled_ids is None else self.prefilled_ids

    @property
    def predictable_ids(self) -> NDArray[np.uint32] | None:
        """Return `prompt_ids`; None for an adapter, since the predictor knows the base model's experts."""
        return None if self.request.adapter else self.prompt_ids

    def blocks(self, token_ids: NDArray[np.uint32], block_tokens: int) -> PromptBlocks:
        """Return the blocks of the prompt with these ids, uint32[n]; see prompt_blocks."""
        salt = self.request.cache_salt or self.request.fields.cache_salt or ""
        if self.request.adapter:
            salt = json.dumps([self.request.adapter, salt])
        return prompt_blocks(token_ids, block_tokens, salt, exact=has_exact_ids(self.request))

    @property
    def due_in_s(self) -> float | None:
        """Return the time until the objective of the first token, s; None without one or if it has passed."""
        if self.request.objective.ttft_s is None:
            return None
        remaining_s = self.record.started_at_s + self.request.objective.ttft_s - time.monotonic()
        return remaining_s if remaining_s > 0 else None

    @cached_property
    def resend_key(self) -> bytes:
        """Return a digest of tenant and body, to recognise the request when its client sends it again."""
        digest = hashlib.blake2b(f"{self.request.tenant}\0".encode(), digest_size=16)
        digest.update(self.request.body)
        return digest.digest()

    @property
    def has_earlier_attempt(self) -> bool:
        """Return whether an attempt came before this one; the request is then admitted without a limit."""
        return bool(self.answer.num_tokens or self.failures.attempts)

    @property
    def past_replicas(self) -> set[str]:
        """Return the decode replicas that failed the request or that its answer has left."""
        return set(map(replica_of, (*self.failures.decode_workers, *self.drained_workers)))

    def used_tokens(self, prompt_tokens: int) -> int:
        """Return the number of tokens that count towards the tenant's limit; 0 without a lease.

        Args:
            prompt_tokens: estimated length of the prompt, used if its tokens were not counted.
        """
        if self.lease is None:
            return 0
        return (self.lease.request.prompt_tokens or prompt_tokens) + self.lease.generated_tokens

    # -- log -------------------------------------------------------------------------------------

    def __enter__(self) -> RequestContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.record.end(error):
            self.failures.messages.append(self.record.error)
        self.on_end(self)

    def log_line(self) -> dict[str, Any]:
        """Return the request's line of the log as JSON types; times in s, stages summed over all attempts."""
        lease, record = self.lease, self.record
        return {
            "request": self.request_id,
            "trace": self.trace_id or None,
            "path": self.url_path,
            "tenant": self.request.tenant,
            "status": record.status,
            "error": record.error or None,
            "disconnected": record.client_disconnected,
            "policy": lease.policy if lease else None,
            "reason": lease.reason if lease else None,
            "prefill": record.prefill_replica,
            "local_prefill": record.prefilled_locally,
            "decode": lease.worker if lease else None,
            "prompt_tokens": lease.request.prompt_tokens if lease else None,
            "tokens": lease.generated_tokens if lease else 0,
            "seconds": {name: round(value, 6) for name, value in record.seconds.items()},
            "failures": self.failures.messages,
        }
