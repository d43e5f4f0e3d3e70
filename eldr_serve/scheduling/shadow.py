"""Comparison of the live policy with another one on the same requests, by the fitted step cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.activation import ExpectedActivation
from eldr_serve.scheduling.cost import StepCost, StepSums
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.policies.base import Policy
from eldr_serve.scheduling.types import Loads, PlacementRequest

_BLOCK_S = 10.0  # the interval uses block means, since neighbouring tokens are correlated
_BLOCKS = 360  # one hour
_MAX_EVENTS = 50_000  # limit of pending events, which keep requests in memory


@dataclass(frozen=True)
class PolicyComparison:
    """Mean decode step time per token under both policies, over the latest blocks.

    Attributes:
        tokens: number of priced tokens.
        live_ms, shadow_ms: time per token by the fitted step cost.
        measured_ms: time per token under the live policy, measured by engines; None if none has reported.
        change_pct: relative change, live policy against shadow; below 0 if the live one is faster.
        low_pct, high_pct: 95 % interval of `change_pct`, from the means of 10 s blocks; None below 3 blocks.
    """

    tokens: int
    live_ms: float
    shadow_ms: float
    change_pct: float
    low_pct: float | None
    high_pct: float | None
    measured_ms: float | None


class Shadow:
    """A second policy that places every request of the live policy too; both placements are priced.

    At any time both policies have the same requests, each policy in its own ledger. The price of a token is
    the expected step time of the worker that holds its request: the `StepCost` of the worker's requests, KV
    tokens and expected active experts. So the two prices differ only by placement. A request ends here when
    it ends in the service. No request waits here, because `select` places it even if the policy has a decode
    queue.

    The placer's notifications are only queued; `catch_up` processes them between placements, and raises the
    exceptions of the policy.

    Args:
        policy: instance for the shadow only, with the live table.
        table_version: version of that table; scores of other versions are not used.

    Attributes:
        totals: float64[5]: tokens, their time under the live policy, their time in the shadow, s; tokens of
            the engines' decode steps, their measured time, s.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        table_version: int = 0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._table_version = table_version
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._events: deque[Callable[[], None]] = deque()
        self._workers: tuple[str | None, ...] = ()
        self._available = np.zeros(0, bool)
        self._live, self._shadow = _PlacedRequests(), _PlacedRequests()
        self._requests: dict[str, PlacementRequest] = {}
        self._generated: dict[str, int] = {}  # generated tokens of each request
        self._cost = StepCost()
        self.totals = np.zeros(5)
        self._blocks: deque[NDArray[np.float64]] = deque([np.zeros(5)], maxlen=_BLOCKS)
        self._block_ends_at_s = clock() + _BLOCK_S

    # -- notifications of the placer ---------------------------------------------------------------

    def set_workers(self, workers: Sequence[str | None], available: NDArray[np.bool_]) -> None:
        """Set the worker of each position, and whether it is available."""
        self._events.append(partial(self._set_workers, tuple(workers), available))

    def on_assigned(self, request: PlacementRequest, position: int, generated_tokens: int) -> None:
        """Add a request that the live policy has placed on the worker at `position`.

        Args:
            generated_tokens: tokens of its answer so far; for a new request they are not priced.
        """
        self._events.append(partial(self._assign, request, position, generated_tokens))

    def on_progress(self, generated_tokens: Mapping[str, int]) -> None:
        """Set totals of generated tokens by request id."""
        self._events.append(partial(self._set_generated_tokens, generated_tokens))

    def on_finished(self, request_id: str) -> None:
        """Remove a request."""
        self._events.append(partial(self._finish, request_id, self.policy.on_finished))

    def on_aborted(self, request_id: str) -> None:
        """Remove a request whose answer is not complete."""
        self._events.append(partial(self._finish, request_id, self.policy.on_aborted))

    def update_cost_model(self, cost: StepCost) -> None:
        """Set the current cost of a decode step."""
        self._events.append(partial(self._set_cost, cost))

    def observe_steps(self, steps: StepSums) -> None:
        """Add decode steps that engines have made under the live policy."""
        self._events.append(partial(self._count, np.array([0, 0, 0, steps.requests, steps.token_seconds])))

    # -- processing --------------------------------------------------------------------------------

    def catch_up(self, budget_s: float = float("inf")) -> bool:
        """Process queued notifications for about `budget_s`; return whether some remain.

        Raises:
            OverflowError: requests arrive faster than they can be processed.
            Exception: any exception of the policy.
        """
        if len(self._events) > _MAX_EVENTS:
            raise OverflowError(f"the shadow was {len(self._events)} events behind")
        until_s = time.perf_counter() + budget_s
        while self._events and time.perf_counter() < until_s:
            self._events.popleft()()
        return bool(self._events)

    def compare(self) -> PolicyComparison | None:
        """Return the comparison so far; None before the first token."""
        blocks = np.array([block for block in self._blocks if block[0]])
        if not len(blocks):
            return None
        tokens, live, shadow, measured_tokens, measured = blocks.sum(axis=0)
        change, half = live / shadow - 1, None
        if (n := len(blocks)) > 2:  # variance of a ratio of sums, from its residuals
            residuals = blocks[:, 1] - live / shadow * blocks[:, 2]
            half = 1.96 * np.sqrt(n / (n - 1) * (residuals**2).sum()) / shadow
        low, high = (None, None) if half is None else (100 * (change - half), 100 * (change + half))
        return PolicyComparison(
            int(tokens),
            1e3 * live / tokens,
            1e3 * shadow / tokens,
            100 * change,
            low,
            high,
            1e3 * measured / measured_tokens if measured_tokens else None,
        )

    def _set_workers(self, workers: tuple[str | None, ...], available: NDArray[np.bool_]) -> None:
        pairs = enumerate(zip(self._workers, workers, strict=False))
        unchanged_positions = {position for position, (before, now) in pairs if before == now}
        changed = workers != self._workers
        self._workers, self._available = workers, available
        if changed:
            self.policy.on_workers_changed(workers)
        without_worker = []
        for request in self._requests.values():
            position = self._shadow.positions.get(request.request_id)
            if position is None or position not in unchanged_positions:
                self._shadow.finish(request.request_id)
                without_worker.append(request)
            elif changed:
                self.policy.on_assigned(request, position)
        for request in without_worker:
            self._place(request)

    def _assign(self, request: PlacementRequest, live_position: int, generated_tokens: int) -> None:
        name = request.request_id
        if request.table_version != self._table_version:  # it was scored with another table
            request = replace(request, similarity=None)
        request = replace(request, may_wait=False, exclude=())
        before, self._requests[name] = self._requests.get(name), request
        if before is None:
            self._generated[name] = generated_tokens
            self._place(request)
        elif name in self._shadow.positions and _is_measured_again(before, request):
            position = self._shadow.positions[name]
            self._shadow.assign(request, position, self._generated[name])
            self.policy.on_assigned(request, position)
        self._live.assign(request, live_position, self._generated[name])

    def _place(self, request: PlacementRequest) -> None:
        loads = self._shadow.loads(self._available)
        if loads.available.any():
            decision = self.policy.select(request, loads, self._rng)
            self._shadow.assign(request, decision.position, self._generated[request.request_id])
            self.policy.on_assigned(request, decision.position, decision)

    def _set_generated_tokens(self, generated_tokens: Mapping[str, int]) -> None:
        totals = {name: tokens for name, tokens in generated_tokens.items() if name in self._requests}
        live, shadow = (side.seconds(self._cost, len(self._workers)) for side in (self._live, self._shadow))
        for name, tokens in totals.items():
            if name in self._live.positions and name in self._shadow.positions:
                new_tokens = tokens - self._generated[name]
                costs = live[self._live.positions[name]], shadow[self._shadow.positions[name]]
                self._count(new_tokens * np.array([1.0, *costs, 0.0, 0.0]))
        self._generated |= totals
        self._live.set_generated_tokens(totals)
        self._shadow.set_generated_tokens(totals)
        self.policy.on_progress(totals)

    def _count(self, priced: NDArray[np.float64]) -> None:
        if (now_s := self._clock()) > self._block_ends_at_s:
            self._blocks.append(np.zeros(5))
            self._block_ends_at_s = now_s + _BLOCK_S
        self.totals += priced
        self._blocks[-1] += priced

    def _finish(self, request_id: str, notify_policy: Callable[[str], None]) -> None:
        if self._requests.pop(request_id, None) is not None:
            del self._generated[request_id]
            self._live.finish(request_id)
            self._shadow.finish(request_id)
            notify_policy(request_id)

    def _set_cost(self, cost: StepCost) -> None:
        self._cost = cost
        self.policy.update_cost_model(cost)


