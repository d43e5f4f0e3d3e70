"""Decode workers with continuous batching, in simulated time, fed by a production policy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing import Handoff, LoadLedger, Policy, StepCost


@dataclass(frozen=True)
class Job:
    """A prefilled request on its way to a decode worker.

    Attributes:
        handoff: what the policy is told.
        arrival_s: when its prefill has ended.
        steps: experts of each decode step, uint64[T, words] bitsets (see `expert_bits`); its length
            is the number of output tokens.
    """

    handoff: Handoff
    arrival_s: float
    steps: NDArray[np.uint64]


@dataclass
class Outcome:
    """What became of the jobs, by job index, and every step.

    Attributes:
        worker: int[N].
        first_s, last_s: float[N], end of the first and of the last decode step.
        batch, experts, seconds, step_worker: one entry a step.
    """

    worker: NDArray[np.int64]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    tokens: NDArray[np.int64]
    batch: NDArray[np.int64]
    experts: NDArray[np.int64]
    seconds: NDArray[np.float64]
    step_worker: NDArray[np.int64]

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """Time per output token after the first, of each job; NaN where there is but one token."""
        gaps = np.where(self.tokens > 1, self.tokens - 1, np.nan)
        tpot: NDArray[np.float64] = (self.last_s - self.first_s) / gaps
        return tpot


@dataclass
class _Worker:
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    busy: bool = False


def expert_bits(routes: NDArray[np.integer], num_experts: int) -> NDArray[np.uint64]:
    """uint64[T, L * ceil(E/64)] bitsets of routes[T, L, k], expert ids below `num_experts`."""
    steps, layers, _ = routes.shape
    words = -(-num_experts // 64)
    bits = np.zeros((steps, layers, words), np.uint64)
    ids = routes.astype(np.uint64)
    one = np.uint64(1)
    for rank in range(routes.shape[2]):
        chosen = ids[:, :, rank]
        np.bitwise_or.at(
            bits,
            (np.arange(steps)[:, None], np.arange(layers)[None, :], (chosen // 64).astype(np.int64)),
            one << (chosen % np.uint64(64)),
        )
    return bits.reshape(steps, -1)


def simulate(
    jobs: Sequence[Job],
    policy: Policy,
    workers: int,
    cost: StepCost,
    *,
    seed: int = 0,
    max_batch: int = 256,
) -> Outcome:
    """Run the jobs to their end. Deterministic by seed.

    Args:
        jobs: in any order.
        cost: of a step, by batch, KV tokens and active experts summed over layers.
        max_batch: requests that a worker runs at once; more wait in its queue.
    """
    rng = np.random.default_rng(seed)
    order = sorted(range(len(jobs)), key=lambda j: jobs[j].arrival_s)
    ledger, pool = LoadLedger(), [_Worker() for _ in range(workers)]
    done = np.zeros(len(jobs), np.int64)  # tokens
    length = np.array([len(job.steps) for job in jobs], np.int64)
    prompt = np.array([job.handoff.prompt_tokens for job in jobs], np.int64)
    offset = np.concatenate([[0], np.cumsum(length)])
    bits = np.concatenate([job.steps for job in jobs])
    placed_on = np.full(len(jobs), -1, np.int64)
    first, last = np.zeros(len(jobs)), np.zeros(len(jobs))
    log: list[tuple[int, int, float, int]] = []
    ends: list[tuple[float, int]] = []  # end of step, worker

    def begin(now: float, w: int) -> None:
        worker = pool[w]
        room = max_batch - len(worker.running)
        worker.running += worker.waiting[:room]
        del worker.waiting[:room]
        worker.busy = bool(worker.running)
        if not worker.busy:
            return
        batch = np.array(worker.running)
        union = np.bitwise_or.reduce(bits[offset[batch] + done[batch]], axis=0)
        experts = int(np.bitwise_count(union).sum())
        kv_tokens = int((prompt[batch] + done[batch]).sum())
        seconds = float(cost.seconds(len(batch), kv_tokens, experts))
        log.append((len(batch), experts, seconds, w))
        heapq.heappush(ends, (now + seconds, w))

    def end(now: float, w: int) -> None:
        batch = np.array(pool[w].running)
        first[batch[done[batch] == 0]] = now
        last[batch] = now
        done[batch] += 1
        for j in batch[done[batch] == length[batch]]:
            ledger.release(jobs[j].handoff.request_id)
            policy.released(jobs[j].handoff.request_id)
        pool[w].running = [int(j) for j in batch[done[batch] < length[batch]]]
        for j in pool[w].running:
            ledger.progress(jobs[j].handoff.request_id, int(done[j]))
        begin(now, w)

    for j in order:
        job = jobs[j]
        while ends and ends[0][0] <= job.arrival_s:
            end(*heapq.heappop(ends))
        w = policy.choose(job.handoff, [ledger.load(w) for w in range(workers)], rng).worker
        policy.placed(job.handoff, w)
        ledger.add(job.handoff.request_id, w, job.handoff.prompt_tokens)
        placed_on[j] = w
        pool[w].waiting.append(j)
        if not pool[w].busy:
            begin(job.arrival_s, w)
    while ends:
        end(*heapq.heappop(ends))
    steps = np.array(log, np.float64).reshape(-1, 4)
    return Outcome(
        placed_on, first, last, length,
        steps[:, 0].astype(np.int64), steps[:, 1].astype(np.int64), steps[:, 2], steps[:, 3].astype(np.int64),
    )  # fmt: skip
