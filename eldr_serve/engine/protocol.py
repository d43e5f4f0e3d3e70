"""The engine interface that serving and calibration use.

`eldr_serve.engine.vllm` implements it with vLLM, and `eldr_serve.engine.fake` without any computation.
Array sizes: L MoE layers, E experts per layer, k experts per token, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.engine.calls import GenerationReport
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize

# "whole": the engine prefills and decodes (aggregated serving); the other roles are disaggregated.
EngineRole = Literal["prefill", "decode", "whole"]
Device = Literal["gpu", "cpu"]
MAX_SAMPLES = 256  # maximum number of samples that an engine keeps until `take_samples`


class Send(Protocol):
    """A callback that receives each part of an answer as soon as it is generated."""

    def __call__(self, payload: bytes, tokens: int, ids: bytes = b"") -> None:
        """Receive a part of an answer.

        Args:
            payload: bytes of the answer.
            tokens: number of generated tokens in the payload.
            ids: ids of all those tokens, uint32 bytes, if another engine could continue after them; else
                empty.
        """


class EngineRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's request on its way to an engine, and the header of all calls to engine servers.

    Attributes:
        method: "chat", "completions", "messages", "responses", or an endpoint that generates nothing
            ("embeddings", ...). Empty in calls that serve no request.
        body: JSON, as the client sent it; the engine validates it.
        id: identifier that the caller assigned to this call.
        headers: HTTP headers of the client's request.
        kv_transfer_params: `PrefilledPrompt.kv_transfer_params` without the expert counts, if the prompt's KV
            blocks are to be read from another engine.
        token_ids: token ids of the prompt, uint32 bytes, if prefill has already computed them.
        cache_salt: prompts share cached prefixes only with prompts of the same salt, and the client's
            priority is ignored. If empty, the client's own salt and priority apply.
        generated: token ids that a lost engine has already sent, uint32 bytes. The engine appends them to
            the prompt and continues the answer after them.
        tokens_to_compute: the caller's estimate of the prompt tokens to compute; 0 if there is none.
        created: timestamp in the events that were sent with `generated`, in seconds since 1970.
        sampled: record an ExpertSample of the request, which `take_samples` returns.
        domain: the client's label for the kind of request, copied to the sample.
        expert_counts: packed expert counts of the prompt, from the engine that prefilled it, for the sample.
            Empty if this engine prefills.
        rank: data-parallel rank that generates the answer; None: any.
    """

    method: str = ""
    body: bytes = b""
    id: str = ""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None
    token_ids: bytes = b""
    cache_salt: str = ""
    generated: bytes = b""
    created: int | None = None
    tokens_to_compute: float = 0.0
    sampled: bool = False
    domain: str = ""
    expert_counts: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class PrefilledPrompt:
    """A prompt whose KV blocks an engine holds for another engine.

    Attributes:
        token_ids: uint32[T], without tokens that a lost engine had generated.
        kv_transfer_params: location of the blocks, for `generate` of the other engine. Callers read only the
            entry `calls.EXPERT_COUNTS_KEY`: the prompt's expert counts uint32[L,E] (`signature.pack_counts`).
    """

    token_ids: NDArray[np.uint32]
    kv_transfer_params: dict[str, Any]


class ServesRequests(Protocol):
    """The part of an engine that computes prompts and answers.

    A method that refuses a request raises RequestRefusedError, or CallFailedError with the response body.
    `status_of` maps all other errors to an HTTP status. Cancelling a call ends the request in the engine.
    """

    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
        """Compute the prompt and hold its KV blocks until they are read or released, or their lease ends.

        Refuse the requests that `generate` would refuse, with the same message, before any step runs.
        """

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        """Send the answer (the events of a stream, or one JSON body), and return a report on the call."""

    async def wait_for_counts(self, request_id: str) -> tuple[int, str]:
        """Wait until `generate` has computed a prompt, and return its expert counts.

        Call it before `generate`. With an engine that counts no experts, the call never returns. Therefore
        run it beside `generate`, and cancel it when `generate` has ended.

        Args:
            request_id: EngineRequest.id of the `generate` call.

        Returns:
            Number of prompt tokens, and expert counts uint32[L,E] packed by `signature.pack_counts`.
        """

    async def serve_endpoint(self, request: EngineRequest, send: Send) -> None:
        """Send the answer of an endpoint that generates nothing.

        Raises:
            RequestRefusedError: the engine has no such endpoint.
        """

    async def release(self, request_id: str) -> None:
        """Free the KV blocks of a prefill that no engine will read.

        If the prefill still runs, free them at its end. An unknown id is ignored.

        Args:
            request_id: EngineRequest.id of the `prefill` call.
        """

    def status_of(self, error: Exception) -> int:
        """Return the HTTP status of an error that a method raised: below 500 if the request is at fault."""

    def parameter_of(self, error: Exception) -> str | None:
        """Return the field of the request that is at fault; None if no single field is."""


class HasSizes(Protocol):
    """The part of an engine that returns its sizes, which do not change."""

    async def measure_shape(self) -> tuple[int, int]:
        """Prefill a test prompt and return the shape (L, E) of its counts.

        Raises:
            ConfigurationError: the engine failed the prompt, or does not count experts.
        """

    def ranks(self) -> int:
        """Return the number of data-parallel ranks, each with its own requests and KV cache.

        An engine without data parallelism has one.
        """

    def slots(self) -> int | None:
        """Return the number of requests that one step of a rank can serve; None if it is unknown.

        Further requests wait.
        """

    def prefix_cache(self) -> PrefixCacheSize | None:
        """Return the size of a rank's prefix cache; None if it has no prefix cache."""


