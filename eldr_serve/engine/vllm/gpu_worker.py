"""vLLM's GPU worker with MoE kernels that expose the experts that they choose; set as `worker_cls`."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from eldr_serve.engine.vllm.compat.moe import avoid_kernels_that_hide_choices


class EldrWorker(Worker):
    """vLLM's worker, which selects the MoE kernel before it loads the model."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model after excluding kernels that hide their choice of experts."""
        avoid_kernels_that_hide_choices(self.vllm_config)
        super().load_model(load_dummy_weights=load_dummy_weights)
