"""Extensions of vLLM's schedulers, in its engine core; set as `scheduler_cls`.

The connector receives the workers' counts before vLLM finishes the step's requests. vLLM itself passes them
on only afterwards, so a prefill that ends in the step would have no counts. The connector's stats, which
reach the replica, also contain the share of KV blocks in use, the expert counts of prompts that decode in
this engine, and the changes of the prefix cache.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from eldr_serve.engine.vllm.kv.connector import EldrConnector
from eldr_serve.engine.vllm.kv.metadata import EldrConnectorWorkerMetadata
from eldr_serve.engine.vllm.prefix_events import prefix_events
from eldr_serve.engine.vllm.stats import EldrStats


class _CountingScheduler:
    """Mixin of vLLM's schedulers."""

    connector: Any
    kv_cache_manager: Any

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, *args: Any, log_stats: bool = False, **kwargs: Any
    ) -> None:
        self._prefix_events = prefix_events(vllm_config, kv_cache_config, log_stats=log_stats)
        super().__init__(vllm_config, kv_cache_config, *args, log_stats=log_stats, **kwargs)  # type: ignore[call-arg]
        if self._prefix_events is not None:
            self.kv_event_publisher = self._prefix_events

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Pass the workers' counts to the connector, then let vLLM's Scheduler use the step's output."""
        output = model_runner_output.kv_connector_output
        meta = output.kv_connector_worker_meta if output else None
        if isinstance(meta, EldrConnectorWorkerMetadata) and isinstance(self.connector, EldrConnector):
            self.connector.take_counts(meta)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def make_stats(
        self, spec_decoding_stats: Any = None, kv_connector_stats: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Return vLLM's statistics; the connector's stats get the values that only this process knows."""
        if isinstance(self.connector, EldrConnector):
            kv_connector_stats = kv_connector_stats or EldrStats()
            kv_connector_stats.data["kv_usage"] = self.kv_cache_manager.usage
            kv_connector_stats.data["prompt_counts"] = self.connector.take_prompt_counts()
            changes = None if self._prefix_events is None else self._prefix_events.take_changes()
            if changes is not None:
                kv_connector_stats.data["prefix_changes"] = asdict(changes)
        return super().make_stats(spec_decoding_stats, kv_connector_stats, *args, **kwargs)  # type: ignore[misc]


class EldrScheduler(_CountingScheduler, Scheduler):
    """The synchronous scheduler."""


class EldrAsyncScheduler(_CountingScheduler, AsyncScheduler):
    """The asynchronous scheduler, vLLM's default."""