class TakesMeasurements(Protocol):
    """The part of an engine that measures its load, its steps and the experts of its requests."""

    def kv_usage(self, rank: int | None = None) -> float:
        """Return the share of KV blocks in use after the newest step, 0 to 1.

        Args:
            rank: a data-parallel rank; None: the one with the largest share.
        """

    def take_prefix_changes(self, *, full: bool) -> BlockChanges | None:
        """Return the changes of the prefix cache since the last call; None if there are none.

        The changes include the blocks of answers. An engine that does not report blocks returns None.

        Args:
            full: return all cached blocks instead of the changes.
        """

    def take_steps(self, rank: int = 0) -> StepSums:
        """Return sums over the steps of a data-parallel rank since the last call."""

    def take_samples(self) -> list[ExpertSample]:
        """Return samples of the sampled requests that ended since the last call, the oldest first.

        A sample exists only for an answer that the engine itself ended, by its length or a stop token,
        after at least one decode step. The engine keeps at most MAX_SAMPLES and drops the oldest.
        """


class MovesExperts(Protocol):
    """The part of an engine that moves experts between its expert-parallel ranks."""

    async def place_experts(
        self, placement: ExpertPlacement, load: ArrayLike | None = None
    ) -> dict[str, Any]:
        """Move the experts of the engine's ranks to a placement while it serves; answers do not change.

        A cancelled call leaves the experts where it has moved them so far.

        Args:
            placement: the new placement.
            load: float[L, E], expected number of tokens of each expert, for replica choices that use it;
                None: unchanged.

        Returns:
            JSON types: `placement` (its id), `slices` (each moved between two steps), `experts` that
            changed slots, `received_bytes` between ranks, `seconds`.

        Raises:
            RequestRefusedError: the placement does not fit (400), another swap is under way (409), or the
                engine's experts cannot be moved (400); nothing was changed.
        """

    def expert_status(self) -> dict[str, Any] | None:
        """Return the expert placement of the ranks; None if experts cannot be moved.

        Returns:
            JSON types: `placement` (its id), `ranks`, `slots` of a layer, `replica_choice`, `slices_left` of
            the swap that is under way, and `experts_moved` since the start. In bytes and summed over all
            ranks: `weight_bytes` without replicas, `replica_bytes` of the redundant slots, `slice_bytes`
            (the most that a swap uses in addition), and `bytes_received` since the start.
        """


class HasLifeCycle(Protocol):
    """The part of an engine that is watched and stopped."""

    async def ping(self) -> None:
        """Return when the engine's core has answered, which it does between two steps and when idle.

        May never return if the core is dead or stuck.
        """

    async def check_health(self) -> None:
        """Raise if the engine is known to need replacement; return at once otherwise."""

    async def stop(self) -> None:
        """Stop the engine; no other method is called afterwards."""


class Engine(ServesRequests, HasSizes, TakesMeasurements, MovesExperts, HasLifeCycle, Protocol):
    """A running engine in this process, for one replica of a deployment.

    Its owner is an engine server (`eldr_serve.replicas.servers`).
    """


class EngineConfig(Protocol):
    """The part of an engine's settings that serving reads; Ray's LLMConfig implements it."""

    @property
    def deployment_config(self) -> dict[str, Any]:
        """Return the options of the Ray Serve deployment."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the largest step of one rank.

    Attributes:
        tokens: `max_num_batched_tokens`.
        data_ranks: number of data-parallel ranks; the MoE kernel of each may get the tokens of all ranks.
        sequences: `max_num_seqs`.
        hidden: hidden size.
        top_k: experts per token.
        expert_width: intermediate size of an expert on this rank.
        vocabulary: number of tokens in the vocabulary.
        element: size of an activation, bytes.
    """

    tokens: int
    sequences: int
    hidden: int
    top_k: int
    expert_width: int
    vocabulary: int
    element: int
    data_ranks: int = 1


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a prompt for calibration.

    Attributes:
        max_tokens: maximum number of generated tokens.
        temperature: 0 for greedy.
        ignore_eos: continue after the model's end token.
        seed: makes the sampled text reproducible.
        routes: whether to return the experts of each decode step as well.
    """

    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    seed: int | None = None
    routes: bool = False


class CalibrationEngine(Protocol):
    """An engine for calibration, which counts the experts of prefill and decode separately."""

    max_model_len: int  # maximum number of tokens of a prompt and its answer

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer, with the interface of transformers."""

    def calibrate(self, prompts: Sequence[list[int]], sampling: Sequence[Sampling]) -> list[dict[str, Any]]:
        """Generate answers to a batch of tokenized prompts and return the counts of each.

        Returns:
            For each prompt, JSON types: `token_ids` (of the prompt), `eldr_prefill` and `eldr_decode`
            (uint32[L,E], packed by `pack_counts`), `eldr_decode_steps`, and `eldr_routes` (int[steps,L,k],
            packed by `pack_routes`) or None.
        """
