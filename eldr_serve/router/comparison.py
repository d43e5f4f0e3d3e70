"""Comparison of the live policy with a shadow policy."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from eldr_serve.errors import one_line_message
from eldr_serve.metrics import RouterEvent
from eldr_serve.router_protocol.messages import LiveSettings
from eldr_serve.scheduling import Policy, StepCost
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.shadow import Shadow

logger = logging.getLogger(__name__)

_MAX_PAST = 8  # earlier comparisons that the status shows


class Comparison:
    """Shadow comparison of one placer.

    A shadow that fails is disabled and counted (`shadow_errors`); placement continues.

    Args:
        counters: the counters of the status.
        clock: monotonic clock, s.
    """

    def __init__(
        self, placer: Placer, counters: Counter[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._placer = placer
        self._counters = counters
        self._clock = clock
        self._shadow: Shadow | None = None
        self._names: dict[str, Any] = {}
        self._against_itself = False
        self._failure: str | None = None
        self._past: deque[dict[str, Any]] = deque(maxlen=_MAX_PAST)

    def begin(self, settings: LiveSettings, policy: Policy | None, cost: StepCost | None) -> None:
        """Start a comparison under these settings; `policy` is the shadow, None for no comparison.

        Keep the result of the previous comparison for the status, unless it priced no token or compared a
        policy with itself, as `eldr compare` does when it makes the shadow's policy live.
        """
        result = None if self._shadow is None or self._against_itself else _result(self._shadow)
        if result is not None:
            self._past.append(self._names | result)
        self._failure, self._shadow, self._names = None, None, {}
        if policy is not None and settings.shadow is not None:
            self._shadow = Shadow(policy, table_version=settings.table_version, clock=self._clock)
            if cost is not None:
                self._shadow.update_cost_model(cost)
            self._names = {
                "live": {"name": settings.policy, "parameters": settings.parameters},
                "shadow": asdict(settings.shadow),
            }
            live = self._placer.policy
            self._against_itself = type(policy) is type(live) and policy.parameters == live.parameters
        self._placer.set_shadow(self._shadow)

    def observe_steps(self, steps: StepSums) -> None:
        """Pass an engine's steps since its last report to the shadow."""
        if self._shadow is not None:
            self._shadow.observe_steps(steps)

    def catch_up(self, budget_s: float = float("inf")) -> bool:
        """Run the shadow for about `budget_s`; return whether it is still behind."""
        if self._shadow is None:
            return False
        try:
            return self._shadow.catch_up(budget_s)
        except Exception as error:
            logger.warning("the shadow %s failed and is off", self._names["shadow"]["name"], exc_info=error)
            self._failure = one_line_message(error)
            self._shadow = None
            self._placer.set_shadow(None)
            self._counters[RouterEvent.SHADOW_ERRORS] += 1
            return False

    def status(self) -> dict[str, Any]:
        """Return the current comparison, its error if it failed, and previous ones, as JSON-able values.

        `now` and each item of `past` contain the two policies and the fields of PolicyComparison.
        """
        now = None if self._shadow is None else self._names | (_result(self._shadow) or {})
        return {"now": now, "failed": self._failure, "past": list(self._past)}


def _result(shadow: Shadow) -> dict[str, Any] | None:
    comparison = shadow.compare()
    return None if comparison is None else asdict(comparison)
