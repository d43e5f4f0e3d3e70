"""Which engines can be served with exact signatures, as their configuration says."""

from __future__ import annotations

import vllm
from vllm.config import VllmConfig

from eldr_serve.engine.vllm.compat import kv_cache, moe, nixl
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError, check_names


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedEngineError if this engine cannot be served with exact signatures."""
    for part in (kv_cache, moe, nixl):
        part.check()
    check_names("the ELDR connector", (VllmConfig, "use_v2_model_runner"))
    parallel = vllm_config.parallel_config
    refusals = (
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: each stage sees only its own layers"),
        (parallel.data_parallel_size > 1, "data parallelism inside an engine: run one engine a replica"),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism: a block's tokens are spread",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism: each rank sees a part of a prompt",
        ),
        (
            vllm_config.speculative_config is not None
            and vllm_config.kv_transfer_config.kv_role not in ("kv_consumer", "kv_producer"),
            "speculative decoding in calibration: rejected tokens would be counted",
        ),
        (parallel.enable_dbo, "dual-batch overlap: a step's tokens pass the gates in two parts"),
        (
            vllm_config.aux_output_config.enable_return_routed_experts,
            "enable_return_routed_experts: vLLM's own capture would replace this one",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise UnsupportedEngineError(f"the ELDR connector does not support {reason}")


def model_runner(vllm_config: VllmConfig) -> str:
    """vLLM's version and which of its model runners the engine uses, for messages."""
    return f"vLLM {vllm.__version__}, Model Runner {'V2' if vllm_config.use_v2_model_runner else 'V1'}"