def _is_measured_again(before: PlacementRequest, now: PlacementRequest) -> bool:
    """Return whether measured counts or length have replaced the predicted ones."""
    return now.expert_counts is not before.expert_counts or now.prompt_tokens != before.prompt_tokens


class _PlacedRequests:
    """The requests of each worker under one policy.

    Attributes:
        positions: position of the worker of each request.
    """

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self._ledger = LoadLedger()
        self._activation = ExpectedActivation()

    def assign(self, request: PlacementRequest, position: int, generated_tokens: int) -> None:
        self.positions[request.request_id] = position
        self._ledger.add(request.request_id, position, request.prompt_tokens)
        self._ledger.set_generated_tokens(request.request_id, generated_tokens)
        self._activation.on_assigned(request, position, self._activation.estimate_levels(request))

    def set_generated_tokens(self, generated_tokens: Mapping[str, int]) -> None:
        for request_id, tokens in generated_tokens.items():
            self._ledger.set_generated_tokens(request_id, tokens)

    def finish(self, request_id: str) -> None:
        self.positions.pop(request_id, None)
        self._ledger.release(request_id)
        self._activation.on_finished(request_id)

    def loads(self, available: NDArray[np.bool_]) -> Loads:
        positions = range(len(available))
        self._ledger.name_workers(positions)
        return self._ledger.loads(self._ledger.rows_of(positions), available)

    def seconds(self, cost: StepCost, num_workers: int) -> NDArray[np.float64]:
        """Return the expected step time of each worker, s, float64[W]."""
        loads = self.loads(np.ones(num_workers, bool))
        self._activation.grow(num_workers)
        experts = self._activation.expected_active[:num_workers]
        return np.asarray(cost.seconds(loads.in_flight, loads.kv_tokens, experts), np.float64)
