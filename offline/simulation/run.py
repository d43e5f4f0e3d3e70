"""Discrete-event simulation of prefill, hand-over and decode, or of whole replicas, with a real policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling import CentroidTable, Policy
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.prefixes import PrefixCacheSize
from eldr_serve.scheduling.shadow import PolicyComparison, Shadow
from eldr_serve.scheduling.types import Lease, LeaseState
from eldr_serve.scheduling.worker_names import worker_names
from offline.simulation.cluster import Cluster
from offline.simulation.decode_workers import DecodeWorkers
from offline.simulation.outcome import Outcome
from offline.simulation.placement_requests import PlacementRequestFactory
from offline.simulation.prefill_engines import PrefillEngines
from offline.simulation.recorder import Recorder
from offline.simulation.requests import Experts, Requests, SimulationError

_STEP, _ROUND, _PREFILLED, _PLACE, _READY, _CHANGE = range(6)  # kinds of events
_SAMPLE_INTERVAL_S = 0.1  # time between samples of imbalance; with a barrier, every step is a sample


@dataclass(frozen=True)
class OperatorChange:
    """A change that an operator makes while requests run.

    Attributes:
        at_s: time of the change.
        workers: number of decode workers that take requests from then on, the first ones; None: unchanged.
        table: centroid table to swap in; None: unchanged.
    """

    at_s: float
    workers: int | None = None
    table: CentroidTable | None = None


def simulate(
    requests: Requests,
    policy: Policy,
    cluster: Cluster,
    *,
    experts: Experts | None = None,
    ranks: NDArray[np.integer] | None = None,
    changes: Sequence[OperatorChange] = (),
    in_flight: int | None = None,
    shadow: Policy | None = None,
    seed: int = 0,
    on_finished: Callable[[int], None] = lambda number: None,
) -> Outcome:
    """Simulate all requests; the same seed gives the same outcome.

    Args:
        policy: a new policy, which has its table if it needs one.
        experts: the experts that `requests.kind` refers to; None for a dense model.
        ranks: int[L,E], the EP rank of each expert on every replica, or int[K,L,E], those on each replica.
            In each layer, a step takes the time of the rank with most active experts. None: a replica's
            data-parallel ranks have equal shares of the active experts.
        changes: in any order.
        in_flight: number of requests of a closed loop, in which the next one arrives when one ends, whatever
            its arrival time; None: an open loop with the given arrival times.
        shadow: a new policy that places the same requests beside the policy (see Shadow); its
            `shadow_comparison` is in the outcome.
        on_finished: callback with the number of requests that ended since its last call.

    Raises:
        SimulationError: no worker can hold a request, or `experts` lacks a kind.
    """
    return _Simulation(
        requests,
        policy,
        cluster,
        experts=experts,
        ranks=ranks,
        changes=changes,
        in_flight=in_flight,
        shadow=shadow,
        seed=seed,
        on_finished=on_finished,
    ).run()


def _fail(error: Exception) -> None:
    """End the simulation, since a policy has failed."""
    raise error


class _Simulation:
    def __init__(
        self,
        requests: Requests,
        policy: Policy,
        cluster: Cluster,
        *,
        experts: Experts | None,
        ranks: NDArray[np.integer] | None,
        changes: Sequence[OperatorChange],
        in_flight: int | None,
        shadow: Policy | None,
        seed: int,
        on_finished: Callable[[int], None],
    ) -> None:
        _check(requests, cluster, experts)
        self._requests, self._cluster = requests, cluster
        self._on_finished = on_finished
        n = len(requests)
        self._prompt, self._output = requests.prompt_tokens.tolist(), requests.output_tokens.tolist()
        self._recorder = Recorder(requests)
        self._prefill: PrefillEngines | None = None
        if cluster.prefill is not None:
            self._prefill = PrefillEngines(cluster.prefill, requests, self._recorder)
        self._decode = DecodeWorkers(requests, cluster.decode, experts, ranks, self._recorder)
        self._now = 0.0
        self._ledger = LoadLedger(tokens_by_step=True)
        self._placer = Placer(
            policy, on_policy_error=_fail, ledger=self._ledger, seed=seed, clock=lambda: self._now
        )
        num_ranks = cluster.decode.ranks_per_replica
        replicas = range(len(self._decode) // num_ranks)
        self._names = [name for replica in replicas for name in worker_names(str(replica), num_ranks)]
        self._placer.set_workers(self._names)
        if (whole := cluster.decode.whole) is not None:
            kv_tokens = whole.cache_blocks * whole.block_tokens
            for name in self._names:
                self._placer.report_prefix_cache(name, PrefixCacheSize(whole.block_tokens, kv_tokens))
        self._shadow = None if shadow is None else self._add_shadow(shadow, seed)
        self._request_factory = PlacementRequestFactory(
            requests, experts, policy, whole, reads_counts=policy.reads_counts or shadow is not None
        )
        self._wants_progress = shadow is not None or type(policy).on_progress is not Policy.on_progress
        self._num_arrived = n if in_flight is None else min(in_flight, n)  # requests that have arrived
        self._recorder.arrival_s[: 0 if in_flight is None else n] = 0.0
        self._router_free_s = 0.0  # time at which the router has made all placements that wait for it
        self._reported_at_s = -np.inf
        self._events: list[tuple[float, int, int, int]] = []  # time, number, kind, subject
        self._num_events = 0
        self._in_round: set[int] = set()  # replicas whose ranks are in a step
        self._changes = sorted(changes, key=lambda change: change.at_s)
        for index, change in enumerate(self._changes):
            self._schedule(change.at_s, _CHANGE, index)
        self._sampled_at_s = -np.inf
        self._num_unreported = 0  # ended requests that on_finished does not know yet
        self._num_departures = 0  # requests that have ended since the last arrival

    def _add_shadow(self, policy: Policy, seed: int) -> Shadow:
        """Create and return a shadow that gets the placer's events."""
        shadow = Shadow(policy, seed=seed, clock=lambda: self._now)
        shadow.update_cost_model(self._cluster.decode.cost)
        self._placer.set_shadow(shadow)
        return shadow

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> Outcome:
        handlers = {
            _STEP: self._on_step_end,
            _ROUND: self._on_round_end,
            _PREFILLED: self._on_prefilled,
            _PLACE: self._place,
            _READY: self._on_ready,
            _CHANGE: self._on_change,
        }
        events = self._events
        for request_index, arrival in enumerate(self._recorder.arrival_s[: self._num_arrived].tolist()):
            while events and events[0][0] <= arrival:
                now, _, kind, subject = heapq.heappop(events)
                handlers[kind](now, subject)
            self._arrive(arrival, request_index)
        while events:
            now, _, kind, subject = heapq.heappop(events)
            handlers[kind](now, subject)
            while self._num_departures and self._num_arrived < len(self._requests):
                self._num_departures, self._num_arrived = self._num_departures - 1, self._num_arrived + 1
                self._recorder.arrival_s[self._num_arrived - 1] = now
                self._arrive(now, self._num_arrived - 1)
        self._expire(np.inf)
        self._begin_prefills(np.inf)
        self._on_finished(self._num_unreported)
        return self._recorder.make_outcome(self._compare_shadow())

    def _compare_shadow(self) -> PolicyComparison | None:
        if self._shadow is None:
            return None
        self._shadow.catch_up()
        return self._shadow.compare()

    def _schedule(self, time_s: float, kind: int, subject: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, kind, subject))

    # -- prefill and placement -------------------------------------------------------------------

    def _arrive(self, now: float, request_index: int) -> None:
        if self._prefill is None:
            self._on_prefilled(now, request_index)
            return
        self._prefill.enqueue(request_index)
        self._begin_prefills(now)

    def _begin_prefills(self, now: float) -> None:
        """Refuse requests that have waited too long for a prefill worker; begin those that a worker takes."""
        if self._prefill is None:
            return
        for _ in range(self._prefill.refuse(now)):
            self._count_end()
        for request_index, end in self._prefill.begin(now):
            self._schedule(end, _PREFILLED, request_index)

    def _release_prompt(self, request_index: int) -> None:
        """Free the KV of a prompt on its prefill worker."""
        if self._prefill is not None:
            self._prefill.release(request_index)

    def _on_prefilled(self, now: float, request_index: int) -> None:
        self._recorder.prefilled_s[request_index] = now  # whole replicas set it again later
        if self._prefill is not None:
            self._prefill.leave(request_index)
        if not self._cluster.router_s:
            self._place(now, request_index)
            return
        self._router_free_s = max(now, self._router_free_s) + self._cluster.router_s
        self._schedule(self._router_free_s, _PLACE, request_index)

    def _place(self, now: float, request_index: int) -> None:
        request = self._request_factory.make_request(
            request_index, self._decode.cacheable_blocks(request_index)
        )
        self._submit(now, [Lease(request, LeaseState.SENT)])

    def _submit(self, now: float, leases: Sequence[Lease] = ()) -> None:
        """Place these requests and the decode queue, as far as the policy has workers for them."""
        self._now = now
        if self._cluster.queue_timeout_s is not None:
            self._expire(now)
            self._begin_prefills(now)
        if leases or self._placer.queue.leases:
            self._report_progress(now)
        for lease in self._placer.submit(leases):
            self._hand_over(now, int(lease.request_id), lease.position)
        if self._shadow is not None:
            self._shadow.catch_up()

    def _expire(self, now: float) -> None:
        """Remove requests from the decode queue that have waited too long."""
        ttl, leases = self._cluster.queue_timeout_s or 0.0, self._placer.queue.leases
        while (first := next(iter(leases.values()), None)) and now - first.queued_at_s > ttl:
            self._placer.finish(first.request_id)
            self._release_prompt(int(first.request_id))
            self._count_end()

    def _hand_over(self, now: float, request_index: int, worker: int) -> None:
        self._recorder.placed_s[request_index] = now
        self._recorder.worker[request_index] = worker
        cluster = self._cluster
        delay = cluster.handover_fixed_s + cluster.handover_per_token_s * self._prompt[request_index]
        if delay:
            self._schedule(now + delay, _READY, request_index)
        else:
            self._on_ready(now, request_index)

    def _report_progress(self, now: float) -> None:
        if self._wants_progress and now - self._reported_at_s >= self._cluster.progress_s:
            self._reported_at_s = now
            self._placer.set_generated_tokens(
                {str(index): tokens for index, tokens in self._decode.tokens().items()}
            )

    def _on_change(self, now: float, index: int) -> None:
        change = self._changes[index]
        if change.table is not None:
            self._placer.policy.set_table(change.table)
            self._request_factory.discard_similarities()
        if change.workers is not None:
            self._placer.set_workers(self._names, draining=self._names[change.workers :])
            self._submit(now)

    # -- decode ----------------------------------------------------------------------------------

    def _on_ready(self, now: float, request_index: int) -> None:
        self._release_prompt(request_index)
        self._begin_prefills(now)
        worker = int(self._recorder.worker[request_index])
        self._decode.enqueue(worker, request_index)
        ranks = self._cluster.decode.ranks_per_replica
        if ranks > 1:
            if worker // ranks not in self._in_round:
                self._begin_round(now, worker // ranks)
        elif not self._decode.is_busy(worker):
            self._begin(now, worker)

    def _begin(self, now: float, worker: int) -> None:
        if (seconds := self._decode.begin(worker)) > 0:
            self._schedule(now + seconds, _STEP, worker)

    def _begin_round(self, now: float, replica: int) -> None:
        longest = self._decode.begin_round(replica)
        if longest > 0:
            self._in_round.add(replica)
            self._schedule(now + longest, _ROUND, replica)
            self._recorder.record_sample(now, self._decode.kv_tokens)
        else:
            self._in_round.discard(replica)

    def _on_step_end(self, now: float, worker: int) -> None:
        num_ended = self._end_step(now, worker)
        if now - self._sampled_at_s >= _SAMPLE_INTERVAL_S:
            self._sampled_at_s = now
            self._recorder.record_sample(now, self._decode.kv_tokens)
        if num_ended:
            self._submit(now)
        if not self._decode.is_busy(worker):  # otherwise a newly placed request has begun the next step
            self._begin(now, worker)

    def _on_round_end(self, now: float, replica: int) -> None:
        num_ended = sum([self._end_step(now, worker) for worker in self._decode.ranks_of(replica)])
        if num_ended:
            self._submit(now)  # the round still counts as running, so all ranks begin together
        self._begin_round(now, replica)

    def _end_step(self, now: float, worker: int) -> int:
        """End the worker's step. Return how many requests have ended."""
        ended = self._decode.end_step(worker)
        for request_index in ended.prefilled:
            self._recorder.prefilled_s[request_index] = now
            running = self._placer.running.get(str(request_index))
            if running is not None and (
                counted := self._request_factory.replace_predicted_counts(request_index, running.request)
            ):
                self._placer.set_measured_counts(counted)
            self._placer.set_generated_tokens({str(request_index): 1})
        self._ledger.add_tokens(self._names[worker], ended.answers)
        if ended.first:
            self._recorder.first_s[ended.first] = now
        for request_index in ended.finished:
            self._recorder.last_s[request_index] = now
            self._placer.set_generated_tokens({str(request_index): self._output[request_index]})
            self._placer.finish(str(request_index))
            self._count_end()
        return len(ended.finished)

    def _count_end(self) -> None:
        self._num_departures += 1
        self._num_unreported += 1
        if self._num_unreported >= 1000:
            self._on_finished(self._num_unreported)
            self._num_unreported = 0


def _check(requests: Requests, cluster: Cluster, experts: Experts | None) -> None:
    if cluster.decode.cost.seconds(1, 1, 1) <= 0:
        raise SimulationError("a decode step costs no time")
    longest = int(requests.prompt_tokens.max(initial=0))
    if cluster.prefill is not None and longest > (cluster.prefill.kv_tokens or longest):
        raise SimulationError(
            f"a prompt of {longest} tokens needs more than the {cluster.prefill.kv_tokens} KV tokens of a "
            "prefill worker"
        )
    capacity = cluster.decode.kv_tokens
    if capacity is not None and len(requests):
        tokens = requests.prompt_tokens + requests.output_tokens
        if (over := int(tokens.argmax())) >= 0 and tokens[over] > capacity:
            raise SimulationError(
                f"request {over} needs {tokens[over]} KV tokens, more than the {capacity} of a decode worker"
            )
    if experts is not None and len(requests.kind) != len(requests):
        raise SimulationError("the requests have no kinds, so their experts are unknown")
    if experts is not None and len(requests) and int(requests.kind.max()) >= len(experts.offset) - 1:
        raise SimulationError(f"a request has kind {int(requests.kind.max())}, which does not exist")
