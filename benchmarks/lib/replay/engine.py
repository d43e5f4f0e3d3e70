"""One real vLLM engine in this process, driven step by step in virtual time, on a CPU core or a GPU.

A decode worker of a disaggregated deployment receives its prompts' KV blocks. Here the blocks are in the
engine's prefix cache. Prompts are 1 token longer than whole KV blocks, so that admission computes that single
token, like the first decode step after a transfer.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np

from benchmarks.lib import engines
from benchmarks.lib.cpu_speed import CpuSpeed
from benchmarks.lib.engines import device_kwargs
from benchmarks.lib.ports import free_port

ENGINE_ENV = engines.ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
TEMPERATURE = 0.8  # sampling temperature of captures and replays
STEP_TOKENS = 4096  # maximum tokens of a step
BLOCK = 32  # tokens per KV block, the minimum of vLLM's CPU attention
# If CpuSpeed's matrix product takes x times as long, a step takes about x**_SENSITIVITY times as long. In
# means of 100 steps, the exponent was 0.56 to 1 in five trials of 2,500 to 35,000 steps (docs/benchmarks.md).
_SENSITIVITY = 0.75
# Sizes of decode batches with their own CUDA graph. Up to 40 all have one, since a padded token may activate
# further experts.
_GRAPH_SIZES = (*range(1, 41), *range(48, 129, 8))
# On a GPU, the size of the KV cache (on a CPU, ENGINE_ENV sets it) and the maximum tokens of a step, which
# can be small because few prompts are computed.
GPU_LIMITS = {"kv_cache_memory_bytes": 2 << 30, "max_num_batched_tokens": 512}


@dataclass(frozen=True)
class ReplayArrival:
    """A prefilled request that reaches the worker at `arrival_s`."""

    request_id: str
    arrival_s: float
    tokens: list[int]
    output_tokens: int
    seed: int  # sampling seed: its index in the capture, so that it generates the captured text again


@dataclass
class StepRecords:
    """Times and work of decode steps, one entry per step."""

    seconds: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)  # active experts, summed over MoE layers
    slowdown: list[float] = field(default_factory=list)  # factors by which `seconds` are divided

    def extend(self, other: StepRecords) -> None:
        """Append another run's steps."""
        for name in vars(self):
            getattr(self, name).extend(getattr(other, name))


