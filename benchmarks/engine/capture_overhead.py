"""Measure what expert counting costs a request, part by part, and what it adds to a real prefill.

    python -m benchmarks.engine.capture_overhead              (parts, and an engine with capture on and off)
    python -m benchmarks.engine.capture_overhead --requests 0 --wide-requests 0 (parts alone: no engine)

The parts run eldr_serve's code on tensors of Qwen3-30B-A3B's shape, as in the paper's Table 1, with a prompt
prefilled in one step. The paper's total is 0.86 ms per request, 1.2 % of TTFT. On a GPU (--device cuda) the
device counts. On a CPU one core counts, so `count scatter` is far larger there.

The engine rows use one engine with the demo model. A switch selects eldr_serve's connector and scheduler
or vLLM's (benchmarks/lib/replay/switched.py), for each pair of prompts in random order. The two prompts of a
pair differ in their first token, so neither is found in the prefix cache. The wide engine's rows use layers
of Qwen3-30B-A3B at full width, with random weights. It has two of the 48 layers, or as many as --wide-layers
says. Capture should add less than 0.5 % of TTFT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.cluster import python_path, unwind_on_sigterm
from benchmarks.lib.engines import ENGINE_ENV, check_device
from benchmarks.lib.synthetic import (
    DUMMY,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    KV_BYTES,
    LAYERS,
    TOP_K,
    random_spec,
    table_near,
    write_config,
)
from eldr_serve.commands.run import run
from eldr_serve.engine.calls import EXPERT_COUNTS_KEY, PrefillReply
from eldr_serve.engine.methods import GENERATE
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
from eldr_serve.errors import ServiceFailedError
from eldr_serve.experts.signature import pack_counts, unpack_counts
from eldr_serve.router_client.scorer import Scorer
from eldr_serve.router_protocol.messages import LiveSettings, Place, decoder, encode
from eldr_serve.scheduling import Loads, PlacementRequest, make_policy
from eldr_serve.scheduling.policies.registry import DEFAULT_POLICY
from loadgen.results import publish, time_calls
from loadgen.statistics import median_ci

BENCHMARKS = {"capture_overhead": "all"}
WORKERS = 16
PAPER_TTFT_MS = 0.86 / 0.012  # in the paper, 0.86 ms are 1.2 % of TTFT
_WARM_UP = 8  # prompts before the measured ones
_MODEL = Path("examples/demo_model/weights")
_VOCABULARY = 4096  # token ids of the demo model
_ENGINE_BLOCK_SIZE = 32  # attention on CPUs supports only multiples of it
_SIZES = {"L": LAYERS, "E": EXPERTS, "top_k": TOP_K, "workers": WORKERS}
_NOTES = (
    "Parts are timed alone with Qwen3-30B-A3B's shape, in one thread, and compared with --ttft-ms. The "
    "engine serves the demo model, with capture on and off for pairs of prompts in random order, and is "
    "compared with its own TTFT. The wide engine does the same with random weights in bfloat16."
)
_ROW_RESET = "row reset alone"  # a part of the count scatter
_PROMPTS_TIMES_LAYERS = 80 * LAYERS  # prompts times layers whose blocks a GPU engine keeps for a second


class _StubMoeRouter:
    """Stand-in for the capture hook of vLLM's BaseRouter."""

    top_k, global_num_experts = TOP_K, EXPERTS
    capture_fn: Callable[[torch.Tensor], None]

    def set_capture_fn(self, capture_fn: Callable[[torch.Tensor], None] | None) -> None:
        assert capture_fn is not None
        self.capture_fn = capture_fn


