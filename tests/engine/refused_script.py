"""The start of one engine, as `eldr calibrate` starts it, with a vLLM that says it is another if asked."""

from __future__ import annotations

import os
import sys

import vllm


def main(model: str, port: str, version: str) -> None:
    vllm.__version__ = version or vllm.__version__
    from eldr_serve.engine.vllm.config import engine_kwargs
    from eldr_serve.engine.vllm.tracer import VllmTracer

    kwargs = engine_kwargs("calibrate", device="cpu", dtype="float32", num_gpu_blocks_override=16)
    VllmTracer(kwargs | {"model": model, "skip_tokenizer_init": True, "max_model_len": 128}, int(port))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