def pad_to_blocks(tokens: list[int]) -> list[int]:
    """Extend the prompt on its left with its own text to 1 token more than whole blocks."""
    length = BLOCK * max(1, -(-(len(tokens) - 1) // BLOCK)) + 1
    return (tokens * -(-length // len(tokens)))[-length:]


class ReplayEngine:
    """A decode engine of this package on "cpu", "cuda" or "cuda-eager". A process has one at a time."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        max_batch: int = 256,
        max_model_len: int = 2048,
        batches: Sequence[int] = _GRAPH_SIZES,
        **arguments: Any,
    ):
        os.environ |= ENGINE_ENV | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        import torch
        from vllm import EngineArgs, LLMEngine
        from vllm.v1.metrics.loggers import StatLoggerBase

        from eldr_serve.engine.vllm.config import engine_kwargs

        records: list[dict[str, Any]] = []

        class Recorder(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                    records.extend(scheduler_stats.kv_connector_stats["steps"])

            def log_engine_initialized(self) -> None: ...

        self._records = records
        self._step_times_s: list[float] = []  # seconds of each step, by its number
        self._number_steps()
        kwargs = device_kwargs(device, batches) | {"block_size": BLOCK, "async_scheduling": False}
        self._cuda = device != "cpu"
        kwargs |= {"max_model_len": max_model_len, "max_num_seqs": max_batch, "seed": 0}
        kwargs |= GPU_LIMITS if self._cuda else {"max_num_batched_tokens": STEP_TOKENS}
        engine_args = EngineArgs(model=model, **engine_kwargs("decode", **kwargs | arguments))
        self._engine = LLMEngine.from_engine_args(engine_args, stat_loggers=[Recorder])
        # If torch was imported before, the environment came too late; a second thread would spin
        # beside the steps and share their work.
        torch.set_num_threads(1)
        self._cpu_speed = CpuSpeed()
        self._synchronise: Callable[[], None] = torch.cuda.synchronize if self._cuda else lambda: None
        self._clock = perf_counter if self._cuda else thread_time

    def probe_s(self) -> float:
        """Return the CPU time of CpuSpeed's matrix product on this core, in seconds, or 1 on a GPU."""
        return 1.0 if self._cuda else self._cpu_speed.measure_median()

    def slowdown(self, probe_s: float) -> float:
        """Return how many times longer a step takes now than at a probe time of `probe_s`."""
        return 1.0 if self._cuda else float((self._cpu_speed.measure_recent_mean() / probe_s) ** _SENSITIVITY)

    def step(self) -> tuple[list[Any], float, list[dict[str, Any]]]:
        """Run one step, and return outputs, seconds on the engine's clock, and the newly complete records.

        On a GPU these include records of previous steps. A record has the number of its step in "step", and
        that step's time, s, in "took".
        """
        self._records.clear()
        start = self._clock()
        outputs = self._engine.step()
        self._synchronise()
        self._step_times_s.append(self._clock() - start)
        records = [record | {"took": self._step_times_s[record["step"]]} for record in self._records]
        return outputs, self._step_times_s[-1], records

    def _number_steps(self) -> None:
        """Store in each record the number of its step."""
        from eldr_serve.engine.vllm.step_timer import StepTimer

        finish = inspect.unwrap(StepTimer.finish)  # without the numbers of an earlier engine

        @functools.wraps(finish)
        def finish_with_number(timer: StepTimer, record: dict[str, int], active: Any) -> None:
            finish(timer, record | {"step": len(self._step_times_s)}, active)

        StepTimer.finish = finish_with_number  # type: ignore[method-assign, assignment]

    def warm(self, prompts: Sequence[list[int]]) -> None:
        """Load the prompts' KV blocks into the prefix cache."""
        from vllm import SamplingParams

        for number, tokens in enumerate(prompts):
            self._engine.add_request(
                f"warm{number}", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1)
            )
        while self._engine.has_unfinished_requests():
            self.step()

    def run(
        self, arrivals: Sequence[ReplayArrival], probe_s: float
    ) -> tuple[dict[str, np.ndarray], StepRecords]:
        """Serve the arrivals without idle time, and return token times in seconds by request, and the steps.

        On a CPU the clock is the sum of the steps' CPU times, scaled to a probe time of `probe_s`. An engine
        here is one thread that never sleeps, so this is a step's time on its own core, without the effect of
        other processes on the core or of a slower core. On a GPU the clock is the sum of wall times until the
        device has finished the step.

        Raises:
            RuntimeError: another thread of the process shared the work, so that the clock is wrong.
        """
        from vllm import SamplingParams

        times: dict[str, list[float]] = {a.request_id: [] for a in arrivals}
        waiting = sorted(arrivals, key=lambda a: a.arrival_s, reverse=True)
        steps, now, first = StepRecords(), 0.0, len(self._step_times_s)
        process, thread = process_time(), thread_time()
        while waiting or self._engine.has_unfinished_requests():
            if not self._engine.has_unfinished_requests():
                now = max(now, waiting[-1].arrival_s)
            while waiting and waiting[-1].arrival_s <= now:
                arrival = waiting.pop()
                params = SamplingParams(
                    max_tokens=arrival.output_tokens,
                    temperature=TEMPERATURE,
                    ignore_eos=True,
                    seed=arrival.seed,
                )
                self._engine.add_request(arrival.request_id, {"prompt_token_ids": arrival.tokens}, params)
            slowdown = self.slowdown(probe_s)
            outputs, took, records = self.step()
            now += took / slowdown
            for output in outputs:
                times[output.request_id].append(now)
            for record in records:
                if record["step"] < first:
                    continue
                steps.seconds.append(record["took"] / slowdown)
                steps.requests.append(record["requests"])
                steps.kv_tokens.append(record["kv_tokens"])
                steps.experts.append(sum(record["active_by_layer"]))
                steps.slowdown.append(slowdown)
        process, thread = process_time() - process, thread_time() - thread
        if not self._cuda and process > 1.2 * thread + 0.1:
            raise RuntimeError(f"other threads used {process - thread:.1f} s beside the engine's own")
        return {name: np.array(t) for name, t in times.items()}, steps