def parts(tokens: int, block_size: int, device: str, calls: int, seed: int) -> dict[str, list[float]]:
    """Return the seconds of each part, for a request of `tokens` prompt tokens."""
    rng = np.random.default_rng(seed)
    torch.set_num_threads(1)
    blocks = -(-tokens // block_size)
    routers = [_StubMoeRouter() for _ in range(LAYERS)]
    capture = DeviceCapture(
        routers, max_tokens=tokens, device=device, num_blocks=4 * blocks, block_size=block_size
    )
    scores = rng.gumbel(size=(LAYERS, tokens, EXPERTS)) + 2 * rng.normal(size=(LAYERS, 1, EXPERTS))
    chosen = torch.tensor(np.argsort(-scores, axis=-1)[..., :TOP_K].astype(np.int32), device=device)
    ids = torch.tensor(rng.permutation(4 * blocks)[:blocks], device=device)
    positions = torch.arange(tokens, device=device)
    slots = ids[positions // block_size] * block_size + positions % block_size
    cache = capture.cache
    assert cache is not None

    def hooks() -> None:
        for layer, router in enumerate(routers):
            router.capture_fn(chosen[layer])

    hooks()
    cache.record(slots, chosen, ids)
    counts = cache.total(ids).cpu().numpy().astype(np.uint32)
    packed = pack_counts(counts)
    narrow = chosen.to(torch.int16)  # the type in which the hooks store experts

    table = table_near(counts[None], WORKERS, rng, spec=random_spec(rng), noise=tokens // 4)
    policy = make_policy("locality-band").set_table(table)
    loads = Loads.from_counts(rng.integers(0, 20, WORKERS))

    measured: dict[str, Callable[[], Any]] = {
        "hooks: copy the choices": hooks,
        "count scatter, with row reset": lambda: cache.record(slots, narrow, ids),
        _ROW_RESET: lambda: cache.rows.__setitem__(ids, 0),
        "prompt sum": lambda: cache.total(ids).cpu().numpy().astype(np.uint32),
        "pack": lambda: pack_counts(counts),
        "messages": messages_with(counts),
        "unpack": lambda: unpack_counts(packed),
        "encode and route": lambda: policy.select(
            PlacementRequest("r", tokens, 64, expert_counts=counts), loads, rng
        ),
    }
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    return {
        name: time_calls(lambda _, part=part: part(), calls=calls, warm_up=5, settle=settle)  # type: ignore[misc]
        for name, part in measured.items()
    }


def messages_with(
    counts: NDArray[np.uint32],
) -> Callable[[], tuple[dict[str, Any], PrefillReply, Place, EngineRequest]]:
    """Return a function that encodes and decodes each message of a request that carries its prompt's counts.

    The four messages are the output of vLLM's core, the reply to the prefill call, the call for a lease under
    the default policy, which reads counts, and the decode call.
    """
    packed = pack_counts(counts)
    params = {EXPERT_COUNTS_KEY: packed}
    scorer = Scorer(lambda: None)
    scorer.settings = LiveSettings(1, DEFAULT_POLICY, {}, table=None, table_version=0)
    request = PlacementRequest("r", int(counts[0].sum()) // TOP_K, 64)
    to_bytes, from_bytes, read_place = msgspec.msgpack.encode, msgspec.msgpack.decode, decoder(Place)

    def send() -> tuple[dict[str, Any], PrefillReply, Place, EngineRequest]:
        core_output = from_bytes(to_bytes(params))
        reply = from_bytes(to_bytes(PrefillReply(b"", params)), type=PrefillReply)
        place = read_place(encode(Place(replace(request, expert_counts=scorer.counts_for_policy(counts)))))
        _, header, _ = from_bytes(to_bytes((GENERATE, EngineRequest(expert_counts=packed), b"")))
        return core_output, reply, place, msgspec.convert(header, EngineRequest)

    return send


def _row(level: str, name: str, block_size: int, seconds: list[float], ttft_ms: float) -> dict[str, Any]:
    middle, low, high = (1000 * v for v in median_ci(seconds))
    return {
        "level": level,
        "part": name,
        "block_size": block_size,
        "p50_ms": middle,
        "p50_low_ms": low,
        "p50_high_ms": high,
        "ttft_p50_ms": ttft_ms,
        "share_of_ttft_pct": 100 * middle / ttft_ms,
        "share_low_pct": 100 * low / ttft_ms,
        "share_high_pct": 100 * high / ttft_ms,
    }


class _PrefillProcess:
    """A prefill engine in its own process."""

    def __init__(self, job: dict[str, Any], port: int, stack: ExitStack) -> None:
        self._log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        env = {"PYTHONPATH": python_path(), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lib.prefill_engine", json.dumps(job)],
            env=os.environ | ENGINE_ENV | env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        stack.callback(self._stop)

    def _stop(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the engine has stopped already
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def prefill(self, prompt: list[int], capture: bool) -> tuple[float, float]:
        """Return the seconds from prompt to first token, and the counting time that the engine reports."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the missing answer is reported below
            self._process.stdin.write(json.dumps([capture, prompt]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise ServiceFailedError(f"the engine stopped: {' | '.join(self._log.read().splitlines()[-3:])}")
        seconds, counting = json.loads(line)
        return seconds, counting


def _measure_engine(
    level: str, job: dict[str, Any], requests: int, port: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Serve pairs of prompts, one with capture and one without, in random order, and return rows."""
    tokens = job["max_tokens"]
    seconds_of_pairs: list[tuple[float, float, float]] = []  # times without capture, with it, and of counting
    with ExitStack() as stack:
        engine = _PrefillProcess(job, port, stack)
        for number in range(-_WARM_UP, requests):
            first, *rest = rng.integers(1, 4000, tokens).tolist()
            by_capture = {}
            for position, capture in enumerate(rng.permutation([False, True]).tolist()):
                by_capture[capture] = engine.prefill([1 + (first + position) % 3999, *rest], capture)
            if number >= 0:
                seconds_of_pairs.append((by_capture[False][0], *by_capture[True]))
    without_capture, with_capture, counting = map(list, zip(*seconds_of_pairs, strict=True))
    ttft_ms = 1000 * float(np.median(without_capture))
    added = [on - off for off, on in zip(without_capture, with_capture, strict=True)]
    seconds_by_name = {
        "TTFT without capture": without_capture,
        "TTFT with capture": with_capture,
        "added by capture, prompt by prompt": added,
        "counting, as the engine times it": counting,
    }
    return [
        _row(level, name, job["block_size"], seconds, ttft_ms) for name, seconds in seconds_by_name.items()
    ]


def _part_rows(measured: dict[str, list[float]], block_size: int, ttft_ms: float) -> list[dict[str, Any]]:
    """Return a row for each part, and one for their sum in each call."""
    per_call = zip(*(v for name, v in measured.items() if name != _ROW_RESET), strict=True)
    parts_and_sum = measured | {"sum": [sum(call) for call in per_call]}
    return [_row("part", name, block_size, seconds, ttft_ms) for name, seconds in parts_and_sum.items()]


def capture_overhead(
    tokens: Annotated[int, typer.Option(min=32, help="Prompt tokens of the timed step.")] = 1024,
    block_size: Annotated[int, typer.Option(min=1, help="KV block of the timed step, tokens.")] = 16,
    calls: Annotated[int, typer.Option(min=3, help="Calls timed for each part.")] = 200,
    ttft_ms: Annotated[float, typer.Option(min=0.1, help="TTFT to compare parts with, ms.")] = PAPER_TTFT_MS,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Device of the parts' count cache and of the engines.")
    ] = "cpu",
    requests: Annotated[int, typer.Option(min=0, help="Pairs of prompts on the engine; 0 skips it.")] = 1800,
    engine_tokens: Annotated[int, typer.Option(min=32, max=2000, help="Prompt tokens on the engine.")] = 1024,
    wide_requests: Annotated[int, typer.Option(min=0, help="Prompt pairs on the wide model; 0: none.")] = 200,
    wide_layers: Annotated[int, typer.Option(min=1, help="Layers of the wide model; 48 take 61 GB.")] = 2,
    wide_vocabulary: Annotated[
        int, typer.Option(min=_VOCABULARY, help="Tokens of the wide model's vocabulary.")
    ] = _VOCABULARY,
    model: Annotated[Path, typer.Option(help="Folder of the engine's model.")] = _MODEL,
    port: Annotated[int, typer.Option(help="Port of the engine's NIXL side channel.")] = 8340,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time the parts of expert capture, and prefill with and without it."""
    unwind_on_sigterm()
    check_device(device)
    rows = _part_rows(parts(tokens, block_size, device, calls, seed), block_size, ttft_ms)
    job: dict[str, Any] = {"model": str(model.resolve()), "device": device}
    job |= {"block_size": _ENGINE_BLOCK_SIZE, "max_tokens": engine_tokens}
    if requests:
        rows += _measure_engine("engine", job, requests, port, np.random.default_rng(seed))
    wide = {"layers": wide_layers, "vocabulary": wide_vocabulary}
    wide |= {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
    if wide_requests:
        with tempfile.TemporaryDirectory() as folder:
            model_folder = write_config(Path(folder), **wide)
            cache_bytes = _PROMPTS_TIMES_LAYERS * engine_tokens * KV_BYTES
            room = {"kv_cache_memory_bytes": cache_bytes} if device == "cuda" else {}
            job |= {"model": str(model_folder), "arguments": DUMMY | room}
            rows += _measure_engine("wide engine", job, wide_requests, port, np.random.default_rng(seed))
    publish(
        "capture_overhead",
        rows,
        inputs=_SIZES
        | {
            "tokens": tokens,
            "device": device,
            "calls": calls,
            "requests": requests,
            "engine_tokens": engine_tokens,
            "wide_requests": wide_requests,
            **{f"wide_{name}": value for name, value in wide.items()},
        },
        seed=seed,
        out=out,
        notes=_NOTES,
    )


if __name__ == "__main__":
    run(capture_overhead)
