"""Simulated prefill engines with prefix caches, and KV memory that prompts keep until their hand-over."""

from __future__ import annotations

from collections import deque

import numpy as np

from eldr_serve.queues.prefill_replica_choice import choose_prefill_replica
from eldr_serve.scheduling.prefixes import PrefixCache
from offline.simulation.cluster import Prefill
from offline.simulation.recorder import Recorder
from offline.simulation.requests import Requests


class PrefillEngines:
    """Prefill engines with a prefix cache each, and the prompts that wait for them; requests have numbers.

    A prompt's KV tokens count from when an engine takes it until `release`. The KV usage of each engine is
    known at once, without the delay of a report.

    Args:
        recorder: receives cached tokens, KV tokens, and requests that are held back or refused.
    """

    def __init__(self, config: Prefill, requests: Requests, recorder: Recorder) -> None:
        self._config, self._recorder = config, recorder
        self._tokens, self._blocks = requests.prompt_tokens.tolist(), requests.blocks
        self._held_back: deque[int] = deque()  # requests whose prompt no engine has taken yet
        self._engine = [-1] * len(requests)
        self._free_at_s = [0.0] * config.workers
        self._in_flight = {str(engine): 0 for engine in range(config.workers)}
        self._kv_tokens = [0] * config.workers
        self._caches = [PrefixCache(config.cache_blocks) for _ in range(config.workers)]

    def enqueue(self, j: int) -> None:
        """Add a request that has arrived."""
        self._held_back.append(j)

    def refuse(self, now: float) -> int:
        """Refuse the requests that have waited too long for an engine; return their number."""
        limit_s = np.inf if self._config.max_wait_s is None else self._config.max_wait_s
        number = 0
        while self._held_back and now - self._recorder.arrival_s[self._held_back[0]] >= limit_s:
            self._held_back.popleft()
            number += 1
        self._recorder.held_back += number
        self._recorder.refused += number
        return number

    def begin(self, now: float) -> list[tuple[int, float]]:
        """Give prompts to the engines that take them, in order of arrival.

        Return each request with the end of its prefill.
        """
        begun = []
        while self._held_back:
            j = self._held_back[0]
            takers = {name: calls for name, calls in self._in_flight.items() if self._takes(int(name), j)}
            if not takers:
                break
            self._held_back.popleft()
            begun.append((j, self._run(now, j, takers)))
            self._recorder.held_back += bool(now > self._recorder.arrival_s[j])
        return begun

    def leave(self, j: int) -> None:
        """Count a request's prompt as computed."""
        self._in_flight[str(self._engine[j])] -= 1

    def release(self, j: int) -> None:
        """Free the KV of a request's prompt."""
        self._kv_tokens[self._engine[j]] -= self._tokens[j]

    def _takes(self, engine: int, j: int) -> bool:
        """Return whether the engine takes new prompts, and the request's prompt fits."""
        capacity, used = self._config.kv_tokens, self._kv_tokens[engine]
        if capacity is None:
            return True
        return used <= self._config.max_kv_usage * capacity and used + self._tokens[j] <= capacity

    def _run(self, now: float, j: int, takers: dict[str, int]) -> float:
        """Compute a prompt on one of these engines, given with their calls. Return the end of its prefill."""
        config, tokens, blocks = self._config, self._tokens[j], self._blocks[j] if self._blocks else ()
        prefix = str(blocks[0] if blocks else f"r{j}").encode()
        engine = int(choose_prefill_replica(prefix, takers, max_load_ratio=config.max_load_ratio))
        self._engine[j] = engine
        self._in_flight[str(engine)] += 1
        self._kv_tokens[engine] += tokens
        recorder = self._recorder
        recorder.largest_prefill_kv_tokens = max(recorder.largest_prefill_kv_tokens, self._kv_tokens[engine])
        cached_tokens = min(self._caches[engine].count_hits(blocks) * config.block_tokens, tokens - 1)
        recorder.cached_tokens[j] = cached_tokens
        self._caches[engine].record_prompt(blocks)
        seconds = config.fixed_s + config.per_token_s * (tokens - cached_tokens)
        self._free_at_s[engine] = max(now, self._free_at_s[engine]) + seconds
        return self._free_at_s[engine]
