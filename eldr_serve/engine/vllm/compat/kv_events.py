"""vLLM's KV events, and how its scheduler collects them."""

from __future__ import annotations

from vllm.config import KVEventsConfig, VllmConfig

from eldr_serve.engine.vllm.compat.checked import check_names, internal_imports

with internal_imports():
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher
    from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventPublisher", "collect_events"]


def collect_events(vllm_config: VllmConfig) -> None:
    """Change a configuration so that its scheduler collects KV events but publishes none.

    Raises:
        UnsupportedEngineError: vLLM's scheduler lacks the method that configures its publisher.
    """
    check_names("the map of cached prefixes", (Scheduler, "get_kv_event_publisher_config"))
    vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
