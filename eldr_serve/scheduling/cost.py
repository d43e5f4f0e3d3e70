"""Cost of an engine step, fitted to the engines' step records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from scipy.optimize import nnls

_MAX_S = 1e6
Seconds = Annotated[float, Field(ge=0, le=_MAX_S)]
Batch = Annotated[int, Field(ge=1, le=2**31 - 1)]


class StepAnswer(NamedTuple):
    """The router's answer to a replica's report of its steps.

    Attributes:
        queued: the replica's share of the requests in the decode queue, by its number of workers.
        has_all_blocks: whether the router knows all blocks in the prefix caches of the replica's workers;
            otherwise the next report should list all of them.
    """

    queued: float
    has_all_blocks: bool


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class StepCost:
    """Time of a decode step, linear in requests, KV tokens, active experts and prompt tokens.

    On a GPU the time also jumps with the batch size, because kernels compute tiles, and CUDA graphs exist for
    some sizes only. `batch_s` lists this part for some sizes; between two of them and beyond the last one, it
    is linear.

    The ratios of the defaults hold for a small model on a CPU core. Placement hardly depends on them,
    and fitted values replace them after the first steps.
    """

    fixed_s: Seconds = Field(default=4e-3, description="every step, s")
    per_request_s: Seconds = Field(default=1e-4, description="each request of the batch, s")
    per_kv_token_s: Seconds = Field(default=0.0, description="each KV token of the batch, s")
    per_expert_s: Seconds = Field(
        default=4e-5,
        description="each active expert, summed over MoE layers, s; under EP, each of the slowest rank",
    )
    per_prompt_token_s: Seconds = Field(
        default=0.0,
        description="each prompt token that a whole replica computes in the step, including the experts that "
        "it activates beyond the experts of a decode step, s; 0 with separate prefill engines",
    )
    batch_s: dict[Batch, Seconds] = Field(
        default_factory=dict,
        description="additional time of some batch sizes, s by number of requests; must not fall",
    )

    @field_validator("batch_s")
    @classmethod
    def _check_not_falling(cls, batch_s: dict[int, float]) -> dict[int, float]:
        if len(batch_s) == 1:
            raise ValueError("must list two batches or more, or none")
        rows = sorted(batch_s.items())
        for (batch, before), (larger, after) in pairwise(rows):
            if after < before:
                raise ValueError(
                    f"must not fall, but is {before:g} s for {batch} requests and {after:g} s for {larger}"
                )
        return dict(rows)

    def seconds(self, requests: Any, kv_tokens: Any, active_experts: Any, prompt_tokens: Any = 0) -> Any:
        """Return the time of a step, s; arguments broadcast.

        Args:
            active_experts: experts that decoding requests activate, summed over MoE layers.
        """
        linear = (
            self.fixed_s
            + self.per_request_s * requests
            + self.per_kv_token_s * kv_tokens
            + self.per_expert_s * active_experts
            + self.per_prompt_token_s * prompt_tokens
        )
        return linear + self._batch_seconds(requests) if self.batch_s else linear

    def _batch_seconds(self, requests: Any) -> Any:
        sizes, seconds, slope = self._table
        return np.interp(requests, sizes, seconds) + slope * np.maximum(np.subtract(requests, sizes[-1]), 0)

    @cached_property
    def _table(self) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return batches, their seconds, and the slope beyond the last one, s per request."""
        sizes, seconds = (
            np.array([*column], np.float64) for column in zip(*self.batch_s.items(), strict=True)
        )
        return sizes, seconds, float(np.diff(seconds)[-1] / np.diff(sizes)[-1])

    def added_seconds(
        self, requests: Any, kv_tokens: Any, active_experts: Any, *, more_tokens: Any, more_experts: Any
    ) -> tuple[Any, Any]:
        """Return the time that one more request adds over all requests, and the time of a step with it, s.

        Args:
            more_tokens: KV tokens of that request.
            more_experts: active experts that it adds.
        """
        before_s = self.seconds(requests, kv_tokens, active_experts)
        after_s = self.seconds(requests + 1, kv_tokens + more_tokens, active_experts + more_experts)
        return (requests + 1) * after_s - requests * before_s, after_s

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able arguments of `StepCost` that restore this cost, without an empty `batch_s`."""
        return {name: value for name, value in asdict(self).items() if value != {}}


def solve_non_negative(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve the normal equations of a least-squares fit whose terms are 0 or more, float64[n].

    Args:
        gram: float64[n, n], features.T @ features. A term whose feature is always 0 gets 0.
        moment: float64[n], features.T @ target.
    """
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    scaled = gram / np.outer(scale, scale) + 1e-9 * np.eye(len(scale))
    root = np.linalg.cholesky(scaled)  # |root.T x - root^-1 m|^2 is the quadratic form of the sums
    solution, _ = nnls(root.T, np.linalg.solve(root, moment / scale))
    return np.asarray(solution / scale, np.float64)


