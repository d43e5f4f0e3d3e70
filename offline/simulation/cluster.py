"""The simulated deployment: prefill workers, hand-over, decode workers, and their costs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eldr_serve.scheduling import StepCost

Seconds = Annotated[float, Field(ge=0)]


class ScenarioPart(BaseModel):
    """Base class of the parts of a scenario."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Prefill(ScenarioPart):
    """Prefill workers, each of which serves one prompt after the other."""

    workers: int = Field(ge=1, description="prefill workers")
    fixed_s: Seconds = Field(default=0.0, description="every prompt, s")
    per_token_s: Seconds = Field(default=0.0, description="each prompt token that is in no prefix cache, s")
    cache_blocks: int = Field(default=0, ge=0, description="prefix blocks that a worker keeps")
    block_tokens: int = Field(default=512, ge=1, description="tokens of a prefix block")
    max_load_ratio: float = Field(
        default=1.25,
        ge=1,
        description="load relative to the mean above which other workers get the prompts of a worker's "
        "prefixes",
    )
    kv_tokens: int | None = Field(
        default=None,
        ge=1,
        description="KV tokens that fit on a worker; a prompt's tokens stay there until the end of its "
        "hand-over; null: any number",
    )
    max_kv_usage: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="share of its KV tokens in use above which a worker gets no new prompt; prompts that no "
        "worker takes wait in order of arrival",
    )
    max_wait_s: float | None = Field(
        default=None,
        gt=0,
        description="maximum wait for a worker that takes the prompt, after which its request is refused, s; "
        "null: unlimited",
    )


class Whole(ScenarioPart):
    """Workers that also prefill: a step computes a token of each answer, then prompts."""

    step_tokens: int = Field(default=2048, ge=2, description="maximum tokens of a step; above max_batch")
    cache_blocks: int = Field(default=0, ge=0, description="prefix blocks that a worker keeps")
    block_tokens: int = Field(default=512, ge=1, description="tokens of a prefix block")


class Decode(ScenarioPart):
    """Decode workers with continuous batching."""

    workers: int = Field(ge=1, description="decode workers")
    max_batch: int = Field(default=256, ge=1, description="maximum running requests of a worker; more queue")
    kv_tokens: int | None = Field(
        default=None, ge=1, description="KV tokens that fit on a worker; null: any number"
    )
    recompute_per_token_s: Seconds = Field(
        default=0.0, description="each token of a preempted request when it resumes, s"
    )
    ranks: int = Field(
        default=1,
        ge=1,
        description="data-parallel ranks of a replica: workers that divide the experts, and whose steps end "
        "together with that of the slowest",
    )
    barrier: bool = Field(default=False, description="all workers are the ranks of one replica")
    cost: StepCost = Field(default=StepCost(), description="time of a step, s: the sum of its terms")
    whole: Whole | None = Field(default=None, description="null: prompts arrive prefilled")

    @property
    def ranks_per_replica(self) -> int:
        return self.workers if self.barrier else self.ranks

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.barrier and self.ranks > 1:
            raise ValueError("all workers are ranks of one replica: omit ranks or barrier")
        if self.workers % self.ranks:
            raise ValueError(f"{self.workers} workers are not divisible by {self.ranks} ranks")
        return self

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if self.whole is not None and self.whole.step_tokens <= self.max_batch:
            raise ValueError("whole.step_tokens must be above max_batch, or prompts may wait forever")
        if self.whole is not None and self.kv_tokens is not None:
            raise ValueError("whole replicas hold any number of KV tokens: omit kv_tokens")
        return self


class Cluster(ScenarioPart):
    """A simulated deployment."""

    decode: Decode
    prefill: Prefill | None = Field(default=None, description="null: prompts are prefilled at arrival")
    router_s: Seconds = Field(
        default=0.0, description="time of the router for a placement, s; placements follow each other"
    )
    handover_fixed_s: Seconds = Field(default=0.0, description="from the placement to the decode queue, s")
    handover_per_token_s: Seconds = Field(default=0.0, description="additionally for each KV token, s")
    queue_timeout_s: float | None = Field(
        default=None, gt=0, description="maximum wait in the decode queue, s; null: unlimited"
    )
    progress_s: float = Field(
        default=0.25, gt=0, description="period of reports of generated tokens to the policy, s"
    )

    @model_validator(mode="after")
    def _check_prefill(self) -> Self:
        if self.prefill is not None and self.decode.whole is not None:
            raise ValueError("whole replicas prefill: omit prefill")
        return self
