"""Prefill in the steps of a whole replica: chunks of prompts beside the answers, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from eldr_serve.scheduling.prefixes import PrefixCache
from offline.simulation.cluster import Whole


class SimulatedPrefill:
    """The prefill of one worker. A prompt's blocks count as cached when the worker accepts it."""

    def __init__(self, config: Whole) -> None:
        self._config = config
        self._cache = PrefixCache(config.cache_blocks)
        self._prompts: deque[tuple[int, int]] = deque()  # request, missing tokens
        self.ending: list[int] = []  # requests whose prompts end in the current step

    def __len__(self) -> int:
        """Return the number of requests in prefill."""
        return len(self._prompts) + len(self.ending)

    def accept(self, request: int, tokens: int, blocks: Sequence[int]) -> int:
        """Add a prompt of that length with these full blocks. Return its cached tokens."""
        cached_tokens = self._cache.count_hits(blocks) * self._config.block_tokens
        self._cache.record_prompt(blocks)
        self._prompts.append((request, tokens - cached_tokens))
        return cached_tokens

    def step(self, answers: int) -> tuple[int, int]:
        """Return how many requests and tokens the next step prefills beside one token of each answer.

        Args:
            answers: number of answers.
        """
        room, requests, computed = self._config.step_tokens - answers, 0, 0
        while self._prompts and room:
            request, missing_tokens = self._prompts.popleft()
            tokens = min(missing_tokens, room)
            requests, computed, room = requests + 1, computed + tokens, room - tokens
            if tokens == missing_tokens:
                self.ending.append(request)
            else:
                self._prompts.appendleft((request, missing_tokens - tokens))
        return requests, computed

    def end_step(self) -> list[int]:
        """End the step. Return the requests that got their first token in it."""
        ending, self.ending = self.ending, []
        return ending
