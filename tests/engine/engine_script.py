"""Run one in-process engine as a script (vLLM cannot be started twice in a process).

It serves random prompts with shared prefixes under pressure (chunked prefill, eviction, preemption), and
writes the connector's counts. Tests, and `benchmarks.engine.exact_counts` on a GPU, compare the counts with
the choices of Hugging Face's model.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.operators import Operators

CHUNK = 48  # tokens per step: every longer prompt is prefilled in chunks
BLOCK = 32
KV_TOKENS = 768  # far fewer than the prompts of a batch need
# (seed, prompts, tokens generated for each) of each batch. The second batch repeats the first, and the fifth
# the third: full hits. Model Runner V2 in the interpreter runs only the first two.
BATCHES = ((0, 10, 16), (0, 10, 16), (0, 29, 40), (1, 29, 40), (0, 29, 40))
SHORT = 2


def prompts(seed: int) -> list[list[int]]:
    """Return token ids: stems of whole and partial blocks with several continuations, some repeated."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, 257, int(n)).tolist() for n in (64, 33, 100, 32)]
    requests = [
        stem + rng.integers(1, 257, int(rng.integers(0, 60))).tolist() for stem in stems for _ in range(6)
    ]
    requests += [stems[0], stems[0], stems[2], stems[3], [5]]
    order = rng.permutation(len(requests))
    return [requests[i] for i in order]


def record_operators(on_host: bool) -> Operators:
    """Record the operators that eldr_serve calls in a worker's step, except for its copies to the host."""
    from eldr_serve.engine.vllm.capture.expert_capture import ExpertCapture
    from eldr_serve.engine.vllm.capture.host_copy import HostCopies
    from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
    from eldr_serve.engine.vllm.kv import worker_side as connector_worker
    from eldr_serve.engine.vllm.step_timer import StepTimer

    operators = Operators()
    ours: dict[type, tuple[str, ...]] = {
        ExpertCapture: ("count_last_step",),
        DeviceCapture: ("store_choices",),
        StepTimer: ("begin", "stop", "finish", "take_completed"),
        connector_worker.EldrConnectorWorker: ("start_step", "count_step", "take_counts"),
    }
    for owner, names in ours.items():
        for name in names:
            setattr(owner, name, operators.record_calls(getattr(owner, name)))
    if not on_host:  # on a GPU, counts stay on the device
        connector_worker.can_count_on_host = lambda *_: False
    HostCopies.start = operators.exclude(HostCopies.start)  # type: ignore[method-assign]
    return operators


def kernels() -> list[str]:
    """Return the names of vLLM's kernel libraries that this process has loaded."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.rpartition("/")[2] for line in mapped if "/vllm/_C" in line})


def device_arguments(where: str, graphs: str) -> dict[str, Any]:
    """Return the engine arguments of the device. CUDA graphs hold steps with parts of prompts, too."""
    if where != "cuda":
        return {"device": "cpu", "block_size": BLOCK}
    sizes = [1, 2, 4, 8, 12, 24, CHUNK]
    return {
        "block_size": BLOCK // 2,  # vLLM's default on GPUs
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": 0.2,
        "compilation_config": {"mode": 0, "cudagraph_mode": graphs, "cudagraph_capture_sizes": sizes},
        "cudagraph_metrics": True,
    }


def note_decode_steps(scheduler: Any) -> list[list[tuple[str, int]]]:
    """Record (request, position) of the tokens that each pure decode step feeds to the model from now on.

    On a GPU a step's record arrives one or more steps after its tokens, but records keep their order.
    """
    steps: list[list[tuple[str, int]]] = []
    schedule = scheduler.schedule

    def schedule_and_record(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        tokens = scheduled.num_scheduled_tokens
        if tokens and sum(tokens.values()) == len(tokens):
            fed = [scheduler.requests[name] for name in tokens]
            steps.append([(r.kv_transfer_params["eldr_request"], r.num_computed_tokens - 1) for r in fed])
        return scheduled

    scheduler.schedule = schedule_and_record
    return steps


def main(model: str, out: str, asynchronous: bool, short: bool, where: str, graphs: str) -> None:
    """Serve the batches on one engine, and write its counts and decode steps to the file `out`."""
    from prometheus_client import REGISTRY
    from vllm import EngineArgs, SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerBase

    from eldr_serve.engine.vllm.config import engine_kwargs

    steps: list[dict[str, Any]] = []
    ran: Counter[str] = Counter()  # number of steps by kind of CUDA graph
    prompt_counts: dict[str, tuple[int, str]] = {}  # in the format of whole replicas

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None and scheduler_stats.cudagraph_stats:
                ran[scheduler_stats.cudagraph_stats.runtime_mode] += 1
            if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                steps.extend(scheduler_stats.kv_connector_stats["steps"])
                prompt_counts.update(scheduler_stats.kv_connector_stats["prompt_counts"])

        def log_engine_initialized(self) -> None: ...

    # Graph capture does not work inside a torch mode.
    operators = Operators() if where == "cuda" else record_operators(where == "host")
    device_kwargs = device_arguments(where, graphs)
    cores = os.sched_getaffinity(0)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=12,
            max_num_batched_tokens=CHUNK,
            num_gpu_blocks_override=KV_TOKENS // device_kwargs["block_size"],
            **engine_kwargs("calibrate", async_scheduling=asynchronous, **device_kwargs),
        ),
        UsageContext.LLM_CLASS,
        stat_loggers=[Recorder],
    )
    core = engine.engine_core.engine_core  # in this process
    fed = note_decode_steps(core.scheduler)
    records: list[dict[str, Any]] = []
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
            for output in engine.step():
                if output.finished:
                    cached += output.num_cached_tokens or 0
                    records.append(
                        {
                            "request": output.request_id,
                            "prompt": output.prompt_token_ids,
                            "output": list(output.outputs[0].token_ids),
                            **(output.kv_transfer_params or {}),
                        }
                    )
    samples = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
    scheduler = core.scheduler.connector.scheduler_side
    report = {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "batches": BATCHES[: SHORT if short else None],
        "records": records,
        "graphs": ran,
        "kernels": kernels(),
        "operators": sorted(operators.names),
        "steps": [step | {"fed": tokens} for step, tokens in zip(steps, fed, strict=False)],
        "decode_steps": len(fed),
        "prompt_counts": prompt_counts,
        "cached_tokens": cached,
        "preemptions": samples["vllm:num_preemptions_total"],
        "left_behind": [len(scheduler._tracked), len(scheduler._requests), len(scheduler._prompt_counts)],
        "counted_steps": samples["eldr_decode_step_seconds_count"],
        "cores": [sorted(cores), sorted(os.sched_getaffinity(0))],
        "capture": [samples["eldr_capture_seconds_sum"], samples["eldr_capture_seconds_count"]],
    }
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    name, report, scheduler, batches, place, *mode = sys.argv[1:]
    main(name, report, scheduler == "async", batches == "short", place, mode[0] if mode else "FULL")
