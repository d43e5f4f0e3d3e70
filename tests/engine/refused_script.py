"""Start one engine for calibration or prefill, with another vLLM version if given."""

from __future__ import annotations

import os
import sys
from typing import Any

import vllm


def main(model: str, port: str, role: Any, version: str) -> None:
    vllm.__version__ = version or vllm.__version__
    from eldr_serve.engine.vllm.compat.checked import clear_start
    from eldr_serve.engine.vllm.config import engine_kwargs
    from eldr_serve.engine.vllm.tracer import VllmTracer

    kwargs = engine_kwargs(role, device="cpu", dtype="float32", num_gpu_blocks_override=16)
    kwargs |= {"model": model, "skip_tokenizer_init": True, "max_model_len": 128}
    if role == "calibrate":
        VllmTracer(kwargs, int(port))  # like `eldr calibrate`
    else:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = port
        with clear_start():
            vllm.LLM(**kwargs)


if __name__ == "__main__":
    from eldr_serve.engine.vllm.config import ENVIRONMENT

    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
