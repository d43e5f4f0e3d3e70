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
from operators import Operators

CHUNK = 48  # tokens a step: every longer prompt is prefilled in pieces
BLOCK = 32
# (seed, prompts, tokens generated for each) of each batch. The second is the first again, and so is the
# fifth the third: full hits. Model Runner V2, interpreted, runs the first two alone.
BATCHES = ((0, 10, 16), (0, 10, 16), (0, 29, 40), (1, 29, 40), (0, 29, 40))
SHORT = 2


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


def noted(on_host: bool) -> Operators:
    """Notes what our part of the worker calls in a step, but for the copies to the host."""
    from eldr_serve.engine.vllm.capture import ExpertCapture, StepTimer
    from eldr_serve.engine.vllm.connector import EldrConnector
    from eldr_serve.engine.vllm.host_copy import HostCopies

    operators = Operators()
    ours: dict[type, tuple[str, ...]] = {
        ExpertCapture: ("_keep", "after_forward"),
        StepTimer: ("begin", "stop", "finish", "known"),
        EldrConnector: ("bind_connector_metadata", "_count", "build_connector_worker_meta"),
    }
    for owner, names in ours.items():
        for name in names:
            setattr(owner, name, operators.around(getattr(owner, name)))
    made = ExpertCapture.__init__
    if not on_host:  # as on a GPU, where counts stay on the device
        ExpertCapture.__init__ = lambda *a, **k: made(*a, **k | {"on_host": False})  # type: ignore[method-assign]
    HostCopies.start = operators.outside(HostCopies.start)  # type: ignore[method-assign]
    return operators


def kernels() -> list[str]:
    """Return the names of vLLM's kernel libraries that this process has loaded."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.rpartition("/")[2] for line in mapped if "/vllm/_C" in line})


def main(model: str, out: str, asynchronous: bool, short: bool, on_host: bool) -> None:
    from prometheus_client import REGISTRY
    from vllm import EngineArgs, SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerBase

    from eldr_serve.engine.vllm.config import engine_kwargs

    fresh: list[dict[str, Any]] = []  # step records since the last step
    signatures: dict[str, tuple[int, str]] = {}  # as whole engines send them

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                fresh.extend(scheduler_stats.kv_connector_stats["steps"])
                signatures.update(scheduler_stats.kv_connector_stats["signatures"])

        def log_engine_initialized(self) -> None: ...

    operators = noted(on_host)
    cores = os.sched_getaffinity(0)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=12,
            max_num_batched_tokens=CHUNK,
            num_gpu_blocks_override=24,  # 768 tokens: far fewer than the prompts of a batch need
            **engine_kwargs("calibrate", device="cpu", block_size=BLOCK, async_scheduling=asynchronous),
        ),
        UsageContext.LLM_CLASS,
        stat_loggers=[Recorder],
    )
    records: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    cached = 0
    for number, (seed, many, max_tokens) in enumerate(BATCHES[: SHORT if short else None]):
        for index, prompt in enumerate(prompts(seed)[:many]):
            name = f"{number}-{index}"
            ours = {"eldr_calibrate": True, "eldr_routes": True, "eldr_request": name}
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": ours},
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            fed = []  # (request, position) of the token that each request of the step fed to the model
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                fed.append((output.request_id, len(output.prompt_token_ids) + len(tokens) - 2))
                if output.finished:
                    cached += output.num_cached_tokens or 0
                    records.append(
                        {
                            "request": output.request_id,
                            "prompt": output.prompt_token_ids,
                            "output": tokens,
                            **(output.kv_transfer_params or {}),
                        }
                    )
            steps += [step | {"fed": fed} for step in fresh]
            fresh.clear()
    samples = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
    core = engine.engine_core.engine_core  # in process
    connector = core.scheduler.connector
    report = {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "records": records,
        "kernels": kernels(),
        "operators": sorted(operators.names),
        "steps": steps,
        "signatures": signatures,
        "cached_tokens": cached,
        "preemptions": samples["vllm:num_preemptions_total"],
        "left_behind": [len(connector._tracked), len(connector._requests), len(connector._signatures)],
        "counted_steps": samples["eldr_decode_step_seconds_count"],
        "cores": [sorted(cores), sorted(os.sched_getaffinity(0))],
        "capture": [samples["eldr_capture_seconds_sum"], samples["eldr_capture_seconds_count"]],
    }
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "async", sys.argv[4] == "short", sys.argv[5] == "host")
