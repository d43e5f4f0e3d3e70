"""The share of prompt tokens that prefix caches are expected to hold."""

from collections import deque


class CachedShare:
    """Share of the tokens of the newest prompts that were expected in prefix caches.

    Args:
        prompts: number of newest prompts; with fewer of them the share follows changes of traffic sooner.

    Attributes:
        value: the share, from 0 to 1; 0 before the first prompt.
    """

    def __init__(self, prompts: int = 512) -> None:
        self.value = 0.0
        self._prompts: deque[tuple[int, int]] = deque([(0, 0)] * prompts)  # cached tokens, tokens
        self._cached = self._tokens = 0

    def record(self, cached_tokens: int, prompt_tokens: int) -> None:
        """Add a prompt."""
        oldest_cached, oldest_tokens = self._prompts.popleft()
        self._prompts.append((cached_tokens, prompt_tokens))
        self._cached += cached_tokens - oldest_cached
        self._tokens += prompt_tokens - oldest_tokens
        self.value = self._cached / max(self._tokens, 1)
