"""Assignment of requests to workers, shared by the server and the simulator.

This module does not use Ray or simulated time and never waits, so each call is atomic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.decode_queue import DecodeQueue
from eldr_serve.scheduling.guarded_policy import GuardedPolicy
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.policies.base import Policy, is_most_similar
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize
from eldr_serve.scheduling.shadow import Shadow
from eldr_serve.scheduling.types import Decision, Lease, LeaseState, Loads, PlacementRequest
from eldr_serve.scheduling.worker_set import WorkerSet


class Placer:
    """Assigns decode workers to prefilled requests by a policy, and notifies it of their progress.

    Under a policy with a decode queue, requests that may wait are queued until the policy assigns workers.
    Only `submit` and `dispatch` ask the policy, so call one of them after any change of loads or workers.
    WorkerSet defines positions, and which workers are available.

    Args:
        policy: the live policy, until `set_policy` replaces it.
        on_policy_error: callback for each exception of the policy, whose decision GuardedPolicy then makes
            by load; may raise it again.
        ledger: load of the workers; None: a new one.
        seed: seed of the random numbers that the policy uses.
        adapters: LoRA adapters of the workers.
        clock: time source for queue waits, s.

    Attributes:
        running: requests that hold a worker, by id.
        queue: requests that wait for a worker.
        workers: the workers, with their loads and prefix caches.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        on_policy_error: Callable[[Exception], None],
        ledger: LoadLedger | None = None,
        adapters: LoadedAdapters | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: dict[str, Lease] = {}
        self._policy = GuardedPolicy(policy, on_policy_error)
        self._shadow: Shadow | None = None
        self._on_policy_error = on_policy_error
        self._ledger = LoadLedger() if ledger is None else ledger
        self.workers = WorkerSet(self._ledger, adapters or LoadedAdapters())
        self.queue = DecodeQueue(clock)
        self._rng = np.random.default_rng(seed)

    # -- workers and policy ----------------------------------------------------------------------

    def set_workers(
        self,
        workers: Sequence[str | None],
        draining: Collection[str] = (),
        unreachable: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Set the worker of each position, None for a vacant one.

        Args:
            draining: workers that get no more requests.
            unreachable: workers that an ingress cannot reach, by ingress; the other ingresses reach all.
        """
        changed = self.workers.update(workers, draining, unreachable)
        if changed:
            self._policy.on_workers_changed(self.workers.names)
        if self._shadow is not None:
            self._shadow.set_workers(self.workers.names, self.workers.available)
        if changed:
            for observer in self._observers():
                self._notify_of_running(observer)

    @property
    def policy(self) -> Policy:
        """Return the live policy."""
        return self._policy.policy

    def set_policy(self, policy: Policy, cost: StepCost | None = None) -> None:
        """Change the policy; notify the new one of workers, step cost and running requests."""
        self._policy = GuardedPolicy(policy, self._on_policy_error)
        self._policy.on_workers_changed(self.workers.names)
        if cost is not None:
            self._policy.update_cost_model(cost)
        self._notify_of_running(self._policy)

    def set_shadow(self, shadow: Shadow | None) -> None:
        """Send all notifications of the policy to `shadow` too, beginning with the running requests.

        Args:
            shadow: None removes the current one.
        """
        self._shadow = shadow
        if shadow is not None:
            shadow.set_workers(self.workers.names, self.workers.available)
            self._notify_of_running(shadow)

    def discard_scores(self) -> None:
        """Remove the similarity scores of waiting requests, which a change of the table invalidates."""
        for lease in self.queue.leases.values():
            lease.request = replace(lease.request, similarity=None)

    def update_cost_model(self, cost: StepCost) -> None:
        """Set the current cost of a decode step."""
        for observer in self._observers():
            observer.update_cost_model(cost)

    def report_prefix_cache(
        self, worker: str, size: PrefixCacheSize | None, changes: BlockChanges | None = None
    ) -> bool:
        """Set the size of a worker's prefix cache, and apply an engine's report of its blocks.

        Args:
            size: None if the worker has no prefix cache.
            changes: changes since the last report; None: there are none, or the engine reports none.

        Returns:
            Whether all blocks that the engine has reported are known.
        """
        if size is not None:
            self.workers.prefixes.set_capacity(worker, size.kv_tokens, size.block_tokens)
        return self.workers.prefixes.report(worker, changes)

    # -- one request -----------------------------------------------------------------------------

    def submit(self, leases: Iterable[Lease] = ()) -> list[Lease]:
        """Place or queue requests in state SENT; return all new leases, including those of queued requests.

        A running request is placed again, and a queued one keeps its place. A request stays SENT if no worker
        is available at all.
        """
        new_leases = []
        for lease in leases:
            request = lease.request
            loads = self.workers.loads_for(lease)
            if not loads.available.any():
                continue
            if self._policy.has_queue and request.may_wait and not request.worker_failed:
                self._stop(lease.request_id)
                self.queue.add(lease)
            else:
                new_leases.append(self._assign(lease, self._policy.select(request, loads, self._rng), loads))
        return new_leases + self.dispatch()

    def dispatch(self) -> list[Lease]:
        """Let the policy assign workers to queued requests; return the new leases."""
        if not self.queue.leases or not self.workers.available.any():
            return []
        waiting = self.queue.in_turn(self.running.values())
        new_leases: list[Lease] = []
        if self._policy.has_queue:
            full = set[tuple[frozenset[str], ...]]()
            # The policy gets successive requests together only if they may use the same workers. So the
            # order is fair over all ingresses, and no group takes all slots before another's turn.
            for excluded, successive in groupby(waiting, self.workers.excluded_for):
                if excluded in full:
                    continue
                group, loads = list(successive), self.workers.loads_avoiding(*excluded)
                decisions = self._policy.dispatch([lease.request for lease in group], loads, self._rng)
                new_leases += [self._assign(group[index], decision, loads) for index, decision in decisions]
                if len(decisions) < len(group):
                    full.add(excluded)
        else:  # the policy was changed to one without a queue
            for lease in waiting:
                current_loads = self.workers.loads_for(lease)  # loads with this loop's requests
                decision = self._policy.select(lease.request, current_loads, self._rng)
                new_leases.append(self._assign(lease, decision, current_loads))
        return new_leases

    def adopt_lease(self, lease: Lease) -> None:
        """Add a lease that is granted already, for example by its ingress."""
        self.finish(lease.request_id, is_complete=False)
        self._register_running(lease)
        self._record_prompt(lease)

    def set_measured_counts(self, request: PlacementRequest) -> None:
        """Replace a request by one with its measured counts and length; ignored unless it is running."""
        lease = self.running.get(request.request_id)
        if lease is not None:
            lease.request = request
            self._register_running(lease)

    def pending_counts(self) -> list[NDArray[Any]]:
        """Return the known expert counts, unsigned[L, E], of running requests, then of waiting ones."""
        leases = (*self.running.values(), *self.queue.leases.values())
        all_counts = (lease.request.expert_counts for lease in leases)
        return [counts for counts in all_counts if counts is not None]

    def set_generated_tokens(self, generated_tokens: Mapping[str, int]) -> None:
        """Set the totals of generated tokens by request id; ignore unknown requests and decreases."""
        updates = {
            request_id: tokens
            for request_id, tokens in generated_tokens.items()
            if request_id in self.running and tokens > self.running[request_id].generated_tokens
        }
        for request_id, tokens in updates.items():
            self.running[request_id].generated_tokens = tokens
            self._ledger.set_generated_tokens(request_id, tokens)
        if updates:
            for observer in self._observers():
                observer.on_progress(updates)

    def finish(self, request_id: str, *, is_complete: bool = True) -> None:
        """Remove a waiting or running request; ignored if unknown.

        Args:
            is_complete: whether its answer is complete, so that policies may learn the length.
        """
        if self.queue.end(request_id):
            for observer in self._observers():
                observer.on_finished(request_id)
        self._stop(request_id, is_complete=is_complete)

    # -- implementation --------------------------------------------------------------------------

    def _assign(self, lease: Lease, decision: Decision, loads: Loads) -> Lease:
        worker = self.workers.names[decision.position]
        assert worker is not None, "a policy chose a vacant position"
        self.queue.remove_assigned(lease)
        self._stop(lease.request_id)  # a request that is placed again leaves its first worker
        lease.become(LeaseState.GRANTED)
        lease.worker, lease.position = worker, decision.position
        lease.num_candidates, lease.similarity = decision.num_candidates, decision.similarity
        lease.is_most_similar = is_most_similar(decision.position, lease.request, loads)
        lease.reason, lease.policy = decision.reason or self._policy.name, self._policy.name
        self._register_running(lease, decision)
        self._record_prompt(lease)
        return lease

    def _record_prompt(self, lease: Lease) -> None:
        """Record the prompt at its worker, and the part that a whole replica has still to compute."""
        self.workers.record_placement(lease)
        if lease.request.blocks is not None and not lease.generated_tokens:
            missing = max(0, lease.request.prompt_tokens - lease.cached_tokens)
            self._ledger.add_prefill(lease.request_id, missing)

    def _register_running(self, lease: Lease, decision: Decision | None = None) -> None:
        self.running[lease.request_id] = lease
        self._ledger.add(lease.request_id, lease.worker, lease.request.prompt_tokens)
        self._ledger.set_generated_tokens(lease.request_id, lease.generated_tokens)
        for observer in self._observers():
            self._notify_assigned(observer, lease, decision)

    def _stop(self, request_id: str, *, is_complete: bool = False) -> None:
        running = self.running.pop(request_id, None)
        if running is not None:
            running.become(LeaseState.ENDED)
            self._ledger.release(request_id)
            for observer in self._observers():
                notify = observer.on_finished if is_complete else observer.on_aborted
                notify(request_id)

    def _notify_assigned(
        self, observer: GuardedPolicy | Shadow, lease: Lease, decision: Decision | None = None
    ) -> None:
        position = self.workers.positions.get(lease.worker)
        if position is None:
            observer.on_aborted(lease.request_id)
            return
        if isinstance(observer, Shadow):
            observer.on_assigned(lease.request, position, lease.generated_tokens)
        else:
            observer.on_assigned(lease.request, position, decision)
        if lease.generated_tokens:
            observer.on_progress({lease.request_id: lease.generated_tokens})

    def _observers(self) -> Iterator[GuardedPolicy | Shadow]:
        yield self._policy
        if self._shadow is not None:
            yield self._shadow

    def _notify_of_running(self, observer: GuardedPolicy | Shadow) -> None:
        for lease in self.running.values():
            self._notify_assigned(observer, lease)