# Terms of a decode step, in the order of StepCost's fields and of the columns in `StepSums.from_steps`.
_TERMS = ("fixed_s", "per_request_s", "per_kv_token_s", "per_expert_s")
_PER_EXPERT = _TERMS.index("per_expert_s")


@dataclass
class StepSums:
    """Additive sums over step records, from which the cost is fitted.

    In `gram` and `moment` each record is weighted by 1 / seconds**2, so that the fit minimises the relative
    error, and interrupted steps hardly count.

    Attributes:
        gram, moment: normal equations of the weighted least-squares fit.
        steps: number of decode steps.
        requests, active_experts, seconds: unweighted sums over decode steps, experts also over MoE layers.
        prompts: float64[5], sums over steps that computed prompts, which no other sum includes: steps,
            requests, KV tokens, prompt tokens, seconds.
        local_prompts: the same sums for decode engines beside prefill engines. The fit ignores these steps,
            because placement expects that prefill engines compute the prompts.
        token_seconds: sum of seconds times requests: total time that tokens waited for their decode steps, s.
    """

    gram: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(_TERMS), len(_TERMS))))
    moment: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(_TERMS)))
    steps: float = 0.0
    requests: float = 0.0
    active_experts: float = 0.0
    seconds: float = 0.0
    prompts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    token_seconds: float = 0.0
    local_prompts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))

    @classmethod
    def from_steps(
        cls, requests: ArrayLike, kv_tokens: ArrayLike, active_experts: ArrayLike, seconds: ArrayLike
    ) -> StepSums:
        """Sum records of decode steps, given as arrays of equal length.

        Args:
            active_experts: active experts, summed over MoE layers.
        """
        time = np.asarray(seconds, np.float64)
        is_timed = time > 0
        columns = [np.asarray(column, np.float64) for column in (requests, kv_tokens, active_experts)]
        features, time = np.stack([np.ones_like(time), *columns], axis=-1)[is_timed], time[is_timed]
        relative = features / time[:, None]
        num_steps, num_requests, _, num_experts = features.sum(axis=0)
        return cls(
            relative.T @ relative,
            relative.sum(axis=0),
            steps=num_steps,
            requests=num_requests,
            active_experts=num_experts,
            seconds=time.sum(),
            token_seconds=float(features[:, 1] @ time),
        )

    @classmethod
    def from_prompts(
        cls, requests: ArrayLike, kv_tokens: ArrayLike, prompt_tokens: ArrayLike, seconds: ArrayLike
    ) -> StepSums:
        """Sum records of steps that computed prompts; `prompt_tokens` excludes one token per request."""
        columns = [np.asarray(a, np.float64) for a in (requests, kv_tokens, prompt_tokens, seconds)]
        return cls(prompts=np.array([len(columns[0]), *(column.sum() for column in columns)]))

    @classmethod
    def from_local_prompts(
        cls, requests: ArrayLike, kv_tokens: ArrayLike, prompt_tokens: ArrayLike, seconds: ArrayLike
    ) -> StepSums:
        """Sum records of steps in which decode engines beside prefill engines computed prompts."""
        return cls(local_prompts=cls.from_prompts(requests, kv_tokens, prompt_tokens, seconds).prompts)

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def scale(self, keep: float) -> StepSums:
        """Return the sums multiplied by `keep` (0 to 1), so that newer steps count more."""
        return StepSums(*(keep * getattr(self, f.name) for f in fields(self)))

    def fit(self) -> StepCost | None:
        """Fit the cost by non-negative least squares; None after too few steps, or if experts cost nothing.

        The cost of a prompt token is computed from `prompts`; see prompt_token_s.
        """
        if self.steps < 10 * len(_TERMS):
            return None
        terms = solve_non_negative(self.gram, self.moment)
        if not (terms[_PER_EXPERT] > 0 and terms.max() <= _MAX_S):  # nan fails this check too
            return None
        decode = StepCost(*terms.tolist())
        return replace(decode, per_prompt_token_s=self.prompt_token_s(decode, self.prompts))

    def prompt_token_s(self, decode: StepCost, prompts: NDArray[np.float64]) -> float:
        """Return the cost of a prompt token, s; 0 if it is unknown.

        It is the mean excess of steps with prompts over decode steps of as many requests and KV tokens with
        the mean number of experts.

        Args:
            decode: cost of a decode step.
            prompts: float64[5], `prompts` or `local_prompts`.
        """
        steps, requests, kv_tokens, prompt_tokens, seconds = prompts.tolist()
        if not (prompt_tokens and self.steps):
            return 0.0
        decode_s = decode.seconds(requests / steps, kv_tokens / steps, self.active_experts / self.steps)
        per_token_s = (seconds - steps * decode_s) / prompt_tokens
        return min(max(0.0, float(per_token_s)), _MAX_S)

    def relative_rms_error(self, cost: StepCost) -> float:
        """Return the root mean square of the relative error of `cost` over the decode steps."""
        c = np.array([getattr(cost, name) for name in _TERMS])
        square = self.steps - 2 * c @ self.moment + c @ self.gram @ c
        return float(np.sqrt(max(0.0, square) / self.steps)) if self.steps else float("nan")
