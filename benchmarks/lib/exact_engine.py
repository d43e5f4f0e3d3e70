"""Serve the batches of `exact_counts` on one in-process engine (vLLM cannot be started twice in a process).

    python -m benchmarks.lib.exact_engine MODEL REPORT cpu|cuda all|short GRAPHS

The engine serves random prompts with shared prefixes under pressure: chunked prefill, eviction, preemption.
REPORT has the connector's counts. On a CPU they come from the code that counts on GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_serve.engine.vllm.config import engine_kwargs

CHUNK = 48  # tokens per step: every longer prompt is prefilled in chunks
BLOCK = 32
KV_TOKENS = 768  # far fewer than the prompts of a batch need
# Arguments of a CPU engine that counts as on a GPU (see can_count_on_host), although nothing is compiled.
COUNTED_ON_DEVICE: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 0}}


class Batch(NamedTuple):
    """Requests that are served together: seed of their prompts, their number, tokens generated for each."""

    seed: int
    requests: int
    tokens: int


# The second batch repeats the first, and the fifth the third: full hits. Model Runner V2 in the interpreter
# runs only the first two.
BATCHES = tuple(Batch(*batch) for batch in ((0, 10, 16), (0, 10, 16), (0, 29, 40), (1, 29, 40), (0, 29, 40)))
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


def device_arguments(device: str, graphs: str, *, on_host: bool) -> dict[str, Any]:
    """Return the engine arguments of the device.

    CUDA graphs also capture steps that contain parts of prompts.
    """
    if device != "cuda":
        return {"device": "cpu", "block_size": BLOCK} | ({} if on_host else COUNTED_ON_DEVICE)
    sizes = [1, 2, 4, 8, 12, 24, CHUNK]
    return {
        "block_size": BLOCK // 2,  # vLLM's default on GPUs
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": 0.2,
        "compilation_config": {"mode": 0, "cudagraph_mode": graphs, "cudagraph_capture_sizes": sizes},
        "cudagraph_metrics": True,
    }


class ExactEngine:
    """An engine of the tiny model with a small KV cache, which records its steps.

    Args:
        model: folder of the model.
        asynchronous: whether vLLM schedules a step before the previous one has ended.
        device: "cpu" or "cuda".
        graphs: vLLM's `cudagraph_mode` on a GPU.
        on_host: whether an engine on a CPU counts with the code for CPUs, not with that for GPUs.
    """

    def __init__(
        self, model: str, *, asynchronous: bool, device: str, graphs: str = "FULL", on_host: bool = False
    ) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.v1.metrics.loggers import StatLoggerBase

        steps: list[dict[str, Any]] = []
        graph_modes: Counter[str] = Counter()
        prompt_counts: dict[str, tuple[int, str]] = {}

        class Recorder(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None and scheduler_stats.cudagraph_stats:
                    graph_modes[scheduler_stats.cudagraph_stats.runtime_mode] += 1
                if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                    steps.extend(scheduler_stats.kv_connector_stats["steps"])
                    prompt_counts.update(scheduler_stats.kv_connector_stats["prompt_counts"])

            def log_engine_initialized(self) -> None: ...

        arguments = device_arguments(device, graphs, on_host=on_host)
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype="float32",
                max_model_len=512,
                max_num_seqs=12,
                max_num_batched_tokens=CHUNK,
                num_gpu_blocks_override=KV_TOKENS // arguments["block_size"],
                **engine_kwargs("calibrate", async_scheduling=asynchronous, **arguments),
            ),
            stat_loggers=[Recorder],
        )
        self.core: Any = self._engine.engine_core.engine_core  # the engine core runs in this process
        self._steps, self._graph_modes, self._prompt_counts = steps, graph_modes, prompt_counts

    def serve(self, batches: Sequence[Batch]) -> dict[str, Any]:
        """Serve the batches one after the other, and return a JSON-able report.

        Its `prompt_counts` are in the format of whole replicas, and `graphs` are numbers of steps by kind of
        CUDA graph.
        """
        from prometheus_client import REGISTRY

        fed = _record_decode_steps(self.core.scheduler)
        records: list[dict[str, Any]] = []
        cached_tokens = 0
        for number, batch in enumerate(batches):
            for record in self._serve_batch(number, batch):
                cached_tokens += record.pop("cached")
                records.append(record)
        samples = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
        return {
            "runner": type(self.core.model_executor.driver_worker.worker.model_runner).__module__,
            "batches": batches,
            "records": records,
            "graphs": self._graph_modes,
            "steps": [step | {"fed": tokens} for step, tokens in zip(self._steps, fed, strict=True)],
            "decode_steps": len(fed),
            "prompt_counts": self._prompt_counts,
            "cached_tokens": cached_tokens,
            "preemptions": samples["vllm:num_preemptions_total"],
            "counted_steps": samples["eldr_decode_step_seconds_count"],
            "capture": [samples["eldr_capture_seconds_sum"], samples["eldr_capture_seconds_count"]],
        }

    def _serve_batch(self, number: int, batch: Batch) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        seed, count, max_tokens = batch
        for index, prompt in enumerate(prompts(seed)[:count]):
            name = f"{number}-{index}"
            transfer_params = {"eldr_calibrate": True, "eldr_routes": True, "eldr_request": name}
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": transfer_params},
            )
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        records: list[dict[str, Any]] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    record: dict[str, Any] = {
                        "request": output.request_id,
                        "prompt": output.prompt_token_ids,
                        "output": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens or 0,
                    }
                    records.append(record | (output.kv_transfer_params or {}))
        return records


def _record_decode_steps(scheduler: Any) -> list[list[tuple[str, int]]]:
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


def main(model: str, report: str, device: str, batches: str, graphs: str) -> None:
    """Serve the batches and write the report."""
    engine = ExactEngine(model, asynchronous=True, device=device, graphs=graphs)
    served = engine.serve(BATCHES[: SHORT if batches == "short" else None])
    Path(report).write_text(json.dumps(served))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(*sys.argv[1:])
