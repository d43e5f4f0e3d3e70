"""Start one engine for calibration or prefill, with another vLLM version if given."""

from __future__ import annotations

import os
import sys
from typing import Any

import vllm


def main(model: str, port: str, role: Any, version: str) -> None:
    vllm.__version__ = version or vllm.__version__
    from eldr_serve.engine.vllm.calibration_engine import VllmCalibrationEngine
    from eldr_serve.engine.vllm.compat.checked import start_errors
    from eldr_serve.engine.vllm.config import engine_kwargs

    kwargs = engine_kwargs(role, device="cpu", dtype="float32", num_gpu_blocks_override=16)
    kwargs |= {"model": model, "skip_tokenizer_init": True, "max_model_len": 128}
    if role == "calibrate":
        VllmCalibrationEngine(kwargs, int(port))  # `eldr calibrate` does the same
    else:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = port
        with start_errors():
            vllm.LLM(**kwargs)


if __name__ == "__main__":
    from eldr_serve.engine.vllm.config import ENVIRONMENT

    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
