"""The live policy against its shadow: begun, kept up to date between placements, ended, remembered."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from eldr_serve.errors import sentence
from eldr_serve.routing import Placer, Policy, Shadow, StepCost, StepSums
from eldr_serve.serving.messages import Settings

logger = logging.getLogger(__name__)

_REMEMBERED = 8  # comparisons that have ended


class Comparison:
    """Of one placer. A shadow that fails is switched off and counted (`shadow_errors`); placements go on.

    Args:
        counters: those of the status.
        clock: s.
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
        self._failed: str | None = None
        self._past: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)

    def begin(self, settings: Settings, policy: Policy | None, cost: StepCost | None) -> None:
        """Compare under these settings from now on; `policy` is the shadow's, None for none.

        The comparison before is remembered where it priced a token, but for that of a policy with itself, as
        there is one whenever `eldr compare` comes to the policy that is the shadow.
        """
        ended = None if self._shadow is None or self._against_itself else _result(self._shadow)
        if ended is not None:
            self._past.append(self._names | ended)
        self._failed, self._shadow, self._names = None, None, {}
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
        """What an engine did since its last report."""
        if self._shadow is not None:
            self._shadow.observe_steps(steps)

    def catch_up(self, budget_s: float = float("inf")) -> bool:
        """Let the shadow work for about so long; whether it is behind still."""
        if self._shadow is None:
            return False
        try:
            return self._shadow.catch_up(budget_s)
        except Exception as error:
            logger.warning("the shadow %s failed and is off", self._names["shadow"]["name"], exc_info=error)
            self._failed = sentence(error)
            self._shadow = None
            self._placer.set_shadow(None)
            self._counters["shadow_errors"] += 1
            return False

    def status(self) -> dict[str, Any]:
        """JSON-able: the present comparison, why it is off if it failed, and those before it.

        `now` and each of `past` have the fields of Saving beside the two policies.
        """
        now = None if self._shadow is None else self._names | (_result(self._shadow) or {})
        return {"now": now, "failed": self._failed, "past": list(self._past)}


def _result(shadow: Shadow) -> dict[str, Any] | None:
    saving = shadow.saving()
    return None if saving is None else asdict(saving)
