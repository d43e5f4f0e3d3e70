"""The fit of a step cost to a model's steps on a GPU, as NVIDIA's package gives them (`kernel_times`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError
from eldr_serve.gpu_cost.readings import Readings, Setting, Shape, StepReading
from eldr_serve.gpu_cost.routing import active_experts
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost import solve_non_negative
from eldr_serve.scheduling.cost_file import FittedCost

_LEAST_DIFFERENCE = 0.05  # smallest difference in experts between the two routings at some batch


@dataclass(frozen=True)
class StepCostFit:
    """A cost fitted to steps of NVIDIA's package.

    Attributes:
        errors: relative error of the cost at each step of the readings.
        prompt_errors: relative error at each step of the readings that also computes prompt tokens.
    """

    readings: Readings
    cost: StepCost
    errors: Floats
    prompt_errors: Floats

    def file(self) -> FittedCost:
        """Return what `eldr simulate --cost` and a deployment's `router.cost` read."""
        return FittedCost(
            cost=self.cost,
            steps=len(self.errors),
            rms_relative_error=_rms(self.errors),
            median_relative_error=float(np.median(np.abs(self.errors))),
            source=f"{describe(self.readings.setting, self.readings.shape)}; {self.readings.source}",
        )

    def summary(self) -> dict[str, Any]:
        """Return terms and errors, in JSON types: microseconds, and errors as fractions."""
        shape = self.readings.shape
        terms = self.cost.as_dict()
        added = {f"batch_us_{size}": 1e6 * value for size, value in terms.pop("batch_s", {}).items()}
        terms = {f"{name.removesuffix('_s')}_us": 1e6 * value for name, value in terms.items()}
        largest: dict[str, float] = {}
        for step, error in zip(self.readings.steps, self.errors, strict=True):
            largest[step.routing] = max(largest.get(step.routing, 0.0), abs(float(error)))
        return {
            "experts": shape.experts,
            "top_k": shape.top_k,
            "moe_layers": shape.layers,
            "weights": shape.dtype,
            **terms,
            **added,
            "error_rms": _rms(self.errors),
            **{f"error_max_{routing}": error for routing, error in largest.items()},
            "error_rms_prompts": _rms(self.prompt_errors),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each batch and routing: active experts of a layer, and each context's error."""
        rows: dict[tuple[int, str], dict[str, Any]] = {}
        for step, error in zip(self.readings.steps, self.errors, strict=True):
            active = active_experts(step.requests, step.routing, self.readings.shape)
            row = rows.setdefault(
                (step.requests, step.routing),
                {"batch": step.requests, "routing": step.routing, "active_experts": round(active, 1)},
            )
            row[f"{step.context:,} tokens"] = f"{1e3 * step.seconds:.2f} ms {100 * error:+.1f} %"
        return list(rows.values())


def fit(readings: Readings) -> StepCostFit:
    """Fit non-negative terms and a table of batches by least squares of the relative error.

    The terms of experts and KV tokens are fitted to even and skewed steps, with any table that does not fall.
    With these terms, the table is then fitted to the package's own steps, which are the skewed ones.

    Raises:
        UserInputError: experts cost nothing in these steps, or hardly differ between them.
    """
    requests, kv_tokens, experts = _counts(readings.steps, readings.shape)
    seconds = np.array([step.seconds for step in readings.steps])
    sizes = np.unique(requests)
    from_size = requests[:, None] >= sizes  # each size adds 0 or more to the one below
    terms = _least_squares(np.column_stack([from_size, kv_tokens, experts]), seconds, seconds)
    per_kv_token_s, per_expert_s = terms[-2:].tolist()
    routing_matters = [
        np.ptp(experts[requests == size]) > _LEAST_DIFFERENCE * experts.max() for size in sizes
    ]
    if per_expert_s <= 0 or not any(routing_matters):
        raise UserInputError(
            f"{describe(readings.setting, readings.shape)}: these steps do not show what an expert costs; "
            "give more --batches"
        )
    is_skewed = np.array([step.routing == "skewed" for step in readings.steps])
    rest_s = seconds - per_kv_token_s * kv_tokens - per_expert_s * experts
    by_size = np.cumsum(_least_squares(from_size[is_skewed], seconds[is_skewed], rest_s[is_skewed]))
    added_s = dict(zip(sizes.tolist(), (by_size - by_size[0]).tolist(), strict=True))
    batch_s = added_s if len(sizes) > 1 else {}
    cost = StepCost(float(by_size[0]), 0.0, per_kv_token_s, per_expert_s, batch_s=batch_s)
    prompts = readings.prompt_steps
    tokens = np.array([step.prompt_tokens for step in prompts], np.float64)
    prompt_step_s = np.array([step.seconds for step in prompts])
    decode_s = cost.seconds(
        *_counts([StepReading(p.requests, p.context, "skewed", 0.0) for p in prompts], readings.shape)
    )
    (per_prompt_token_s,) = _least_squares(tokens[:, None], prompt_step_s, prompt_step_s - decode_s)
    cost = replace(cost, per_prompt_token_s=float(per_prompt_token_s))
    errors = cost.seconds(requests, kv_tokens, experts) / seconds - 1
    prompt_errors = (decode_s + per_prompt_token_s * tokens) / prompt_step_s - 1
    return StepCostFit(readings, cost, errors, prompt_errors)


def describe(setting: Setting, shape: Shape) -> str:
    """Return one phrase about a model on a GPU."""
    return f"{setting.model} on {setting.gpu}, TP {setting.tp}, EP {setting.ep}, experts in {shape.dtype}"


def _counts(steps: Sequence[StepReading], shape: Shape) -> tuple[Ints, Ints, Floats]:
    """Return requests, KV tokens, and active experts over all layers of each step."""
    requests = np.array([step.requests for step in steps])
    active = np.array([active_experts(step.requests, step.routing, shape) for step in steps])
    return requests, requests * np.array([step.context for step in steps]), shape.layers * active


def _least_squares(features: NDArray[Any], seconds: Floats, target: Floats) -> Floats:
    """Return non-negative terms that minimise the squares of (features @ terms - target) / seconds."""
    relative = features / seconds[:, None]
    return solve_non_negative(relative.T @ relative, relative.T @ (target / seconds))


def _rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))
