"""The worker of an engine whose ranks a benchmark steps together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eldr_serve.engine.vllm.worker import EldrWorkerExtension

if TYPE_CHECKING:
    from eldr_serve.engine.vllm.ep.live import LiveExperts


class SteppedWorker(EldrWorkerExtension):
    """Mixin of vLLM's worker whose data-parallel ranks all receive a call between the same two steps."""

    def eldr_live_experts(self) -> LiveExperts:
        experts = super().eldr_live_experts()
        experts.called_together = True
        return experts
