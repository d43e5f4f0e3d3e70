"""The decode steps that a cost predicts for some batches, and a bound on what placement can save."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_serve.gpu_cost.readings import Shape
from eldr_serve.gpu_cost.routing import independent_experts, shared_experts
from eldr_serve.scheduling import StepCost

CONTEXT_TOKENS = 1024  # KV tokens of each request
BATCH_SIZES = (1, 8, 32)


@dataclass(frozen=True)
class ExpectedStep:
    """A decode step whose requests draw their experts independently of each other.

    Attributes:
        requests: number of requests.
        seconds: time of the step, s.
        experts_share: share of that time that active experts take.
        most_saved: share that placement would save if all requests of the batch used the same experts. No
            step activates fewer experts than such a batch; real requests share fewer.
    """

    requests: int
    seconds: float
    experts_share: float
    most_saved: float


def expected_steps(cost: StepCost, shape: Shape) -> list[ExpectedStep]:
    """Return the steps of BATCH_SIZES requests with CONTEXT_TOKENS KV tokens each."""
    steps = []
    for requests in BATCH_SIZES:
        independent = shape.layers * independent_experts(requests, shape)
        shared = shape.layers * min(shared_experts(shape), independent / shape.layers)
        seconds = float(cost.seconds(requests, requests * CONTEXT_TOKENS, independent))
        steps.append(
            ExpectedStep(
                requests,
                seconds,
                cost.per_expert_s * independent / seconds,
                cost.per_expert_s * (independent - shared) / seconds,
            )
        )
    return steps
