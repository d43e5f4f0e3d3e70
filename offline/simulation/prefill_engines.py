"""Simulated prefill engines with prefix caches."""

from __future__ import annotations

from eldr_serve.queues.prefill_replica_choice import choose_prefill_replica
from eldr_serve.scheduling.prefixes import PrefixCache
from offline.simulation.cluster import Prefill


class PrefillEngines:
    """Prefill engines with a prefix cache each, which serve prompts in order of arrival."""

    def __init__(self, config: Prefill) -> None:
        self._config = config
        self._free_at_s = [0.0] * config.workers
        self._in_flight = {str(engine): 0 for engine in range(config.workers)}
        self._caches = [PrefixCache(config.cache_blocks) for _ in range(config.workers)]

    def run(self, now: float, prefix: bytes, blocks: tuple[int, ...], tokens: int) -> tuple[int, float, int]:
        """Return the engine, the end of the prompt's prefill, and the number of cached tokens."""
        engine = int(
            choose_prefill_replica(prefix, self._in_flight, max_load_ratio=self._config.max_load_ratio)
        )
        self._in_flight[str(engine)] += 1
        cached_tokens = min(self._caches[engine].count_hits(blocks) * self._config.block_tokens, tokens - 1)
        self._caches[engine].use(blocks)
        seconds = self._config.fixed_s + self._config.per_token_s * (tokens - cached_tokens)
        self._free_at_s[engine] = max(now, self._free_at_s[engine]) + seconds
        return engine, self._free_at_s[engine], cached_tokens

    def leave(self, engine: int) -> None:
        """Count a prompt of this engine as finished."""
        self._in_flight[str(engine)] -= 1
