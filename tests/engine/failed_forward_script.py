"""Run one in-process engine whose forward pass raises, in the first step or after a computed prompt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

FAILURE = "this layer has no kernel for that"


def main(model: str, out: str, after: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from eldr_serve.engine.vllm.compat.nixl import get_kv_transfer_group
    from eldr_serve.engine.vllm.config import engine_kwargs

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        num_gpu_blocks_override=24,
        **engine_kwargs("whole", device="cpu", block_size=32),
    )

    def compute(tokens: int) -> None:
        llm.generate({"prompt_token_ids": list(range(1, tokens + 1))}, SamplingParams(max_tokens=1))

    def counted() -> int:
        return int(get_kv_transfer_group().worker_side.capture.cache.rows.sum())

    if after == "a prompt":
        compute(100)

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError(FAILURE)

    Qwen3MoeForCausalLM.forward = fails
    report: dict[str, Any] = {"counted before": counted()}
    try:
        compute(40)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report["counted after"] = counted()
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
