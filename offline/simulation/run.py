"""Discrete events over prefill, hand-over and decode, or whole workers, placed by a production policy.

A decode worker's step is one event for all its requests: their tokens, KV and ends follow from the number of
its steps, and only the union of their experts is recomputed.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling import (
    LoadLedger,
    Placement,
    PlacementRequest,
    Placer,
    Policy,
    PromptBlocks,
    Saving,
    Shadow,
    State,
)
from eldr_serve.scheduling.policies.base import CentroidTable
from eldr_serve.scheduling.prefill import choose_prefill
from offline.simulation.cluster import Cluster, Prefill, Whole
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Experts, Requests, SimulationError, rank_masks
from offline.simulation.whole import WholePrefill

_STEP, _ROUND, _PREFILLED, _READY, _CHANGE = range(5)  # kinds of events
_SAMPLE_EVERY = 0.1  # s, between samples of imbalance; with a barrier every step is sampled


@dataclass(frozen=True)
class Change:
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
    changes: Sequence[Change] = (),
    in_flight: int | None = None,
    shadow: Policy | None = None,
    seed: int = 0,
    on_finished: Callable[[int], None] = lambda number: None,
) -> Outcome:
    """Run all requests; deterministic for a seed.

    Args:
        policy: a new one; with its table, if it needs one.
        experts: the experts that `requests.kind` refers to; None for a dense model.
        ranks: int[L,E], the EP rank of each expert, the same on all workers, or int[K,L,E]; in each layer a
            step then pays for the rank with most active experts. None: one rank.
        changes: in any order.
        in_flight: a closed loop of so many requests: the next one arrives when one ends, whatever its arrival
            time. None: an open loop, by arrival times.
        shadow: a new policy that places the same requests beside the policy (see routing.Shadow); its
            `saving` is in the outcome.
        on_finished: callback with the number of requests that ended since its last call.

    Raises:
        SimulationError: a request that no worker can hold, or kinds that `experts` lacks.
    """
    return _Simulation(
        requests, policy, cluster, experts, ranks, changes, in_flight, shadow, seed, on_finished
    ).run()


class _Worker:
    """A decode worker. A running request has `steps - start` tokens."""

    __slots__ = (
        "busy", "ends", "fresh", "jobs", "kv", "owed_s", "prefill", "rows", "steps", "waiting",
    )  # fmt: skip

    def __init__(self, whole: Whole | None) -> None:
        self.prefill = None if whole is None else WholePrefill(whole)
        self.jobs: list[int] = []
        self.waiting: deque[int] = deque()
        self.fresh: list[int] = []  # running, without a token
        self.ends: list[tuple[int, int]] = []  # heap of (step at which it ends, request)
        self.rows: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None
        self.steps = 0
        self.kv = 0  # tokens of running requests
        self.owed_s = 0.0  # recomputation time of preempted requests, in the next step
        self.busy = False


class _PrefillWorkers:
    """Prefill workers with a prefix cache each; first come, first served."""

    def __init__(self, config: Prefill) -> None:
        self._config = config
        self._free_s = [0.0] * config.workers
        self._in_flight = {str(p): 0 for p in range(config.workers)}
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(config.workers)]

    def run(self, now: float, head: bytes, blocks: tuple[int, ...], tokens: int) -> tuple[int, float, int]:
        """Return the worker, the end of the prompt's prefill, and the number of cached tokens."""
        p = int(choose_prefill(head, self._in_flight, max_load_ratio=self._config.max_load_ratio))
        self._in_flight[str(p)] += 1
        hit = min(self._hit(p, blocks) * self._config.block_tokens, tokens - 1)
        seconds = self._config.fixed_s + self._config.per_token_s * (tokens - hit)
        self._free_s[p] = max(now, self._free_s[p]) + seconds
        return p, self._free_s[p], hit

    def leave(self, p: int) -> None:
        self._in_flight[str(p)] -= 1

    def _hit(self, p: int, blocks: tuple[int, ...]) -> int:
        """Return the number of cached leading blocks; then cache all blocks, as far as there is room."""
        if not self._config.cache_blocks:
            return 0
        cached = self._cached[p]
        hit = next((n for n, block in enumerate(blocks) if block not in cached), len(blocks))
        for block in blocks:
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > self._config.cache_blocks:
            cached.popitem(last=False)
        return hit


