"""Run an in-process engine under vLLM's profiler, counting as on a GPU: prompts, routes, decode steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

TOKENS = 3  # few steps: with interpreted Triton kernels, each has very many calls


def main(model: str, folder: str) -> None:
    from vllm import LLM, SamplingParams

    from benchmarks.lib.exact_engine import COUNTED_ON_DEVICE
    from eldr_serve.engine.vllm.config import engine_kwargs

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=32,
        disable_log_stats=False,
        profiler_config={"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_use_gzip": False},
        **engine_kwargs("calibrate", device="cpu", **COUNTED_ON_DEVICE),
    )
    ours = {"eldr_calibrate": True, "eldr_routes": True}
    params = SamplingParams(
        max_tokens=TOKENS, temperature=0.0, ignore_eos=True, extra_args={"kv_transfer_params": ours}
    )
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(1, 257, n).tolist()} for n in (33, 9)]
    llm.generate(prompts[1:2], params, use_tqdm=False)  # warm-up before the profile
    llm.start_profile()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.stop_profile()
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    (Path(folder) / "runner").write_text(type(runner).__module__)
    assert all((output.kv_transfer_params or {})["eldr_routes"] for output in outputs)


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
