"""One in-process engine, driven as a script (vLLM cannot be started twice in a process).

Serves random prompts with shared prefixes under pressure (chunked prefill, eviction, preemption) and
writes what the connector counted; tests compare it with what Hugging Face's model chooses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 48  # tokens a step: every longer prompt is prefilled in pieces
BLOCK = 32


def prompts(seed: int) -> list[list[int]]:
    """Token ids: stems of whole and broken blocks, each continued in several ways, some repeated."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, 257, int(n)).tolist() for n in (64, 33, 100, 32)]
    found = [
        stem + rng.integers(1, 257, int(rng.integers(0, 60))).tolist() for stem in stems for _ in range(6)
    ]
    found += [stems[0], stems[0], stems[2], stems[3], [5]]
    order = rng.permutation(len(found))
    return [found[i] for i in order]


def main(model: str, out: str, asynchronous: bool) -> None:
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    from eldr_serve.engine.config import engine_kwargs

    cores = os.sched_getaffinity(0)
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=12,
        max_num_batched_tokens=CHUNK,
        num_gpu_blocks_override=24,  # 768 tokens: far fewer than the prompts of a batch need
        disable_log_stats=False,
        **engine_kwargs("calibrate", device="cpu", block_size=BLOCK, async_scheduling=asynchronous),
    )
    params = SamplingParams(
        max_tokens=40,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"eldr_calibrate": True, "eldr_routes": True}},
    )
    records: list[dict[str, Any]] = []
    cached = 0
    for seed in range(3):
        batch = prompts(seed % 2)  # the third batch is the first again: full hits
        for output in llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False):
            cached += output.num_cached_tokens or 0
            records.append(
                {
                    "prompt": output.prompt_token_ids,
                    "output": list(output.outputs[0].token_ids),
                    **(output.kv_transfer_params or {}),
                }
            )
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    samples = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
    core = llm.llm_engine.engine_core.engine_core  # in process
    connector = core.scheduler.connector
    report = {
        "records": records,
        "cached_tokens": cached,
        "preemptions": metrics["vllm:num_preemptions"],
        "left_behind": [len(connector._tracked), len(connector._requests)],
        "steps": samples["eldr_decode_step_seconds_count"],
        "cores": [sorted(cores), sorted(os.sched_getaffinity(0))],
        "capture_s": samples["eldr_capture_seconds_sum"] / samples["eldr_capture_seconds_count"],
    }
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "async")
