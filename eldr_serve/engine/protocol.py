"""All that serving and calibration know of an engine.

vLLM's are in `eldr_serve.engine.vllm`; `eldr_serve.engine.fake` has one that computes nothing.
Array sizes: L MoE layers, E experts a layer, k experts a token, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.expert_placement import ExpertPlacement
from eldr_serve.expert_sample import ExpertSample
from eldr_serve.routing.cost import StepSums

MAX_SAMPLES = 256  # maximum that an engine keeps until `take_samples`


class Send(Protocol):
    """Takes a part of an answer as soon as it is made."""

    def __call__(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """
        Args:
            tokens: generated tokens in it.
            ids: uint32 each, of all those tokens, if another engine can go on after them; else empty.
        """


@dataclass(frozen=True)
class EngineRequest:
    """A client's request on its way to an engine.

    Attributes:
        method: "chat", "completions", or an endpoint that generates nothing ("embeddings", ...).
        body: JSON, as the client sent it; the engine validates it.
        id: identifier that the caller assigned to this call.
        headers: HTTP headers of the client's request.
        kv: result of `prefill`, if the prompt's KV blocks are to be read from another engine.
        token_ids: token ids of the prompt, uint32 bytes, if prefill has already computed them.
        cache_salt: prompts share cached prefixes only with prompts of the same salt, and the client's
            priority is ignored. If empty, the client's own salt and priority apply.
        generated: token ids that a lost engine has already sent, uint32 bytes. The engine appends them to
            the prompt and continues the answer after them.
        prompt_tokens: the caller's estimate of the tokens to compute; 0 if there is none.
        created: timestamp in the events that were sent with `generated`, s since 1970.
        sampled: record an ExpertSample of the request, which `take_samples` returns.
        domain: the client's label for the kind of request, copied to the sample.
        signature: packed expert counts of the prompt, from the engine that prefilled it, for the sample.
            Empty if this engine prefills.
    """

    method: str
    body: bytes
    id: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    kv: dict[str, Any] | None = None
    token_ids: bytes = b""
    cache_salt: str = ""
    generated: bytes = b""
    created: int | None = None
    prompt_tokens: float = 0.0
    sampled: bool = False
    domain: str = ""
    signature: str = ""


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV blocks an engine holds for another.

    Attributes:
        token_ids: uint32[T], without what was generated before.
        kv: where the blocks lie, for `generate` of the other engine, which alone understands it; and, under
            `keys.SIGNATURE`, the prompt's expert counts uint32[L,E] as `signature.pack_counts` writes them.
    """

    token_ids: NDArray[np.uint32]
    kv: dict[str, Any]


class DescribesErrors(Protocol):
    """Describes the errors that the methods of an engine raise."""

    def status_of(self, error: Exception) -> int:
        """Return the HTTP status of an error that a method raised: below 500 if the request is at fault."""

    def parameter_of(self, error: Exception) -> str | None:
        """Return the field of the request that is at fault; None if no single field is."""


