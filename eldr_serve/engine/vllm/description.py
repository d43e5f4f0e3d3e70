"""The description of a vLLM engine that is not started, in a process of `eldr check`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eldr_serve.engine.protocol import StepSizes
from eldr_serve.engine.vllm.agreement import resolve_shared_arguments
from eldr_serve.engine.vllm.compat.checked import configuration_errors
from eldr_serve.engine.vllm.compat.described import DescribedEngine

# Copied from vLLM 0.32.0: default block size on CUDA, tokens; vLLM's CPU platform has other defaults.
_GPU_BLOCK = 16


class VllmDescribed(DescribedEngine):
    """The implementation of EngineDescription with vLLM; see EngineBackend.describe for the arguments.

    Raises:
        ValueError, NotImplementedError, AssertionError: the engine would not start.
    """

    def __init__(
        self, model: Path, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
    ) -> None:
        if capability is not None:
            arguments = {"block_size": _GPU_BLOCK} | _default_batch(memory_gib, capability) | arguments
        super().__init__(arguments | {"model": str(model)}, capability)
        # With MLA, vLLM's CPU platform raises this number in the configuration.
        self._gpu_step_tokens = None if capability is None else arguments["max_num_batched_tokens"]
        self.shared_arguments: Mapping[str, Any] = resolve_shared_arguments(self.config)
        self.max_model_len: int = self.config.model_config.max_model_len
        self.memory_utilization: float = self.config.cache_config.gpu_memory_utilization

    def largest_step(self) -> StepSizes:
        """Return the sizes of the largest step."""
        config = self.config
        model, scheduler, parallel = config.model_config, config.scheduler_config, config.parallel_config
        text = model.hf_text_config
        ranks = 1 if parallel.enable_expert_parallel else parallel.tensor_parallel_size
        return StepSizes(
            tokens=self._gpu_step_tokens or scheduler.max_num_batched_tokens,
            data_ranks=parallel.data_parallel_size,
            sequences=scheduler.max_num_seqs,
            hidden=model.get_hidden_size(),
            top_k=next(
                (
                    int(value)
                    for name in ("num_experts_per_tok", "top_k_experts")
                    if (value := getattr(text, name, None))
                ),
                1,
            ),
            expert_width=getattr(text, "moe_intermediate_size", text.intermediate_size) // ranks,
            vocabulary=model.get_vocab_size(),
            element=model.dtype.itemsize,
        )

    def check_counting(self) -> None:
        """Raise ConfigurationError if an engine that counts experts would not start."""
        with configuration_errors():
            super().check_counting()


def _default_batch(memory_gib: float, capability: tuple[int, int]) -> dict[str, int]:
    """Return the default tokens and sequences of a step on a GPU; copied from vLLM 0.32.0."""
    if memory_gib >= 160:
        return {"max_num_batched_tokens": 16384, "max_num_seqs": 1024}
    if memory_gib >= 70 and capability != (8, 0):
        return {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
    return {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
