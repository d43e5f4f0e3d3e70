"""The worker of an engine whose ranks a benchmark steps together."""

from eldr_serve.engine.vllm.worker import EldrWorkerExtension


class SteppedWorker(EldrWorkerExtension):
    """Mixin for vLLM's worker: all data-parallel ranks receive a call between the same two steps."""

    eldr_called_together = True
