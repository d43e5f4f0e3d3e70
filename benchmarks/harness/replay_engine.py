"""One real vLLM engine in this process, driven step by step in virtual time.

A decode worker of a disaggregated deployment receives its prompts' KV blocks; here they lie in the
engine's prefix cache. Prompts are 1 token longer than whole KV blocks, so that admitting one
computes that single token, as the first decode step after a transfer does.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import process_time, thread_time
from typing import Any

import numpy as np

from benchmarks.harness import engines
from benchmarks.harness.cpu_speed import CpuSpeed

ENGINE_ENV = engines.ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
TEMPERATURE = 0.8  # of sampling, in captures and replays
BLOCK = 32  # tokens a KV block; the least that vLLM's CPU attention takes
# Where the product of CpuSpeed takes x times as long, a step takes about x**_FELT times: measured, means of
# 100 steps, 0.56 to 1 in five trials of 2,500 to 35,000 steps (docs/benchmarks.md).
_FELT = 0.75


@dataclass(frozen=True)
class Arrival:
    """A prefilled request that reaches the worker at `arrival_s`."""

    request_id: str
    arrival_s: float
    tokens: list[int]
    output_tokens: int
    seed: int  # of its sampling: its place in the capture, so that the captured text comes again


@dataclass
class Steps:
    """One entry a decode step: its time, and what it touched."""

    seconds: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)  # summed over MoE layers
    slowdown: list[float] = field(default_factory=list)  # by the core, which `seconds` are divided by

    def extend(self, other: Steps) -> None:
        """Take another run's steps too."""
        for name in vars(self):
            getattr(self, name).extend(getattr(other, name))


def aligned(tokens: list[int]) -> list[int]:
    """The prompt filled up on its left with its own text to 1 token more than whole blocks."""
    length = BLOCK * max(1, -(-(len(tokens) - 1) // BLOCK)) + 1
    return (tokens * -(-length // len(tokens)))[-length:]


def free_port() -> int:
    """A TCP port that nobody listens on, below those that Linux and macOS give to whoever asks for any.

    An engine opens many of those while it starts, and comes to its side channel's last.
    """
    for port in random.sample(range(28000, 32768), 64):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("of 64 ports from 28000 to 32767 none is free")


class ReplayEngine:
    """A decode engine of ours with the model at `model`; one at a time in a process."""

    def __init__(self, model: str, *, max_batch: int = 256, max_model_len: int = 2048):
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
        arguments = EngineArgs(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=max_batch,
            max_num_batched_tokens=4096,
            seed=0,
            **engine_kwargs("decode", device="cpu", async_scheduling=False),
        )
        self._engine = LLMEngine.from_engine_args(arguments, stat_loggers=[Recorder])
        # Where torch was imported before, the environment came too late; a second thread would spin
        # beside the steps and share their work.
        torch.set_num_threads(1)
        self.cpu_speed = CpuSpeed()

    def warm(self, prompts: Sequence[list[int]]) -> None:
        """Bring the prompts' KV blocks into the prefix cache."""
        from vllm import SamplingParams

        for number, tokens in enumerate(prompts):
            self._engine.add_request(
                f"warm{number}", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1)
            )
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._records.clear()

    def run(self, arrivals: Sequence[Arrival], probe_s: float) -> tuple[dict[str, np.ndarray], Steps]:
        """Serve the arrivals; idle time passes at once. Returns token times, s, by request, and the steps.

        The clock is the sum of the steps' CPU times, as they would be where CpuSpeed takes `probe_s`. An
        engine here is one thread that never sleeps, so that is what a step takes on a core of its own;
        neither that others ran on the core is in it, nor that the core was slow for a while.

        Raises:
            RuntimeError: another thread of the process shared the work, so that the clock is wrong.
        """
        from vllm import SamplingParams

        times: dict[str, list[float]] = {a.request_id: [] for a in arrivals}
        waiting = sorted(arrivals, key=lambda a: a.arrival_s, reverse=True)
        steps, now = Steps(), 0.0
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
            self._records.clear()
            slowdown = (self.cpu_speed.seconds() / probe_s) ** _FELT
            start = thread_time()
            outputs = self._engine.step()
            seconds = (thread_time() - start) / slowdown
            now += seconds
            for output in outputs:
                times[output.request_id].append(now)
            for record in self._records:
                steps.seconds.append(seconds)
                steps.requests.append(record["requests"])
                steps.kv_tokens.append(record["kv_tokens"])
                steps.experts.append(sum(record["active_by_layer"]))
                steps.slowdown.append(slowdown)
        process, thread = process_time() - process, thread_time() - thread
        if process > 1.2 * thread + 0.1:
            raise RuntimeError(f"other threads computed {process - thread:.1f} s beside the engine's own")
        return {name: np.array(t) for name, t in times.items()}, steps
