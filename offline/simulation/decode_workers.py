"""Simulated decode workers: continuous batching, KV capacity, preemption, and the time of a step.

A step is one event for all requests of a worker. Since their tokens, their KV and their ends follow from the
number of its steps, only the union of their experts is recomputed in each step.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offline.simulation.cluster import Decode, Whole
from offline.simulation.recorder import Recorder
from offline.simulation.requests import Experts, Requests, rank_masks
from offline.simulation.whole import SimulatedPrefill

_STEPS_AHEAD = 8  # steps computed at once: about as many as between two changes of a worker's requests


class _SimulatedWorker:
    """A decode worker. A running request has `steps - start` tokens."""

    __slots__ = (
        "active_experts_ahead",
        "awaiting_first_token",
        "busy",
        "ends",
        "kv",
        "prefill",
        "recompute_s",
        "requests_unchanged",
        "running",
        "steps",
        "waiting",
    )

    def __init__(self, whole: Whole | None) -> None:
        self.prefill = None if whole is None else SimulatedPrefill(whole)
        self.running: list[int] = []
        self.waiting: deque[int] = deque()
        self.awaiting_first_token: list[int] = []  # running requests that have no token yet
        self.ends: list[tuple[int, int]] = []  # heap of (step at which it ends, request)
        # Active experts of the next steps with the running requests, the last step first. The first rank of a
        # replica keeps them for all of its ranks.
        self.active_experts_ahead: list[float] = []
        self.requests_unchanged = False
        self.steps = 0
        self.kv = 0  # tokens of running requests
        self.recompute_s = 0.0  # recomputation time of preempted requests, in the next step
        self.busy = False


@dataclass(slots=True)  # a frozen one would slow down each step
class EndedStep:
    """Requests that a step of a worker has advanced or ended.

    Attributes:
        prefilled: requests whose prompt the worker has computed.
        answers: running requests, each of which got a token.
        first: requests that got their first token.
        finished: requests that got their last token.
    """

    prefilled: list[int] = field(default_factory=list)
    answers: int = 0
    first: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class DecodeWorkers:
    """All decode workers; each request is known by its number.

    Args:
        ranks: int[L,E] or int[K,L,E], the EP rank of each expert (see `simulate`).
        recorder: receives cached tokens, preemptions and steps.
    """

    def __init__(
        self,
        requests: Requests,
        decode: Decode,
        experts: Experts | None,
        ranks: NDArray[np.integer] | None,
        recorder: Recorder,
    ) -> None:
        self._requests, self._decode, self._experts, self._recorder = requests, decode, experts, recorder
        self._prompt, self._output = requests.prompt_tokens.tolist(), requests.output_tokens.tolist()
        self._workers = [_SimulatedWorker(decode.whole) for _ in range(decode.workers)]
        self._ranks_per_replica = decode.ranks_per_replica
        self._masks = None if ranks is None else [rank_masks(r) for r in ranks.reshape(-1, *ranks.shape[-2:])]
        self._generated = [0] * len(requests)  # tokens before the request last left a worker
        self._start = np.zeros(len(requests), np.int64)
        self._ends_at = [-1] * len(requests)

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self._workers)

    @property
    def kv_tokens(self) -> list[int]:
        """Return the KV tokens of each worker's running requests."""
        return [worker.kv for worker in self._workers]

    def tokens(self) -> dict[int, int]:
        """Return the tokens that each running request has."""
        return {j: worker.steps - int(self._start[j]) for worker in self._workers for j in worker.running}

    def is_busy(self, w: int) -> bool:
        """Return whether the worker is in a step that is timed alone."""
        return self._workers[w].busy

    def enqueue(self, w: int, j: int) -> None:
        """Add a request to the worker's own queue."""
        self._workers[w].waiting.append(j)

    def cacheable_blocks(self, j: int) -> tuple[int, ...]:
        """Return the prompt's blocks that a whole replica can cache. The last token is always computed."""
        whole, blocks = self._decode.whole, self._requests.blocks
        if whole is None or not whole.cache_blocks or not blocks:
            return ()
        return blocks[j][: (self._prompt[j] - 1) // whole.block_tokens]

    def begin(self, w: int) -> float:
        """Begin a step of one worker. Return its time, s, or 0 if there is nothing to do."""
        seconds = self.begin_round(w)
        self._workers[w].busy = seconds > 0
        return seconds

    def ranks_of(self, replica: int) -> range:
        """Return the workers of a replica."""
        return range(replica * self._ranks_per_replica, (replica + 1) * self._ranks_per_replica)

    def begin_round(self, replica: int) -> float:
        """Admit and preempt requests, and begin a step on all ranks of a replica.

        Return the time of the slowest rank, s, or 0 if there is nothing to do.
        """
        ranks = self.ranks_of(replica)
        for w in ranks:
            self._admit(self._workers[w])
        active = self._active_experts(replica)
        return max(self._begin_step(w, active) for w in ranks)

    def _begin_step(self, w: int, active: float) -> float:
        """Return the time of a worker's next step, s, or 0 if there is nothing to do."""
        worker = self._workers[w]
        running, answers = worker.running, len(worker.running)
        prompts = prompt_tokens = 0
        if worker.prefill is not None:
            prompts, prompt_tokens = worker.prefill.step(answers)
            answers += len(worker.prefill.ending)
        if not running and not prompts:
            return 0.0
        # A prompt's first token in a step belongs to the request itself, as in the engines' records.
        other_prompt_tokens = prompt_tokens - prompts
        seconds = float(
            self._decode.cost.seconds(len(running) + prompts, worker.kv, active, other_prompt_tokens)
        )
        seconds += worker.recompute_s
        worker.recompute_s = 0.0
        if answers:  # else no request gets a token in this step
            self._recorder.record_step(answers, round(active), seconds, w)
        return seconds

    def _admit(self, worker: _SimulatedWorker) -> None:
        decode = self._decode
        capacity = decode.kv_tokens
        prefilling = worker.prefill
        while worker.waiting and len(worker.running) + len(prefilling or ()) < decode.max_batch:
            j = worker.waiting[0]
            tokens = self._prompt[j] + self._generated[j]
            if capacity is not None and worker.kv + len(worker.running) + tokens + 1 > capacity:
                break
            worker.waiting.popleft()
            worker.kv += tokens
            if prefilling is not None:
                self._recorder.cached_tokens[j] = prefilling.accept(j, tokens, self.cacheable_blocks(j))
                continue
            self._begin_answer(worker, j)
            if self._generated[j]:
                worker.recompute_s += decode.recompute_per_token_s * tokens
        while capacity is not None and worker.kv + len(worker.running) > capacity:
            self._preempt(worker)

    def _begin_answer(self, worker: _SimulatedWorker, j: int) -> None:
        """Begin the request's answer, of which each step generates a token."""
        worker.running.append(j)
        worker.requests_unchanged = False
        self._start[j] = worker.steps - self._generated[j]
        self._ends_at[j] = worker.steps - self._generated[j] + self._output[j]
        heapq.heappush(worker.ends, (self._ends_at[j], j))
        if not self._generated[j]:
            worker.awaiting_first_token.append(j)

    def _preempt(self, worker: _SimulatedWorker) -> None:
        """Move the youngest request of a worker whose KV is full to the front of its queue."""
        j = worker.running.pop()
        worker.requests_unchanged = False
        self._generated[j] = worker.steps - int(self._start[j])
        self._ends_at[j] = -1
        worker.kv -= self._prompt[j] + self._generated[j]
        if j in worker.awaiting_first_token:
            worker.awaiting_first_token.remove(j)
        worker.waiting.appendleft(j)
        self._recorder.preempted += 1

    def _active_experts(self, replica: int) -> float:
        """Return the active experts of a rank in the next step; compute those of several steps at once."""
        workers = [self._workers[w] for w in self.ranks_of(replica)]
        if self._experts is None or not any(worker.running for worker in workers):
            return 0
        first = workers[0]
        if not all(worker.requests_unchanged for worker in workers):
            first.active_experts_ahead = []
            for worker in workers:
                worker.requests_unchanged = True
        if not first.active_experts_ahead:
            first.active_experts_ahead = self._active_ahead(replica, workers)
        return first.active_experts_ahead.pop()

    def _active_ahead(self, replica: int, workers: list[_SimulatedWorker]) -> list[float]:
        """Return the active experts of the next steps with the current requests, the last step first.

        They are the active experts of the rank with most. Without a placement they are those of all ranks,
        divided by the number of ranks.
        """
        experts = self._experts
        assert experts is not None
        running = np.array([j for worker in workers for j in worker.running])
        num_tokens = np.repeat(
            [worker.steps for worker in workers], [len(worker.running) for worker in workers]
        )
        num_tokens -= self._start[running]
        kinds = self._requests.kind[running]
        first = experts.offset[kinds]
        steps = np.arange(_STEPS_AHEAD - 1, -1, -1)[:, None]
        rows = first + (steps + num_tokens) % (experts.offset[kinds + 1] - first)  # [_STEPS_AHEAD, n]
        union = np.bitwise_or.reduce(experts.bits[rows], axis=1)
        if self._masks is None:
            active = np.bitwise_count(union).sum(axis=1, dtype=np.int64)
            on_mean_rank: list[float] = (active / len(workers)).tolist()
            return on_mean_rank
        mask = self._masks[replica % len(self._masks)]  # [G, L, words]
        union_by_rank = union.reshape(_STEPS_AHEAD, 1, *mask.shape[1:]) & mask
        on_rank = np.bitwise_count(union_by_rank).sum(axis=3)  # [_STEPS_AHEAD, G, L]
        on_fullest_rank: list[float] = on_rank.max(axis=1).sum(axis=1, dtype=np.int64).tolist()
        return on_fullest_rank

    def end_step(self, w: int) -> EndedStep:
        """Give every running request of the worker a token."""
        worker = self._workers[w]
        worker.busy = False
        prefilled = worker.prefill.end_step() if worker.prefill is not None else []
        for j in prefilled:
            self._begin_answer(worker, j)
        answers = len(worker.running)
        if not answers:
            return EndedStep(prefilled)
        worker.steps += 1
        worker.kv += answers
        first, worker.awaiting_first_token = worker.awaiting_first_token, []
        finished = []
        while worker.ends and worker.ends[0][0] <= worker.steps:
            end_step, j = heapq.heappop(worker.ends)
            if end_step != self._ends_at[j]:
                continue  # the request was preempted in the meantime
            finished.append(j)
            worker.running.remove(j)
            worker.requests_unchanged = False
            worker.kv -= self._prompt[j] + self._output[j]
        return EndedStep(prefilled, answers, first, finished)
