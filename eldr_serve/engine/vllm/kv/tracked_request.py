"""The expert counts of a request, in prefill and in decode, in vLLM's engine core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.engine.calls import DECODE_COUNTS_KEY, DECODE_STEPS_KEY, PREFILL_COUNTS_KEY, ROUTES_KEY
from eldr_serve.engine.routes import pack_routes
from eldr_serve.experts.signature import pack_counts

_BATCH = 32  # number of decode steps summed at once


class RouteCounts:
    """The sum of one request's decode counts.

    Positions must be added in order. A preempted request computes some positions twice, with the same
    tokens; the repetitions are skipped.

    Args:
        first: position of the first generated token.
        keep: whether to keep the routes as well.

    Attributes:
        routes: the routes, int16[steps,L,k] each; empty if they are not kept.
    """

    def __init__(self, first: int, *, keep: bool) -> None:
        self.routes: list[NDArray[np.int16]] = []
        self._first = self._next = first
        self._keeps_routes = keep
        self._pending: list[NDArray[np.int16]] = []
        self._num_experts = 0
        self._cells: NDArray[np.int64] | None = None  # flattened counts

    def add(self, first: int, routes: NDArray[np.int16], num_experts: int) -> None:
        """Add the experts int16[n,L,k] of n consecutive tokens that start at this position."""
        new = routes[max(0, self._next - first) :]
        if first > self._next or not len(new):  # tokens after a gap are not counted; see `covers`
            return
        self._next += len(new)
        self._num_experts = num_experts
        self._pending.append(new)
        if self._keeps_routes:
            self.routes.append(new)
        if len(self._pending) >= _BATCH:
            self._sum()

    def covers(self, end: int) -> bool:
        """Return whether all positions before `end`, and no others, were counted."""
        return self._next == end

    @property
    def steps(self) -> int:
        """Return the number of positions counted."""
        return self._next - self._first

    def total(self, shape: tuple[int, int]) -> NDArray[np.uint32]:
        """Return the sum, uint32[L,E]; without decode steps, return zeros of this shape."""
        self._sum()
        if self._cells is None:
            return np.zeros(shape, np.uint32)
        return self._cells.reshape(-1, self._num_experts).astype(np.uint32)

    def _sum(self) -> None:
        if not self._pending:
            return
        routes = np.concatenate(self._pending)
        self._pending.clear()
        layers = routes.shape[1]
        cells = routes + (np.arange(layers) * self._num_experts)[None, :, None]
        counts = np.bincount(cells.reshape(-1), minlength=layers * self._num_experts)
        self._cells = counts if self._cells is None else self._cells + counts


@dataclass
class TrackedRequest:
    """A request whose experts are counted.

    Attributes:
        request: vLLM's object for the request.
        wants_routes: whether the answer includes the routes of the decode steps.
        decode: the decode counts, if they were requested.
        prompt_counts: int32[L,E], set when this engine has computed the prompt.
    """

    request: Any
    wants_routes: bool = False
    decode: RouteCounts | None = None
    prompt_counts: NDArray[np.int32] | None = None

    def describe_decode(self, *, prefilled_here: bool) -> dict[str, Any]:
        """Return the fields of the answer that describe the decode steps; empty if counts are missing.

        Args:
            prefilled_here: whether this engine prefilled the prompt; the answer then includes its counts.
        """
        end = self.request.num_tokens - 1  # the last sampled token is never routed
        if self.decode is None or not self.decode.covers(end):
            return {}
        fields: dict[str, Any] = {DECODE_STEPS_KEY: self.decode.steps}
        shape = (1, 1)
        if prefilled_here:
            if self.prompt_counts is None:
                return {}
            shape = self.prompt_counts.shape
            fields[PREFILL_COUNTS_KEY] = pack_counts(self.prompt_counts)
        fields[DECODE_COUNTS_KEY] = pack_counts(self.decode.total(shape))
        routes = self.decode.routes or [np.zeros((0, shape[0], 1), np.int16)]
        fields[ROUTES_KEY] = pack_routes(np.concatenate(routes)) if self.wants_routes else None
        return fields
