"""Loads of the decode workers and the cost of their steps, from which a request's latency is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_serve.scheduling.cost import StepCost, StepSums


@dataclass(frozen=True)
class StepLoad:
    """The cost of the engines' steps, and the experts that a request adds to a step.

    Attributes:
        cost: cost of a step; None until steps are measured, if the deployment has no prior.
        num_experts: number of experts of all MoE layers; 0 if unknown.
        idle_share: share of them that one request leaves idle in a step. Requests are taken as independent,
            so n of them leave `idle_share ** n` of the experts idle.
        prompt_tokens: tokens of new prompts that the engine computes in a step for each request in it; 0
            with separate prefill engines.
    """

    cost: StepCost | None = None
    num_experts: int = 0
    idle_share: float = 1.0
    prompt_tokens: float = 0.0

    @classmethod
    def from_steps(cls, cost: StepCost | None, steps: StepSums, num_experts: int) -> StepLoad:
        """Return the load by sums over recent steps.

        Args:
            num_experts: number of experts of all MoE layers; 0 if unknown.
        """
        idle_share = 1.0
        if steps.steps and num_experts:
            active = min(steps.active_experts / steps.steps / num_experts, 1.0)
            idle_share = (1.0 - active) ** (steps.steps / steps.requests)
        _, prompt_requests, _, prompt_tokens, _ = steps.prompts.tolist()
        per_request = prompt_tokens / max(steps.requests + prompt_requests, 1.0)
        return cls(cost, num_experts, idle_share, per_request)

    def seconds(self, requests: float, kv_tokens: float) -> float:
        """Return the time of a step, s, of a worker with this load.

        Raises:
            ValueError: the cost is unknown.
        """
        if self.cost is None:
            raise ValueError("the cost of a step is unknown")
        active = self.num_experts * (1.0 - self.idle_share**requests)
        return float(self.cost.seconds(requests, kv_tokens, active, self.prompt_tokens * requests))


@dataclass(frozen=True)
class WorkerLoad:
    """Load of one decode worker.

    Attributes:
        in_flight: requests.
        kv_tokens: prompt + generated tokens of these requests.
        cached_tokens: tokens of the prompt in question that are expected in the worker's prefix cache.
    """

    in_flight: int
    kv_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class DecodeLoads:
    """Loads of all decode workers, as the router knows them.

    Attributes:
        workers: load of each worker, by name.
        waiting: requests in the decode queue.
        step: cost of steps.
        cached_share: share of the prompt tokens of earlier requests that was expected in prefix caches.
    """

    workers: dict[str, WorkerLoad]
    waiting: int = 0
    step: StepLoad = StepLoad()
    cached_share: float = 0.0
