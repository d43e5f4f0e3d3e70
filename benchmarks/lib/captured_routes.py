"""Capture the experts that the demo model uses for real prompts, the input of most benchmarks.

    python -m benchmarks.lib.captured_routes --prompts DIR --trace routes.safetensors --tokens tokens.json

It runs the prompts once on a real engine. A benchmark calls it for files in its work folder. Prompts are
filled up to whole KV blocks and one token (benchmarks/lib/replay/engine.py), so that a replay uses the same
tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import track

from benchmarks.lib import options
from benchmarks.lib.engines import device_kwargs, weights_name
from benchmarks.lib.ports import free_port
from benchmarks.lib.replay.engine import BLOCK, ENGINE_ENV, GPU_LIMITS, TEMPERATURE, pad_to_blocks
from eldr_serve.commands.run import run
from eldr_serve.engine.protocol import Sampling
from eldr_serve.engine.vllm.config import ONE_PROCESS
from eldr_serve.errors import ServiceFailedError, UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.files import write_atomically
from examples.demo_model import WEIGHTS
from loadgen.results import environment
from loadgen.workload import WorkloadPrompt, balanced_sample, read_prompts
from offline.calibrate import build_trace, prompt_tokens, trace_tokens

TASKS = ("code", "math", "medical", "legal")
GROUPS = ("all", "language", "task")
_TOP_K = 4  # top-k of the demo model
_IN_FLIGHT = 32  # requests in flight during the capture
_MAX_PROMPT_TOKENS = 1024


def groups_of(names: str) -> list[str]:
    """Return the workloads of a comma-separated list. Raise UserInputError if one is unknown."""
    groups = names.split(",")
    if unknown := [name for name in groups if name not in GROUPS]:
        raise UserInputError(f"unknown workload {unknown[0]!r}; choose from {', '.join(GROUPS)}")
    return groups


@dataclass(frozen=True)
class CapturedRoutes:
    """A trace with routes, and the token ids of its prompts."""

    trace: CalibrationTrace
    tokens: list[list[int]]

    def group(self, name: str) -> NDArray[np.int64]:
        """Return the indices of a workload's requests: task domains, languages, or all."""
        task = np.isin(self.trace.domains, TASKS)
        return np.flatnonzero({"all": np.ones_like(task), "language": ~task, "task": task}[name])

    def split(self, name: str, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split a workload's requests at random: a share to fit on, one to measure with."""
        shuffled = np.random.default_rng(seed).permutation(self.group(name))
        cut = round(share * len(shuffled))
        return shuffled[:cut], shuffled[cut:]

    def routes(self, request: int) -> NDArray[np.unsignedinteger]:
        """Return [T, L, k]: the experts of one request's decode steps."""
        assert self.trace.routes is not None
        assert self.trace.route_offsets is not None
        start, end = (int(x) for x in self.trace.route_offsets[request : request + 2])
        return self.trace.routes[start:end]


def load_or_capture(
    prompts: Path, work: Path, *, requests: int, output_tokens: int = 64, seed: int = 0, device: str = "cpu"
) -> CapturedRoutes:
    """Load the capture with these settings. Run it first if it does not exist.

    The device and vLLM's version are settings, because others generate other texts.
    """
    texts = [[prompt.id, prompt.domain, prompt.text] for prompt in read_prompts([prompts])]
    vllm = {name: v for name, v in environment()["versions"].items() if name.startswith("vllm")}
    settings = [texts, requests, output_tokens, seed, weights_name(), device, vllm]
    settings += [BLOCK, TEMPERATURE, _MAX_PROMPT_TOKENS]
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    trace, tokens = (work / f"capture_{name[:10]}{suffix}" for suffix in (".safetensors", ".json"))
    if not tokens.exists():
        arguments = ["--prompts", prompts, "--trace", trace, "--tokens", tokens, "--requests", requests]
        arguments += ["--output-tokens", output_tokens, "--seed", seed, "--device", device]
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.lib.captured_routes", *map(str, arguments)],
            check=False,
            env=os.environ | ENGINE_ENV | ({} if device == "cpu" else ONE_PROCESS),
        )
        if process.returncode:
            status = process.returncode
            raise ServiceFailedError(
                f"the capture of {prompts} ended with status {status}; see its output above"
            )
    return CapturedRoutes(CalibrationTrace.load(trace), json.loads(tokens.read_text()))


def capture(
    prompts: Annotated[Path, typer.Option(help="Folder of JSONL prompts with domains.")],
    trace: Annotated[Path, typer.Option(help="CalibrationTrace to write.")],
    tokens: Annotated[Path, typer.Option(help="JSON of token ids to write.")],
    requests: Annotated[int, typer.Option(min=8, help="Prompts, half tasks and half languages.")] = 1600,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=32, help="Maximum prompt tokens; longer prompts are cut at the start.")
    ] = _MAX_PROMPT_TOKENS,
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts.")] = 0,
    device: options.Device = "cpu",
) -> None:
    """Run prompts on one engine. Write their expert counts, routes and token ids."""
    from transformers import AutoTokenizer

    from eldr_serve.engine.vllm.calibration_engine import VllmCalibrationEngine
    from eldr_serve.engine.vllm.config import engine_kwargs

    parts: dict[bool, list[WorkloadPrompt]] = {True: [], False: []}
    for prompt in read_prompts([prompts]):
        parts[prompt.domain in TASKS].append(prompt)
    chosen = [prompt for part in parts.values() for prompt in balanced_sample(part, requests // 2, seed)]
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    longest = max_prompt_tokens // BLOCK * BLOCK + 1
    ids = [pad_to_blocks(prompt_tokens(tokenizer, p.text, chat=True)[-longest:]) for p in chosen]
    # vLLM 0.32 cannot split the prefill of a request with a seed on a CPU.
    more = {"enable_chunked_prefill": False} if device == "cpu" else GPU_LIMITS
    kwargs = engine_kwargs(
        "calibrate",
        **device_kwargs(device, range(1, _IN_FLIGHT + 1)),
        block_size=BLOCK,
        max_model_len=longest + output_tokens + BLOCK,
        seed=seed,
        **more,
    )
    engine = VllmCalibrationEngine({"model": str(WEIGHTS), **kwargs}, free_port())
    records = []
    for start in track(range(0, len(chosen), _IN_FLIGHT), description="capturing routes"):
        part = slice(start, start + _IN_FLIGHT)
        # One extra token: the last sampled token never reaches the gates.
        sampling = [
            Sampling(output_tokens + 1, TEMPERATURE, ignore_eos=True, seed=prompt_seed, routes=True)
            for prompt_seed in range(start, start + len(ids[part]))
        ]
        records += trace_tokens(engine, chosen[part], ids[part], sampling)
    trace.parent.mkdir(parents=True, exist_ok=True)
    build_trace("eldr-demo", records, _TOP_K, routes=True, vocabulary=tokenizer.get_vocab()).save(trace)
    write_atomically(tokens, json.dumps(ids))


if __name__ == "__main__":
    run(capture)
