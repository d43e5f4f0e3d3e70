"""Loads of the decode workers and the cost of their steps, from which a request's latency is predicted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.cost import StepCost, StepSums


@dataclass(frozen=True)
class StepTimeModel:
    """A model that predicts the time of a step from the requests and KV tokens of a worker.

    Attributes:
        cost: cost of a step; None until steps are measured, if the deployment has no prior.
        num_experts: number of experts of all MoE layers; 0 if unknown.
        idle_share: share of them that one request leaves idle in a step. Requests are assumed to be
            independent, so n of them leave `idle_share ** n` of the experts idle.
        prompt_tokens: tokens of new prompts that the engine computes in a step for each request in it; 0
            with separate prefill engines.
        local_prompt_token_s: time of a prompt token that a decode engine computes beside prefill engines, s;
            0 if it was not measured.
    """

    cost: StepCost | None = None
    num_experts: int = 0
    idle_share: float = 1.0
    prompt_tokens: float = 0.0
    local_prompt_token_s: float = 0.0

    @classmethod
    def from_steps(cls, cost: StepCost | None, steps: StepSums, num_experts: int) -> StepTimeModel:
        """Return the model that follows from sums over recent steps.

        Args:
            num_experts: number of experts of all MoE layers; 0 if unknown.
        """
        idle_share = 1.0
        if steps.steps and num_experts:
            active = min(steps.active_experts / steps.steps / num_experts, 1.0)
            idle_share = (1.0 - active) ** (steps.steps / steps.requests)
        _, prompt_requests, _, prompt_tokens, _ = steps.prompts.tolist()
        per_request = prompt_tokens / max(steps.requests + prompt_requests, 1.0)
        local_s = 0.0 if cost is None else steps.prompt_token_s(cost, steps.local_prompts)
        return cls(cost, num_experts, idle_share, per_request, local_s)

    def seconds(self, requests: float, kv_tokens: float) -> float:
        """Return the time of a step, s, of a worker with these requests and KV tokens.

        Raises:
            ValueError: the cost is unknown.
        """
        if self.cost is None:
            raise ValueError("the cost of a step is unknown")
        active = self.num_experts * (1.0 - self.idle_share**requests)
        return float(self.cost.seconds(requests, kv_tokens, active, self.prompt_tokens * requests))


@dataclass(frozen=True, eq=False)
class WorkerLoads:
    """Loads of the available decode workers, as columns.

    Attributes:
        names: names of the workers.
        in_flight: int64[W], requests of each worker.
        kv_tokens: int64[W], prompt + generated tokens of these requests.
        cached_tokens: int64[W], tokens of the prompt in question that are expected in its prefix cache.
    """

    names: tuple[str, ...]
    in_flight: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Return the row of each worker, by name."""
        return {name: row for row, name in enumerate(self.names)}


class CachedShare:
    """Share of the tokens of the newest prompts that were expected in prefix caches.

    Args:
        prompts: number of newest prompts; with fewer of them the share follows changes of traffic sooner.

    Attributes:
        value: the share, from 0 to 1; 0 before the first prompt.
    """

    def __init__(self, prompts: int = 512) -> None:
        self.value = 0.0
        self._prompts: deque[tuple[int, int]] = deque([(0, 0)] * prompts)  # cached tokens, tokens
        self._cached = self._tokens = 0

    def record(self, cached_tokens: int, prompt_tokens: int) -> None:
        """Add a prompt."""
        oldest_cached, oldest_tokens = self._prompts.popleft()
        self._prompts.append((cached_tokens, prompt_tokens))
        self._cached += cached_tokens - oldest_cached
        self._tokens += prompt_tokens - oldest_tokens
        self.value = self._cached / max(self._tokens, 1)


@dataclass(frozen=True)
class DecodeLoads:
    """Loads of all decode workers, as the router knows them.

    Attributes:
        workers: loads of the workers.
        waiting: requests in the decode queue.
        step: cost of steps.
        cached_share: share of the newest prompts' tokens that was expected in prefix caches.
    """

    workers: WorkerLoads
    waiting: int = 0
    step: StepTimeModel = StepTimeModel()
    cached_share: float = 0.0
