"""vLLM's CPU worker for an engine with LoRA adapters; set as `worker_cls`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from eldr_serve.engine.vllm.compat.moe import keep_cpu_kernel_beside_adapters


class EldrCpuWorker(CPUWorker):
    """vLLM's worker, which keeps the CPU's kernel for experts although adapters are enabled."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model with the CPU's kernel for its experts."""
        keep_cpu_kernel_beside_adapters()
        super().load_model(load_dummy_weights=load_dummy_weights)
