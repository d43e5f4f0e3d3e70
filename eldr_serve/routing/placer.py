"""Which request runs on which worker, and which wait: the same for the server and the simulator.

Plain Python: nothing in here knows of Ray or of simulated time, and nothing waits, so each call is atomic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from eldr_serve.routing.cost import StepCost
from eldr_serve.routing.fairness import fair_order
from eldr_serve.routing.guard import GuardedPolicy
from eldr_serve.routing.ledger import LoadLedger
from eldr_serve.routing.policies import Policy, worker_similarity
from eldr_serve.routing.prefixes import PrefixMap
from eldr_serve.routing.shadow import Shadow
from eldr_serve.routing.types import Decision, Loads, Placement, PlacementRequest, State


class Placer:
    """Gives decode workers to prefilled requests by a policy, and tells the policy what becomes of them.

    A worker sits in a slot, which is its index in what policies see. Under a policy with a decode queue
    requests that may wait do so until it gives them workers; it is asked by `submit` and `dispatch`, so one
    of the two is called after whatever may change its mind.

    Args:
        failed: told of what a policy raised, where load stands in for it (GuardedPolicy); may raise it again.
        ledger: counts the load of workers.
        clock: s, for how long requests have waited.

    Attributes:
        running: requests that hold a worker, by id.
        queue: requests that wait, by id, first come first.
        prefixes: what was sent where, of requests whose blocks are known.
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
        self.running: dict[str, Placement] = {}
        self.queue: dict[str, Placement] = {}
        self.prefixes = PrefixMap()
        self._policy = GuardedPolicy(policy, failed)
        self._shadow: Shadow | None = None
        self._failed = failed
        self._ledger = LoadLedger() if ledger is None else ledger
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._workers: list[str | None] = []
        # Of the slots: who sits where, whose load the ledger has where, and which take requests.
        self._slot: dict[str, int] = {}
        self._places = np.zeros(0, np.int64)
        self._open = np.zeros(0, bool)

    # -- workers and policy ----------------------------------------------------------------------

    def set_workers(self, workers: Sequence[str | None], closed: Iterable[str] = ()) -> None:
        """Take who sits in each slot, None in a vacant one.

        Args:
            closed: workers that take no more requests.
        """
        changed = list(workers) != self._workers
        if changed:
            self._workers = list(workers)
            self._slot = {worker: slot for slot, worker in enumerate(workers) if worker is not None}
            self._places = self._ledger.places(workers)
            self.prefixes.keep(self._slot)
        shut = set(closed)
        self._open = np.array([worker is not None and worker not in shut for worker in workers], bool)
        if self._shadow is not None:
            self._shadow.set_workers(self._workers, self._open)
        if changed:
            self._tell_all()

    @property
    def policy(self) -> Policy:
        return self._policy.policy

    def set_policy(self, policy: Policy, cost: StepCost | None = None) -> None:
        """Decide by `policy` from now on; it is told of what a step costs and of all that runs."""
        self._policy = GuardedPolicy(policy, self._failed)
        if cost is not None:
            self._policy.update_cost_model(cost)
        self._tell_all()

    def set_shadow(self, shadow: Shadow | None) -> None:
        """Tell `shadow` all that the policy is told from now on, and first what runs; None: nobody."""
        self._shadow = shadow
        if shadow is not None:
            shadow.set_workers(self._workers, self._open)
            self._tell_all()

    def forget_scores(self) -> None:
        """The table is another one: what waits is not similar to its centroids by the old one's measure."""
        for placement in self.queue.values():
            placement.request = replace(placement.request, similarity=None)

    def update_cost_model(self, cost: StepCost) -> None:
        """A decode step costs this at present."""
        for told in self._told():
            told.update_cost_model(cost)

    def loads(self, exclude: Iterable[str] = ()) -> Loads:
        """Of each slot; the excluded workers are not available."""
        available = self._open.copy()
        available[[self._slot[worker] for worker in exclude if worker in self._slot]] = False
        return self._ledger.loads(self._places, available)

    def _loads_for(self, request: PlacementRequest) -> Loads:
        """As `request` finds them; where only workers that failed it are left, these are available."""
        loads = self.loads(request.exclude)
        if not loads.available.any():
            loads = self.loads()
        if request.blocks is None:
            return loads
        return replace(loads, cached_tokens=self.prefixes.cached_tokens(self._workers, request.blocks))

    # -- one request -----------------------------------------------------------------------------

    def submit(self, placements: Iterable[Placement] = ()) -> list[Placement]:
        """Place or queue requests, which are SENT; all that have a worker by this call, queued ones too.

        A request that is here already is placed anew, or keeps its turn. One for which there is no worker
        at all stays SENT.
        """
        leased = []
        for placement in placements:
            request = placement.request
            loads = self._loads_for(request)
            if not loads.available.any():
                continue
            if self._policy.queues and request.may_wait and not request.exclude:
                self._enqueue(placement)
            else:
                leased.append(self._assign(placement, self._policy.select(request, loads, self._rng), loads))
        return leased + self.dispatch()

    def dispatch(self) -> list[Placement]:
        """Give workers to requests of the queue, as the policy says."""
        if not self.queue:
            return []
        loads = self.loads()
        if not loads.available.any():
            return []
        return [self._assign(placement, decision, loads) for placement, decision in self._decisions()]

    def hold(self, placement: Placement) -> None:
        """The request is LEASED on its worker already, whoever placed it."""
        self.finish(placement.request_id)
        self._run(placement)
        self._remember(placement)

    def counted(self, request: PlacementRequest) -> None:
        """The request's prompt has been counted: its true signature and length; ignored if it runs not."""
        placement = self.running.get(request.request_id)
        if placement is not None:
            placement.request = request
            self._run(placement)

    def progress(self, generated_tokens: Mapping[str, int]) -> None:
        """Requests have generated so many tokens in all; unknown ones and steps back are ignored."""
        known = {
            request_id: tokens
            for request_id, tokens in generated_tokens.items()
            if request_id in self.running and tokens > self.running[request_id].generated_tokens
        }
        for request_id, tokens in known.items():
            self.running[request_id].generated_tokens = tokens
            self._ledger.progress(request_id, tokens)
        if known:
            for told in self._told():
                told.on_progress(known)

    def finish(self, request_id: str) -> None:
        """The request neither waits nor runs any more; unknown ones are ignored."""
        waiting = self.queue.pop(request_id, None)
        if waiting is not None:
            waiting.become(State.DONE)
        self._leave(request_id)

    # -- how -------------------------------------------------------------------------------------

    def _enqueue(self, placement: Placement) -> None:
        self._leave(placement.request_id)
        before = self.queue.get(placement.request_id)
        placement.since_s = self._clock() if before is None else before.since_s
        placement.become(State.QUEUED)
        self.queue[placement.request_id] = placement

    def _in_turn(self) -> list[Placement]:
        """The queue as fair shares of tenants serve it."""
        waiting = list(self.queue.values())
        tenants = [(placement.request.tenant, placement.request.priority) for placement in waiting]
        if len(set(tenants)) < 2:
            return waiting
        held = Counter(placement.request.tenant for placement in self.running.values())
        return [waiting[index] for index in fair_order(tenants, held)]

    def _decisions(self) -> Iterator[tuple[Placement, Decision]]:
        waiting = self._in_turn()
        if self._policy.queues:
            requests = [placement.request for placement in waiting]
            for index, decision in self._policy.dispatch(requests, self.loads(), self._rng):
                yield waiting[index], decision
        else:  # the policy was changed: nobody waits under this one
            for placement in waiting:
                yield (
                    placement,
                    self._policy.select(placement.request, self._loads_for(placement.request), self._rng),
                )

    def _assign(self, placement: Placement, decision: Decision, loads: Loads) -> Placement:
        worker = self._workers[decision.worker]
        assert worker is not None, "a policy chose a vacant slot"
        if self.queue.pop(placement.request_id, None) is placement:
            placement.waited_s = self._clock() - placement.since_s
        self._leave(placement.request_id)  # a request that is placed again leaves its first worker
        placement.become(State.LEASED)
        placement.replica, placement.slot = worker, decision.worker
        placement.band, placement.similarity = decision.band, decision.similarity
        placement.best = _is_best(decision.worker, placement.request, loads)
        placement.reason, placement.policy = decision.reason, self._policy.name
        self._run(placement, decision)
        self._remember(placement)
        if placement.request.blocks is not None:
            lacking = max(0, placement.request.prompt_tokens - placement.cached_tokens)
            self._ledger.prefills(placement.request_id, lacking)
        return placement

    def _remember(self, placement: Placement) -> None:
        """What its worker has of the prompt, and that it will have all of it."""
        blocks = placement.request.blocks
        if blocks is not None and placement.replica in self._slot:
            placement.cached_tokens = int(self.prefixes.cached_tokens([placement.replica], blocks)[0])
            self.prefixes.sent(placement.replica, blocks)

    def _run(self, placement: Placement, decision: Decision | None = None) -> None:
        self.running[placement.request_id] = placement
        self._ledger.add(placement.request_id, placement.replica, placement.request.prompt_tokens)
        self._ledger.progress(placement.request_id, placement.generated_tokens)
        self._tell(placement, decision)

    def _leave(self, request_id: str) -> None:
        running = self.running.pop(request_id, None)
        if running is not None:
            running.become(State.DONE)
            self._ledger.release(request_id)
            for told in self._told():
                told.on_finished(request_id)

    def _tell(self, placement: Placement, decision: Decision | None = None) -> None:
        slot = self._slot.get(placement.replica)
        for told in self._told():
            if slot is None:
                told.on_finished(placement.request_id)
                continue
            told.on_assigned(placement.request, slot, decision)
            if placement.generated_tokens:
                told.on_progress({placement.request_id: placement.generated_tokens})

    def _told(self) -> Iterator[GuardedPolicy | Shadow]:
        yield self._policy
        if self._shadow is not None:
            yield self._shadow

    def _tell_all(self) -> None:
        for placement in self.running.values():
            self._tell(placement)


def _is_best(worker: int, request: PlacementRequest, loads: Loads) -> bool:
    if request.similarity is None:
        return False
    similarity = worker_similarity(request.similarity, len(loads))
    return bool(similarity[worker] >= similarity[loads.available].max())
