"""The measured speed at which an engine computes prompts."""

from __future__ import annotations

import math
from collections.abc import Callable

DEFAULT_RATE = 1000.0  # assumed throughput until it has been measured, tokens/s
_IDLE_BELOW_TOKENS = 512  # with fewer queued tokens an engine counts as idle, and its rate is not measured
_WINDOW_S = 30.0  # averaging window for the rate, s of busy time
# Weight of the default rate, s of busy time. It is that of one short prompt, so that the first prompt alone
# does not set the rate, and the default hardly counts after the second one.
_PRIOR_S = 0.1


class Throughput:
    """Measures the throughput of an engine while it is busy, tokens/s.

    Args:
        clock: returns the time, s.

    Attributes:
        outstanding: number of tokens that have entered and not left.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.outstanding = 0.0
        self._clock = clock
        self._advanced_at_s = clock()
        self._tokens = self._seconds = 0.0
        self._uncounted_s = 0.0  # busy time since a prompt was last counted

    @property
    def measured_s(self) -> float:
        """Return the busy time over which the rate was measured, at most about 30 s."""
        return self._seconds

    @property
    def rate(self) -> float | None:
        """Return the throughput, tokens/s; None until a busy engine has computed a prompt."""
        if not self._tokens:
            return None
        return (self._tokens + _PRIOR_S * DEFAULT_RATE) / (self._seconds + _PRIOR_S)

    def enter(self, tokens: float) -> None:
        """Count a prompt that has arrived."""
        self._advance()
        self.outstanding += tokens

    def leave(self, tokens: float, computed: float) -> None:
        """Count a prompt that has left.

        Args:
            tokens: the same number as for `enter`.
            computed: number of tokens that the engine has computed; 0 if the prompt was not computed.
        """
        self._advance()
        if self.outstanding < _IDLE_BELOW_TOKENS:
            self._uncounted_s = 0.0
        elif computed:  # the time of a prompt counts together with its tokens
            weight = math.exp(-self._uncounted_s / _WINDOW_S)
            self._tokens = self._tokens * weight + computed
            self._seconds = self._seconds * weight + self._uncounted_s
            self._uncounted_s = 0.0
        self.outstanding = max(0.0, self.outstanding - tokens)

    def _advance(self) -> None:
        """Account for the time since the last event."""
        now_s = self._clock()
        if self.outstanding >= _IDLE_BELOW_TOKENS:
            self._uncounted_s += now_s - self._advanced_at_s
        self._advanced_at_s = now_s