class _Ledger(LoadLedger):
    """Counts every token at its step, not when progress is reported."""

    def step(self, worker: int, tokens: int) -> None:
        """Add tokens that the worker's requests have generated."""
        self._kv_tokens[worker] += tokens

    def progress(self, request_id: str, generated_tokens: int) -> None:
        self._prefilled(request_id)
        place, prompt_tokens, _ = self._requests[request_id]
        self._requests[request_id] = (place, prompt_tokens, generated_tokens)


def _fail(error: Exception) -> None:
    """End the simulation if a policy fails."""
    raise error


class _Simulation:
    def __init__(
        self,
        requests: Requests,
        policy: Policy,
        cluster: Cluster,
        experts: Experts | None,
        ranks: NDArray[np.integer] | None,
        changes: Sequence[Change],
        in_flight: int | None,
        shadow: Policy | None,
        seed: int,
        on_finished: Callable[[int], None],
    ) -> None:
        decode = cluster.decode
        _check(requests, cluster, experts)
        self._requests, self._cluster, self._experts = requests, cluster, experts
        self._cost = decode.cost
        self._on_finished = on_finished
        n = len(requests)
        self._prompt, self._output = requests.prompt_tokens.tolist(), requests.output_tokens.tolist()
        self._kind = requests.kind.tolist()
        self._similarity: dict[int, NDArray[np.float32]] = {}  # by kind
        self._prefill = _PrefillWorkers(cluster.prefill) if cluster.prefill else None
        self._prefilled_by = [0] * n
        self._workers = [_Worker(decode.whole) for _ in range(decode.workers)]
        self._now = 0.0
        self._ledger = _Ledger()
        self._placer = Placer(policy, failed=_fail, ledger=self._ledger, seed=seed, clock=lambda: self._now)
        self._names = [str(w) for w in range(decode.workers)]
        self._placer.set_workers(self._names)
        if decode.whole is not None:
            for name in self._names:
                size = decode.whole.block_tokens
                self._placer.prefixes.holds(name, decode.whole.cache_blocks * size, size)
        self._shadow: Shadow | None = None
        if shadow is not None:
            self._shadow = Shadow(shadow, seed=seed, clock=lambda: self._now)
            self._shadow.update_cost_model(decode.cost)
            self._placer.set_shadow(self._shadow)
        self._reads_counts = policy.reads_counts or shadow is not None
        self._wants_progress = shadow is not None or type(policy).on_progress is not Policy.on_progress
        self._arrival_s = requests.arrival_s.copy()
        self._num_arrived = n if in_flight is None else min(in_flight, n)  # requests that have arrived
        self._arrival_s[: 0 if in_flight is None else n] = 0.0
        self._reported_at = -np.inf
        self._done = [0] * n  # tokens before the request last left a worker
        self._start = np.zeros(n, np.int64)
        self._ends_at = [-1] * n
        self._events: list[tuple[float, int, int, int]] = []  # time, number, kind, subject
        self._number = 0
        self._in_round = False
        self._changes = sorted(changes, key=lambda change: change.at_s)
        for index, change in enumerate(self._changes):
            self._at(change.at_s, _CHANGE, index)
        self._masks = None if ranks is None else [rank_masks(r) for r in ranks.reshape(-1, *ranks.shape[-2:])]
        nan = np.full(n, np.nan)
        self._prefilled_s, self._placed_s, self._first_s, self._last_s = (nan.copy() for _ in range(4))
        self._worker = np.full(n, -1, np.int64)
        self._hit = np.zeros(n, np.int64)
        self._preempted = 0
        self._log = array("i"), array("i"), array("d"), array("i")
        self._imbalance, self._spread, self._sample_s = array("d"), array("d"), array("d")
        self._sampled_at = -np.inf
        self._ended = 0
        self._departures = 0  # requests that have ended since the last arrival

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> Outcome:
        handlers = {
            _STEP: self._step_ended,
            _ROUND: self._round_ended,
            _PREFILLED: self._prefilled,
            _READY: self._ready,
            _CHANGE: self._changed,
        }
        events = self._events
        for j, arrival in enumerate(self._arrival_s[: self._num_arrived].tolist()):
            while events and events[0][0] <= arrival:
                now, _, kind, subject = heapq.heappop(events)
                handlers[kind](now, subject)
            self._arrive(arrival, j)
        while events:
            now, _, kind, subject = heapq.heappop(events)
            handlers[kind](now, subject)
            while self._departures and self._num_arrived < len(self._requests):
                self._departures, self._num_arrived = self._departures - 1, self._num_arrived + 1
                self._arrival_s[self._num_arrived - 1] = now
                self._arrive(now, self._num_arrived - 1)
        self._expire(np.inf)
        self._on_finished(self._ended)
        batch, experts, seconds, step_worker = self._log
        return Outcome(
            self._arrival_s, self._prefilled_s, self._placed_s, self._first_s, self._last_s,
            self._worker, self._requests.output_tokens, self._hit, self._preempted,
            np.array(batch, np.int64), np.array(experts, np.int64), np.array(seconds),
            np.array(step_worker, np.int64), np.array(self._imbalance), np.array(self._spread),
            np.array(self._sample_s), self._saving(),
        )  # fmt: skip

    def _saving(self) -> Saving | None:
        if self._shadow is None:
            return None
        self._shadow.catch_up()
        return self._shadow.saving()

    def _at(self, time: float, kind: int, subject: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, kind, subject))

    # -- prefill and placement -------------------------------------------------------------------

    def _arrive(self, now: float, j: int) -> None:
        if self._prefill is None:
            self._prefilled(now, j)
            return
        blocks = self._requests.blocks[j] if self._requests.blocks else ()
        head = str(blocks[0] if blocks else f"r{j}").encode()
        p, end, self._hit[j] = self._prefill.run(now, head, blocks, self._prompt[j])
        self._prefilled_by[j] = p
        self._at(end, _PREFILLED, j)

    def _prefilled(self, now: float, j: int) -> None:
        self._prefilled_s[j] = now  # whole workers set it again later
        if self._prefill is not None:
            self._prefill.leave(self._prefilled_by[j])
        self._submit(now, [Placement(self._request(j), State.SENT)])

    def _request(self, j: int) -> PlacementRequest:
        prompt, output = self._prompt[j], self._output[j]
        requests = self._requests
        key = requests.keys[j] if requests.keys else str(requests.blocks[j]) if requests.blocks else None
        whole, blocks = self._cluster.decode.whole, None
        if whole is not None:
            blocks = PromptBlocks(np.array(self._full_blocks(j), np.uint64), whole.block_tokens)
        if self._experts is None:
            return PlacementRequest(
                str(j), None, prompt, output, prompt_key=key, blocks=blocks, may_wait=True
            )
        kind = self._kind[j]
        policy = self._placer.policy
        table = policy.table
        if table is not None and kind not in self._similarity:
            self._similarity[kind] = table.similarity(self._experts.counts[kind])
        predicted = whole is not None and self._experts.predicted is not None
        known = self._experts.predicted_signature if predicted else self._experts.signature
        counts = known(kind, prompt) if self._reads_counts else None
        domain = self._experts.domains[kind]
        similarity = self._similarity.get(kind)
        return PlacementRequest(
            str(j), counts, prompt, output, domain, similarity, key,
            predicted=predicted, blocks=blocks, may_wait=True,
        )  # fmt: skip

    def _count_prompt(self, j: int) -> None:
        """Report the true counts of a prompt that a whole worker has prefilled to the policy."""
        running = self._placer.running.get(str(j))
        if running is None or not running.request.predicted or running.request.signature is None:
            return
        assert self._experts is not None
        counts = self._experts.signature(self._kind[j], self._prompt[j])
        self._placer.counted(replace(running.request, signature=counts, predicted=False))

    def _full_blocks(self, j: int) -> tuple[int, ...]:
        """Return the prompt's blocks that a whole worker can cache; the last token is always computed."""
        whole, blocks = self._cluster.decode.whole, self._requests.blocks
        if whole is None or not whole.cache_blocks or not blocks:
            return ()
        return blocks[j][: (self._prompt[j] - 1) // whole.block_tokens]

    def _submit(self, now: float, placements: Sequence[Placement] = ()) -> None:
        """Place these requests and the decode queue, as far as the policy has workers for them."""
        self._now = now
        if self._cluster.queue_ttl_s is not None:
            self._expire(now)
        if placements or self._placer.queue:
            self._report_progress(now)
        for placement in self._placer.submit(placements):
            self._placed(now, int(placement.request_id), placement.slot)
        if self._shadow is not None:
            self._shadow.catch_up()

    def _expire(self, now: float) -> None:
        """Remove requests from the decode queue that have waited too long."""
        ttl = self._cluster.queue_ttl_s or 0.0
        while (first := next(iter(self._placer.queue.values()), None)) and now - first.since_s > ttl:
            self._placer.finish(first.request_id)
            self._count_end()

    def _placed(self, now: float, j: int, w: int) -> None:
        self._placed_s[j] = now
        self._worker[j] = w
        cluster = self._cluster
        delay = cluster.handoff_fixed_s + cluster.handoff_per_token_s * self._prompt[j]
        if delay:
            self._at(now + delay, _READY, j)
        else:
            self._ready(now, j)

    def _report_progress(self, now: float) -> None:
        if self._wants_progress and now - self._reported_at >= self._cluster.progress_s:
            self._reported_at = now
            self._placer.progress(
                {str(j): worker.steps - int(self._start[j]) for worker in self._workers for j in worker.jobs}
            )

    def _changed(self, now: float, index: int) -> None:
        change = self._changes[index]
        if change.table is not None:
            self._placer.policy.with_table(change.table)
            self._similarity.clear()
        if change.workers is not None:
            self._placer.set_workers(self._names, closed=self._names[change.workers :])
            self._submit(now)

    # -- decode ----------------------------------------------------------------------------------

    def _ready(self, now: float, j: int) -> None:
        w = int(self._worker[j])
        worker = self._workers[w]
        worker.waiting.append(j)
        if self._cluster.decode.barrier:
            if not self._in_round:
                self._begin_round(now)
        elif not worker.busy:
            self._begin(now, w)

    def _begin(self, now: float, w: int) -> None:
        seconds = self._begin_step(w)
        self._workers[w].busy = seconds > 0
        if seconds > 0:
            self._at(now + seconds, _STEP, w)

    def _begin_round(self, now: float) -> None:
        longest = max(self._begin_step(w) for w in range(len(self._workers)))
        self._in_round = longest > 0
        if longest > 0:
            self._at(now + longest, _ROUND, 0)
            self._sample(now)

    def _step_ended(self, now: float, w: int) -> None:
        left = self._end_step(now, w)
        if now - self._sampled_at >= _SAMPLE_EVERY:
            self._sampled_at = now
            self._sample(now)
        if left:
            self._submit(now)
        if not self._workers[w].busy:  # else a request placed just now has begun the next step
            self._begin(now, w)

    def _round_ended(self, now: float, _: int) -> None:
        left = sum([self._end_step(now, w) for w in range(len(self._workers))])
        if left:
            self._submit(now)  # while the round counts as running, so that all begin together
        self._begin_round(now)

    def _begin_step(self, w: int) -> float:
        """Admit and preempt requests; return the time of the next step, s, or 0 if there is nothing to do."""
        worker = self._workers[w]
        self._admit(worker)
        jobs, answers = worker.jobs, len(worker.jobs)
        prompts = prompt_tokens = 0
        if worker.prefill is not None:
            prompts, prompt_tokens = worker.prefill.step(answers)
            answers += len(worker.prefill.ending)
        if not jobs and not prompts:
            return 0.0
        active = self._active_experts(w, worker) if self._experts is not None and jobs else 0
        # A prompt's first token in a step belongs to the request itself, as in the engines' records.
        of_prompts = prompt_tokens - prompts
        seconds = float(self._cost.seconds(len(jobs) + prompts, worker.kv, active, of_prompts))
        seconds += worker.owed_s
        worker.owed_s = 0.0
        if not answers:  # no request gets a token in this step
            return seconds
        batches, experts, times, workers = self._log
        batches.append(answers)
        experts.append(active)
        times.append(seconds)
        workers.append(w)
        return seconds

    def _admit(self, worker: _Worker) -> None:
        decode = self._cluster.decode
        capacity = decode.kv_tokens
        prefilling = worker.prefill
        while worker.waiting and len(worker.jobs) + len(prefilling or ()) < decode.max_batch:
            j = worker.waiting[0]
            tokens = self._prompt[j] + self._done[j]
            if capacity is not None and worker.kv + len(worker.jobs) + tokens + 1 > capacity:
                break
            worker.waiting.popleft()
            worker.kv += tokens
            if prefilling is not None:
                self._hit[j] = prefilling.take(j, tokens, self._full_blocks(j))
                continue
            self._begin_answer(worker, j)
            if self._done[j]:
                worker.owed_s += decode.recompute_per_token_s * tokens
        while capacity is not None and worker.kv + len(worker.jobs) > capacity:
            self._preempt(worker)

    def _begin_answer(self, worker: _Worker, j: int) -> None:
        """Begin the request's answer: each step makes a token of it."""
        worker.jobs.append(j)
        worker.rows = None
        self._start[j] = worker.steps - self._done[j]
        self._ends_at[j] = worker.steps - self._done[j] + self._output[j]
        heapq.heappush(worker.ends, (self._ends_at[j], j))
        if not self._done[j]:
            worker.fresh.append(j)

    def _preempt(self, worker: _Worker) -> None:
        """Move the youngest request of a worker whose KV is full to the front of its queue."""
        j = worker.jobs.pop()
        worker.rows = None
        self._done[j] = worker.steps - int(self._start[j])
        self._ends_at[j] = -1
        worker.kv -= self._prompt[j] + self._done[j]
        if j in worker.fresh:
            worker.fresh.remove(j)
        worker.waiting.appendleft(j)
        self._preempted += 1

    def _active_experts(self, w: int, worker: _Worker) -> int:
        experts = self._experts
        assert experts is not None
        if worker.rows is None:
            jobs = np.array(worker.jobs)
            kinds = self._requests.kind[jobs]
            first = experts.offset[kinds]
            worker.rows = first, experts.offset[kinds + 1] - first, self._start[jobs]
        first, length, start = worker.rows
        union = np.bitwise_or.reduce(experts.bits[first + (worker.steps - start) % length], axis=0)
        if self._masks is None:
            return int(np.bitwise_count(union).sum())
        mask = self._masks[w % len(self._masks)]
        on_rank = np.bitwise_count(union.reshape(mask.shape[1:]) & mask).sum(axis=2)  # [G, L]
        return int(on_rank.max(axis=0).sum())

    def _end_step(self, now: float, w: int) -> int:
        """Give every running request a token; return how many requests have ended."""
        worker = self._workers[w]
        worker.busy = False
        for j in worker.prefill.ended() if worker.prefill is not None else ():
            self._begin_answer(worker, j)
            self._prefilled_s[j] = now
            self._count_prompt(j)
            self._placer.progress({str(j): 1})
        if not worker.jobs:
            return 0
        worker.steps += 1
        worker.kv += len(worker.jobs)
        self._ledger.step(w, len(worker.jobs))
        if worker.fresh:
            self._first_s[worker.fresh] = now
            worker.fresh.clear()
        left = 0
        while worker.ends and worker.ends[0][0] <= worker.steps:
            at, j = heapq.heappop(worker.ends)
            if at != self._ends_at[j]:
                continue  # preempted since
            left += 1
            worker.jobs.remove(j)
            worker.rows = None
            tokens = self._prompt[j] + self._output[j]
            worker.kv -= tokens
            self._last_s[j] = now
            self._placer.progress({str(j): self._output[j]})
            self._placer.finish(str(j))
            self._count_end()
        return left

    def _count_end(self) -> None:
        self._departures += 1
        self._ended += 1
        if self._ended >= 1000:
            self._on_finished(self._ended)
            self._ended = 0

    def _sample(self, now: float) -> None:
        self._sample_s.append(now)
        kv = [worker.kv for worker in self._workers]
        largest = max(kv)
        self._imbalance.append(largest * len(kv) - sum(kv))
        self._spread.append(largest - min(kv))


def _check(requests: Requests, cluster: Cluster, experts: Experts | None) -> None:
    if cluster.decode.cost.seconds(1, 1, 1) <= 0:
        raise SimulationError("a decode step costs no time")
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
