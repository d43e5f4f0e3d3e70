"""Cost of decode steps, in the router, fitted to the engines' measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.decode_loads import StepTimeModel

_HALF_LIFE_S = 600.0  # half-life of a decode step's weight in the fitted cost


class StepCosts:
    """Sums over decode steps, and the cost that is fitted to the recent ones.

    Args:
        clock: monotonic clock, s.
        prior: the deployment's cost, until one is fitted.
    """

    def __init__(self, clock: Callable[[], float], prior: StepCost | None = None) -> None:
        self._clock = clock
        self._recent, self._recent_at_s = StepSums(), clock()
        self._total = StepSums()
        self._prior = prior
        self._fitted: StepCost | None = None

    @property
    def cost(self) -> StepCost | None:
        """Return the fitted cost, or the prior; None if there is neither."""
        return self._fitted or self._prior

    def observe(self, steps: StepSums) -> None:
        """Add steps, and fit the cost to them and earlier ones."""
        now_s = self._clock()
        self._total += steps
        remaining_share = 0.5 ** ((now_s - self._recent_at_s) / _HALF_LIFE_S)
        self._recent, self._recent_at_s = self._recent.scale(remaining_share) + steps, now_s
        self._fitted = self._recent.fit() or self._fitted

    def time_model(self, num_experts: int) -> StepTimeModel:
        """Return the model of the time of a step; see StepTimeModel.from_steps."""
        return StepTimeModel.from_steps(self.cost, self._recent, num_experts)

    def status(self) -> dict[str, Any]:
        """Return the weighted number of steps, the cost, s, and its relative error once it is fitted."""
        status: dict[str, Any] = {"steps": round(self._recent.steps, 1)}
        if self.cost is not None:
            status |= self.cost.as_dict()
        if self._fitted is not None:
            status["relative_error"] = self._recent.relative_rms_error(self._fitted)
        return status

    def totals(self, layers: int | None) -> dict[str, float] | None:
        """Return sums over all decode steps; None until the number of MoE layers is known."""
        if layers is None:
            return None
        return {
            "steps": self._total.steps,
            "requests": self._total.requests,
            "active_experts": self._total.active_experts / layers,  # mean over layers
            "seconds": self._total.seconds,
            "token_seconds": self._total.token_seconds,
        }