class Engine(DescribesErrors, Protocol):
    """A running engine in this process, for one replica of a deployment.

    Where a method refuses a request, it raises Refused, or CallFailed with the body that tells the client.
    What else it raises is worded by `status_of`. A call that is cancelled ends the request in the engine.
    """

    async def prefill(self, request: EngineRequest) -> Prefilled:
        """Compute the prompt and hold its KV blocks until they are read, released, or their lease ends.

        A request that `generate` would refuse is refused here, in the same words, before it costs a step.
        """

    async def generate(self, request: EngineRequest, send: Send) -> float | None:
        """Send the answer: the events of a stream, or one JSON body.

        Returns:
            Time until the first step of the request began, s, in which its prompt's blocks came from another
            engine, if they did; None if it is not known.
        """

    async def signature(self, request_id: str) -> tuple[int, str]:
        """Of the prompt that `generate` computes here, under this name: its tokens, and its expert counts
        uint32[L,E] as `signature.pack_counts` writes them; as soon as it is computed.

        Asked before `generate` is; where the engine counts nothing, the answer never comes.
        """

    async def answer(self, request: EngineRequest, send: Send) -> None:
        """Send the answer of an endpoint that generates nothing; Refused if the engine has none such."""

    async def release(self, request_id: str) -> None:
        """Nobody will read the blocks of this prefill: free them, now or, while it runs, when it ends."""

    async def shape(self) -> tuple[int, int]:
        """(L, E) of the signatures that `prefill` makes, as a prompt of its own shows.

        Raises:
            ConfigurationError: the engine fails that prompt, or counts no experts; one sentence says why.
        """

    async def place_experts(
        self, placement: ExpertPlacement, load: ArrayLike | None = None
    ) -> dict[str, Any]:
        """Bring the experts of the engine's ranks to a placement while it serves; answers do not change.

        A call that is cancelled leaves the experts where it has moved them so far.

        Args:
            load: float[L, E], tokens that each expert is expected to get, for replica choices that ask;
                None: as before.

        Returns:
            What it took, JSON-able: `placement` (its id), `slices` between two steps each, `experts` that
            changed slots, `received_bytes` between ranks, `seconds`.

        Raises:
            Refused: the placement does not fit (400), another swap is under way (409), or the engine's
                experts cannot be moved (400); all stays as it is.
        """

    def experts(self) -> dict[str, Any] | None:
        """What its ranks hold, JSON-able; None where experts cannot be moved.

        `placement` (its id), `ranks`, `slots` of a layer, `replica_choice`, `slices_left` of a swap that is
        under way, `experts_moved` since the start, and in bytes, over all ranks: `weight_bytes` without
        replicas, `replica_bytes` of the redundant slots, `slice_bytes` that a swap may take beside them,
        `bytes_received` since the start.
        """

    def kv_usage(self) -> float:
        """Share of KV blocks in use after the newest step, 0 to 1."""

    def prefix_cache(self) -> tuple[int, int]:
        """Tokens of a block of the prefix cache, and tokens that the KV cache holds; (0, 0) without one."""

    def seats(self) -> int:
        """Return how many requests one step can serve; further requests wait. 0 if unknown."""

    def take_steps(self) -> StepSums:
        """Sums over the steps since the last call."""

    def take_samples(self) -> list[ExpertSample]:
        """Return samples of the sampled requests that ended since the last call, the oldest first.

        A sample exists only for an answer that the engine itself ended, by its length or a stop token,
        after at least one decode step. The engine keeps at most MAX_SAMPLES and drops the oldest.
        """

    async def ping(self) -> None:
        """Return when the engine's core has answered, as it does between two steps, be it busy or idle.

        Never, perhaps, if the core has died or stands still.
        """

    async def check_health(self) -> None:
        """Raise if the engine must be replaced; what it knows of that it says at once."""

    async def stop(self) -> None:
        """End it; nothing is asked of it afterwards."""


class EngineConfig(Protocol):
    """What serving reads of the settings that an engine is started with; Ray's LLMConfig is one."""

    @property
    def deployment_config(self) -> dict[str, Any]:
        """Options of the Ray Serve deployment."""


@dataclass(frozen=True)
class Sampling:
    """How a traced prompt goes on.

    Attributes:
        max_tokens: generated at most.
        temperature: 0 for greedy.
        ignore_eos: go on after the model's end token.
        seed: with one the same text can be sampled again.
        routes: whether each decode step's experts are kept, too.
    """

    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    seed: int | None = None
    routes: bool = False


class Tracer(Protocol):
    """An engine of its own for calibration, which counts the experts of prefill and decode apart."""

    max_model_len: int  # tokens of a prompt and its answer, at most

    @property
    def tokenizer(self) -> Any:
        """The model's, as of transformers."""

    def trace(self, prompts: Sequence[list[int]], sampling: Sequence[Sampling]) -> list[dict[str, Any]]:
        """Run prompts of token ids together; of each, as JSON types:

        `token_ids` (of the prompt), `eldr_prefill` and `eldr_decode` (uint32[L,E], as `pack_counts` writes
        them), `eldr_decode_steps`, and `eldr_routes` (int[steps,L,k], as `pack_routes` does) or None.
        """


def several_prompts(prompt: Any) -> bool:
    """Whether a completion's `prompt` is a list of prompts, be there but one, and not one of tokens."""
    return isinstance(prompt, list) and not (bool(prompt) and isinstance(prompt[0], int))
