"""The messages between the connector's two sides, one in each direction per step.

The engine core sends plans to its workers, and the first worker returns counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from eldr_serve.engine.vllm.capture.host_copy import HostCopy
from eldr_serve.engine.vllm.compat.nixl import NixlConnectorMetadata


@dataclass
class StepPlan:
    """The scheduler's instructions for one step, besides the transfer itself.

    Attributes:
        new_blocks: ids of the KV blocks whose first slot is written in this step.
        finished_prompts: request id -> KV block ids of the prompt, for prompts whose prefill ends here.
        decode_slots: request id -> position of the first token generated in this step, and the KV slots of
            all tokens generated in it, for requests whose decode experts are counted.
        requests, tokens, kv_tokens: size of the step, and number of KV tokens that it attends to.
        drafts: number of tokens that are drafts to be verified (speculative decoding).
    """

    new_blocks: list[int] = field(default_factory=list)
    finished_prompts: dict[str, list[int]] = field(default_factory=dict)
    decode_slots: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    drafts: int = 0

    @property
    def is_decode(self) -> bool:
        """Return whether this is a pure decode step: one token per request, and drafts after it."""
        return self.tokens - self.drafts == self.requests > 0

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens beyond one per request: parts of prompts."""
        return max(0, self.tokens - self.drafts - self.requests)


@dataclass
class StepRoutes:
    """The experts chosen by the generated tokens of one step that are counted (StepPlan.decode_slots).

    Attributes:
        num_experts: number of experts in a layer.
        spans: request id -> position of its first token, and number of its tokens in `chosen`.
        chosen: int16[tokens,L,k], request after request in the order of `spans`.
    """

    num_experts: int
    spans: dict[str, tuple[int, int]]
    chosen: HostCopy

    def split_by_request(self) -> Iterator[tuple[str, int, NDArray[np.int16]]]:
        """Yield each request's id, the position of its first token, and its part of `chosen`."""
        chosen, start = self.chosen.wait(), 0
        for request, (first, tokens) in self.spans.items():
            yield request, first, chosen[start : start + tokens]
            start += tokens


@dataclass
class StepCounts:
    """The results of one step.

    Attributes:
        prompts: request id -> expert counts int32[L,E], for StepPlan.finished_prompts.
        routes: the experts of generated tokens; None if the plan has no `decode_slots`.
    """

    prompts: dict[str, HostCopy] = field(default_factory=dict)
    routes: StepRoutes | None = None


class EldrConnectorMetadata(NixlConnectorMetadata):
    """The message from the scheduler to the workers: NIXL's part, the step's plan, and finished prompts."""

    plan: StepPlan
    held_prompts: dict[str, str]  # finished prompts with held blocks: engine's id -> caller's name


@dataclass
class EldrConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """The message from the first worker to the scheduler."""

    counts: StepCounts

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self
