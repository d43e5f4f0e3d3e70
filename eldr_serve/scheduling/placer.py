"""Assignment of requests to workers and the decode queue, shared by the server and the simulator.

This module does not use Ray or simulated time and never waits, so each call is atomic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.fairness import fair_order
from eldr_serve.scheduling.guard import GuardedPolicy
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.policies.base import Policy, worker_similarity
from eldr_serve.scheduling.prefixes import PrefixMap
from eldr_serve.scheduling.shadow import Shadow
from eldr_serve.scheduling.types import Decision, Lease, Loads, PlacementRequest, State


class Placer:
    """Assigns decode workers to prefilled requests by a policy, and notifies the policy of their progress.

    The position of a worker is its index in the loads that policies see. Under a policy with a decode queue,
    requests that may wait do so until the policy assigns them a worker. Only `submit` and `dispatch` ask the
    policy, so call one of them after any change of loads or workers.

    Args:
        failed: callback for an exception of the policy, which load then replaces (GuardedPolicy); may raise.
        ledger: load of the workers.
        clock: time source for queue waits, s.

    Attributes:
        running: requests that hold a worker, by id.
        queue: waiting requests, by id, in order of arrival.
        prefixes: blocks that were sent to each worker.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        failed: Callable[[Exception], None],
        ledger: LoadLedger | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: dict[str, Lease] = {}
        self.queue: dict[str, Lease] = {}
        self.prefixes = PrefixMap()
        self._policy = GuardedPolicy(policy, failed)
        self._shadow: Shadow | None = None
        self._failed = failed
        self._ledger = LoadLedger() if ledger is None else ledger
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._workers: list[str | None] = []
        # Position of each worker; for each position its row in the ledger and whether it accepts requests.
        self._position: dict[str, int] = {}
        self._ledger_rows = np.zeros(0, np.int64)
        self._open = np.zeros(0, bool)

    # -- workers and policy ----------------------------------------------------------------------

    def set_workers(self, workers: Sequence[str | None], closed: Iterable[str] = ()) -> None:
        """Set the worker of each position, None for a vacant one.

        Args:
            closed: workers that accept no more requests.
        """
        changed = list(workers) != self._workers
        if changed:
            self._workers = list(workers)
            self._position = {
                worker: position for position, worker in enumerate(workers) if worker is not None
            }
            self._ledger_rows = self._ledger.rows(workers)
            self.prefixes.keep(self._position)
        shut = set(closed)
        self._open = np.array([worker is not None and worker not in shut for worker in workers], bool)
        if self._shadow is not None:
            self._shadow.set_workers(self._workers, self._open)
        if changed:
            self._notify_running()

    @property
    def policy(self) -> Policy:
        return self._policy.policy

    def set_policy(self, policy: Policy, cost: StepCost | None = None) -> None:
        """Change the policy; notify the new one of the step cost and of all running requests."""
        self._policy = GuardedPolicy(policy, self._failed)
        if cost is not None:
            self._policy.update_cost_model(cost)
        self._notify_running()

    def set_shadow(self, shadow: Shadow | None) -> None:
        """Send all notifications of the policy to `shadow` too, beginning with the running requests.

        Args:
            shadow: None removes the present one.
        """
        self._shadow = shadow
        if shadow is not None:
            shadow.set_workers(self._workers, self._open)
            self._notify_running()

    def forget_scores(self) -> None:
        """Remove the similarity scores of waiting requests, which a change of the table invalidates."""
        for lease in self.queue.values():
            lease.request = replace(lease.request, similarity=None)

    def update_cost_model(self, cost: StepCost) -> None:
        """Set the present cost of a decode step."""
        for observer in self._observers():
            observer.update_cost_model(cost)

    def loads(self, exclude: Iterable[str] = ()) -> Loads:
        """Return the loads of all positions; the excluded workers are not available."""
        available = self._open.copy()
        available[[self._position[worker] for worker in exclude if worker in self._position]] = False
        return self._ledger.loads(self._ledger_rows, available)

    def _loads_for(self, request: PlacementRequest) -> Loads:
        """Return the loads for a request; its excluded workers are available if there are no others."""
        loads = self.loads(request.exclude)
        if not loads.available.any():
            loads = self.loads()
        if request.blocks is None:
            return loads
        return replace(loads, cached_tokens=self.prefixes.cached_tokens(self._workers, request.blocks))

    # -- one request -----------------------------------------------------------------------------

    def submit(self, leases: Iterable[Lease] = ()) -> list[Lease]:
        """Place or queue requests in state SENT; return all new leases, including those of queued requests.

        A running request is placed again, and a queued one keeps its turn. A request stays SENT if no worker
        is available at all.
        """
        leased = []
        for lease in leases:
            request = lease.request
            loads = self._loads_for(request)
            if not loads.available.any():
                continue
            if self._policy.queues and request.may_wait and not request.exclude:
                self._enqueue(lease)
            else:
                leased.append(self._assign(lease, self._policy.select(request, loads, self._rng), loads))
        return leased + self.dispatch()

    def dispatch(self) -> list[Lease]:
        """Let the policy assign workers to queued requests; return the new leases."""
        if not self.queue:
            return []
        loads = self.loads()
        if not loads.available.any():
            return []
        return [self._assign(lease, decision, loads) for lease, decision in self._decisions()]

    def hold(self, lease: Lease) -> None:
        """Add a request that is LEASED already, for example by its client."""
        self.finish(lease.request_id)
        self._start(lease)
        self._record_prefix(lease)

    def counted(self, request: PlacementRequest) -> None:
        """Replace a request by one with its measured counts and length; ignored unless it is running."""
        lease = self.running.get(request.request_id)
        if lease is not None:
            lease.request = request
            self._start(lease)

    def progress(self, generated_tokens: Mapping[str, int]) -> None:
        """Set the totals of generated tokens by request id; ignore unknown requests and decreases."""
        known = {
            request_id: tokens
            for request_id, tokens in generated_tokens.items()
            if request_id in self.running and tokens > self.running[request_id].generated_tokens
        }
        for request_id, tokens in known.items():
            self.running[request_id].generated_tokens = tokens
            self._ledger.progress(request_id, tokens)
        if known:
            for observer in self._observers():
                observer.on_progress(known)

    def finish(self, request_id: str) -> None:
        """Remove a waiting or running request; ignored if unknown."""
        waiting = self.queue.pop(request_id, None)
        if waiting is not None:
            waiting.become(State.DONE)
        self._stop(request_id)

    # -- implementation --------------------------------------------------------------------------

    def _enqueue(self, lease: Lease) -> None:
        self._stop(lease.request_id)
        before = self.queue.get(lease.request_id)
        lease.queued_at_s = self._clock() if before is None else before.queued_at_s
        lease.become(State.QUEUED)
        self.queue[lease.request_id] = lease

    def _in_turn(self) -> list[Lease]:
        """Return the queue in the order of the tenants' fair shares."""
        waiting = list(self.queue.values())
        tenants = [(lease.request.tenant, lease.request.priority) for lease in waiting]
        if len(set(tenants)) < 2:
            return waiting
        held = Counter(lease.request.tenant for lease in self.running.values())
        return [waiting[index] for index in fair_order(tenants, held)]

    def _decisions(self) -> Iterator[tuple[Lease, Decision]]:
        waiting = self._in_turn()
        if self._policy.queues:
            requests = [lease.request for lease in waiting]
            for index, decision in self._policy.dispatch(requests, self.loads(), self._rng):
                yield waiting[index], decision
        else:  # the policy was changed to one without a queue
            for lease in waiting:
                yield (
                    lease,
                    self._policy.select(lease.request, self._loads_for(lease.request), self._rng),
                )

    def _assign(self, lease: Lease, decision: Decision, loads: Loads) -> Lease:
        worker = self._workers[decision.worker]
        assert worker is not None, "a policy chose a vacant position"
        if self.queue.pop(lease.request_id, None) is lease:
            lease.waited_s = self._clock() - lease.queued_at_s
        self._stop(lease.request_id)  # a request that is placed again leaves its first worker
        lease.become(State.LEASED)
        lease.replica, lease.position = worker, decision.worker
        lease.num_candidates, lease.similarity = decision.num_candidates, decision.similarity
        lease.best = _is_best(decision.worker, lease.request, loads)
        lease.reason, lease.policy = decision.reason or self._policy.name, self._policy.name
        self._start(lease, decision)
        self._record_prefix(lease)
        if lease.request.blocks is not None:
            missing = max(0, lease.request.prompt_tokens - lease.cached_tokens)
            self._ledger.prefills(lease.request_id, missing)
        return lease

    def _record_prefix(self, lease: Lease) -> None:
        """Set the cached tokens of the prompt, then add its blocks to the worker's prefix cache."""
        blocks = lease.request.blocks
        if blocks is not None and lease.replica in self._position:
            lease.cached_tokens = int(self.prefixes.cached_tokens([lease.replica], blocks)[0])
            self.prefixes.sent(lease.replica, blocks)

    def _start(self, lease: Lease, decision: Decision | None = None) -> None:
        self.running[lease.request_id] = lease
        self._ledger.add(lease.request_id, lease.replica, lease.request.prompt_tokens)
        self._ledger.progress(lease.request_id, lease.generated_tokens)
        self._notify_assigned(lease, decision)

    def _stop(self, request_id: str) -> None:
        running = self.running.pop(request_id, None)
        if running is not None:
            running.become(State.DONE)
            self._ledger.release(request_id)
            for observer in self._observers():
                observer.on_finished(request_id)

    def _notify_assigned(self, lease: Lease, decision: Decision | None = None) -> None:
        position = self._position.get(lease.replica)
        for observer in self._observers():
            if position is None:
                observer.on_finished(lease.request_id)
                continue
            observer.on_assigned(lease.request, position, decision)
            if lease.generated_tokens:
                observer.on_progress({lease.request_id: lease.generated_tokens})

    def _observers(self) -> Iterator[GuardedPolicy | Shadow]:
        yield self._policy
        if self._shadow is not None:
            yield self._shadow

    def _notify_running(self) -> None:
        for lease in self.running.values():
            self._notify_assigned(lease)


def _is_best(worker: int, request: PlacementRequest, loads: Loads) -> bool:
    if request.similarity is None:
        return False
    similarity = worker_similarity(request.similarity, len(loads))
    return bool(similarity[worker] >= similarity[loads.available].max())
