"""Prefill in the steps of a whole replica: chunks of prompts beside the answers, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from eldr_serve.routing import PrefixCache
from offline.simulation.cluster import Whole


class WholePrefill:
    """Of one worker. A prompt's blocks count as cached as soon as it is taken on."""

    def __init__(self, config: Whole) -> None:
        self._config = config
        self._cache = PrefixCache(config.cache_blocks)
        self._prompts: deque[tuple[int, int]] = deque()  # request, tokens that it still lacks
        self.ending: list[int] = []  # requests whose prompts end in the step under way

    def __len__(self) -> int:
        """Requests that still prefill."""
        return len(self._prompts) + len(self.ending)

    def take(self, request: int, tokens: int, blocks: Sequence[int]) -> int:
        """A prompt of that length, and of these full blocks, is to be computed; returns its cached tokens."""
        hit = self._cache.hit(blocks) * self._config.block_tokens
        self._cache.use(blocks)
        self._prompts.append((request, tokens - hit))
        return hit

    def step(self, answers: int) -> tuple[int, int]:
        """Requests that the next step prefills, and their tokens, beside a token of each of `answers`."""
        room, requests, computed = self._config.step_tokens - answers, 0, 0
        while self._prompts and room:
            request, lacking = self._prompts.popleft()
            tokens = min(lacking, room)
            requests, computed, room = requests + 1, computed + tokens, room - tokens
            if tokens == lacking:
                self.ending.append(request)
            else:
                self._prompts.appendleft((request, lacking - tokens))
        return requests, computed

    def ended(self) -> list[int]:
        """The step is over: requests that have their first token by it."""
        ending, self.ending = self.ending, []
        return ending
