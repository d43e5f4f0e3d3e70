"""Run one prefill engine in its own process, driven by lines on standard input.

The command's argument is a JSON object with "model", "device" ("cpu" or "cuda"), "block_size" and
"max_tokens". It may have further engine "arguments". On a GPU the engine is eager, since hooks captured in a
CUDA graph could not be switched off. Prompts are computed outside of graphs anyway.

Each line on standard input is [whether to capture, token ids of a prompt]. Each answer is a line with the
latency and the counting time that the engine reports, both in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from prometheus_client import generate_latest

from benchmarks.lib.prometheus import total

# Retention of the blocks of an unread prompt: on a GPU dozens of prompts end in a second.
_LEASE_S = {"cpu": 5.0, "cuda": 1.0}


def main(job: dict[str, Any], answer: Any) -> None:
    """Serve prompts until standard input closes."""
    from vllm import LLM, SamplingParams

    from benchmarks.lib.engines import device_kwargs
    from benchmarks.lib.replay.switched import CaptureSwitch
    from eldr_serve.engine.vllm.config import engine_kwargs

    kwargs = engine_kwargs(
        "prefill",
        **device_kwargs(job["device"]),
        block_size=job["block_size"],
        async_scheduling=False,
        kv_lease_s=_LEASE_S[job["device"]],
        scheduler_cls="benchmarks.lib.replay.switched.SwitchedScheduler",
        kv_transfer_config={
            "kv_connector": "SwitchedConnector",
            "kv_connector_module_path": "benchmarks.lib.replay.switched",
        },
    )
    llm = LLM(
        model=job["model"],
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=job["max_tokens"],
        disable_log_stats=False,
        **({"dtype": "float32"} | job.get("arguments", {})),
        **kwargs,
    )
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        extra_args={"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    )
    counting_s = 0.0
    for line in sys.stdin:
        capture, prompt = json.loads(line)
        CaptureSwitch.turn(capture, llm.llm_engine.vllm_config)
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        has_counts = "eldr_expert_counts" in (output.kv_transfer_params or {})
        if has_counts != capture:
            raise RuntimeError(f"capture is {capture}, but the engine returned expert counts: {has_counts}")
        counting_end_s = total(generate_latest().decode(), "eldr_capture_seconds_sum")
        print(json.dumps([seconds, counting_end_s - counting_s]), file=answer, flush=True)
        counting_s = counting_end_s


if __name__ == "__main__":
    # Keep vLLM's output out of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    main(json.loads(sys.argv[1]), answers)
