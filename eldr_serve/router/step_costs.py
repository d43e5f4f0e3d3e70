"""What decode steps cost, from the engines' measurements."""

from __future__ import annotations

from collections.abc import Callable

from eldr_serve.scheduling import StepCost, StepSums

_HALF_LIFE_S = 600.0  # half-life of a decode step's weight in the fitted cost


class StepCosts:
    """Sums over decode steps, and the cost that is fitted to the recent ones.

    Args:
        clock: monotonic clock, s.

    Attributes:
        cost: the fitted cost; None until it is known.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent, self._recent_at = StepSums(), clock()
        self._all = StepSums()
        self.cost: StepCost | None = None

    def observe(self, steps: StepSums) -> None:
        """Add steps, and fit the cost to them and earlier ones."""
        now = self._clock()
        self._all += steps
        keep = 0.5 ** ((now - self._recent_at) / _HALF_LIFE_S)
        self._recent, self._recent_at = self._recent.faded(keep) + steps, now
        self.cost = self._recent.fit() or self.cost

    def status(self) -> dict[str, float]:
        """Return the weighted number of steps, and the cost fitted to them, s, once it is known."""
        steps = {"steps": round(self._recent.steps, 1)}
        if self.cost is None:
            return steps
        return steps | self.cost.as_dict() | {"relative_error": self._recent.error(self.cost)}

    def totals(self, layers: int | None) -> dict[str, float] | None:
        """Return sums over all decode steps; None until the number of MoE layers is known."""
        if layers is None:
            return None
        return {
            "steps": self._all.steps,
            "requests": self._all.requests,
            "active_experts": self._all.experts / layers,  # mean over layers
            "seconds": self._all.seconds,
            "token_seconds": self._all.waited,
        }
