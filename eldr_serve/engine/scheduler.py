"""vLLM's schedulers, with one thing moved: the connector sees the workers' counts first.

vLLM tells the connector what its workers report after it has finished the step's requests. A prefill
that ends in that step would leave without its signature.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from eldr_serve.engine.connector import EldrConnector, EldrWorkerMetadata


class _CountsFirst:
    connector: Any

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        output = model_runner_output.kv_connector_output
        meta = output.kv_connector_worker_meta if output else None
        if isinstance(meta, EldrWorkerMetadata) and isinstance(self.connector, EldrConnector):
            self.connector.take_counts(meta)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


class EldrScheduler(_CountsFirst, Scheduler):
    """The synchronous scheduler."""


class EldrAsyncScheduler(_CountsFirst, AsyncScheduler):
    """The asynchronous scheduler, vLLM's default."""
