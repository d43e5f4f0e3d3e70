"""Cost of an engine step, fitted to the engines' step records."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from scipy.optimize import nnls

_MOST_S = 1e6
Seconds = Annotated[float, Field(ge=0, le=_MOST_S)]


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class StepCost:
    """Time of a decode step, linear in requests, KV tokens, active experts and prompt tokens.

    The defaults have the ratios of a small model on a CPU core. Placement hardly depends on them, and
    fitted values replace them after the first steps.
    """

    fixed_s: Seconds = Field(default=4e-3, description="every step, s")
    per_request_s: Seconds = Field(default=1e-4, description="each request of the batch, s")
    per_kv_token_s: Seconds = Field(default=0.0, description="each KV token of the batch, s")
    per_expert_s: Seconds = Field(
        default=4e-5,
        description="each active expert, summed over MoE layers, s; under EP, of the slowest rank",
    )
    per_prompt_token_s: Seconds = Field(
        default=0.0,
        description="each prompt token that a whole engine computes in the step, including the experts that "
        "it activates beyond those of a decode step, s; 0 with separate prefill engines",
    )

    def seconds(self, requests: Any, kv_tokens: Any, experts: Any, prompt_tokens: Any = 0) -> Any:
        """Return the time of a step, s; arguments broadcast. `experts`: those of decoding requests."""
        return (
            self.fixed_s
            + self.per_request_s * requests
            + self.per_kv_token_s * kv_tokens
            + self.per_expert_s * experts
            + self.per_prompt_token_s * prompt_tokens
        )

    def added_seconds(
        self, requests: Any, kv_tokens: Any, experts: Any, *, more_tokens: Any, more_experts: Any
    ) -> Any:
        """Return the time that one more request adds to a step, over all requests, s.

        Args:
            more_tokens: KV tokens of that request.
            more_experts: active experts that it adds.
        """
        now = self.seconds(requests, kv_tokens, experts)
        with_it = self.seconds(requests + 1, kv_tokens + more_tokens, experts + more_experts)
        return (requests + 1) * with_it - requests * now

    def as_dict(self) -> dict[str, float]:
        """Return a JSON-able dict `d`, such that `StepCost(**d)` restores it."""
        return asdict(self)


_TERMS = len(fields(StepCost)) - 1  # number of terms of a decode step


@dataclass
class StepSums:
    """Additive sums over step records, from which the cost is fitted.

    In `gram` and `moment` each record is weighted by 1 / seconds**2, so that the fit minimises the relative
    error, and interrupted steps hardly count.

    Attributes:
        gram, moment: normal equations of the weighted least-squares fit.
        steps: number of decode steps.
        requests, experts, seconds: unweighted sums over decode steps, experts also over MoE layers.
        prompts: float64[5], sums over steps that computed prompts, which no other sum includes: steps,
            requests, KV tokens, prompt tokens, seconds.
        waited: sum of seconds times requests: total time that tokens waited for their decode steps, s.
    """

    gram: NDArray[np.float64] = field(default_factory=lambda: np.zeros((_TERMS, _TERMS)))
    moment: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_TERMS))
    steps: float = 0.0
    requests: float = 0.0
    experts: float = 0.0
    seconds: float = 0.0
    prompts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    waited: float = 0.0

    @classmethod
    def of(
        cls, requests: ArrayLike, kv_tokens: ArrayLike, experts: ArrayLike, seconds: ArrayLike
    ) -> StepSums:
        """Sum records of decode steps, given as arrays of equal length.

        Args:
            experts: active experts, summed over MoE layers.
        """
        time = np.asarray(seconds, np.float64)
        known = time > 0
        columns = [np.ones_like(time), *(np.asarray(a, np.float64) for a in (requests, kv_tokens, experts))]
        features, time = np.stack(columns, axis=-1)[known], time[known]
        relative = features / time[:, None]
        steps, in_all, _, activated = features.sum(axis=0)
        plain = {"steps": steps, "requests": in_all, "experts": activated, "seconds": time.sum()}
        return cls(relative.T @ relative, relative.sum(axis=0), **plain, waited=float(features[:, 1] @ time))

    @classmethod
    def of_prompts(
        cls, requests: ArrayLike, kv_tokens: ArrayLike, prompt_tokens: ArrayLike, seconds: ArrayLike
    ) -> StepSums:
        """Sum records of steps that computed prompts; `prompt_tokens` excludes one token per request."""
        columns = [np.asarray(a, np.float64) for a in (requests, kv_tokens, prompt_tokens, seconds)]
        return cls(prompts=np.array([len(columns[0]), *(column.sum() for column in columns)]))

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def faded(self, keep: float) -> StepSums:
        """Return the sums multiplied by `keep` (0 to 1), so that newer steps count more."""
        return StepSums(*(keep * getattr(self, f.name) for f in fields(self)))

    def fit(self) -> StepCost | None:
        """Fit the cost by non-negative least squares; None with too few steps or if experts cost nothing.

        The cost of a prompt token is the mean excess of steps with prompts over decode steps of as many
        requests and KV tokens with the mean number of experts.
        """
        if self.steps < 10 * _TERMS:
            return None
        scale = np.sqrt(np.maximum(np.diag(self.gram), 1e-300))
        gram = self.gram / np.outer(scale, scale) + 1e-9 * np.eye(_TERMS)
        root = np.linalg.cholesky(gram)  # |root.T x - root^-1 m|^2 is the quadratic form of the sums
        solution, _ = nnls(root.T, np.linalg.solve(root, self.moment / scale))
        terms = solution / scale
        if not (terms[-1] > 0 and terms.max() <= _MOST_S):  # also false for nan
            return None
        decode = StepCost(*map(float, terms))
        steps, requests, kv_tokens, prompt_tokens, seconds = self.prompts.tolist()
        if not prompt_tokens:
            return decode
        usual = decode.seconds(requests / steps, kv_tokens / steps, self.experts / self.steps)
        each = (seconds - steps * usual) / prompt_tokens
        return replace(decode, per_prompt_token_s=min(max(0.0, each), _MOST_S))

    def error(self, cost: StepCost) -> float:
        """Return the root mean square of the relative error of `cost` over the decode steps."""
        c = np.array(astuple(cost)[:_TERMS])
        square = self.steps - 2 * c @ self.moment + c @ self.gram @ c
        return float(np.sqrt(max(0.0, square) / self.steps)) if self.steps else float("nan")
