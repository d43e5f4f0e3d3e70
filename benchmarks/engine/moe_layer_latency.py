"""Time an MoE layer by active experts and batch size (Figure 2 of the ELDR paper).

    python -m benchmarks.engine.moe_layer_latency --shape qwen3-30b-a3b
    python -m benchmarks.engine.moe_layer_latency --shape qwen3-30b-a3b,gpt-oss-120b --device cuda

One layer with random bf16 weights at a model's shape runs through the kernel that vLLM uses: its CPU
fused-MoE kernel, or its Triton kernel in a CUDA graph, timed by events. Each call draws new experts, since
repeated calls with the same few experts would find their weights in the cache.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import typer

from benchmarks.lib import options
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.validation import unknown_name
from loadgen.plots import lines
from loadgen.results import publish

BENCHMARKS = {"moe_layer_latency": "default"}
SHAPES = {  # hidden size, intermediate size, experts, top-k
    "demo-wide": (160, 1024, 64, 4),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}


def moe_layer_latency(
    shape: Annotated[str, typer.Option(help=f"Shapes, of: {', '.join(SHAPES)}.")] = "qwen3-30b-a3b",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "16,32,64,128",
    active: Annotated[str, typer.Option(help="Active experts, comma-separated.")] = "8,16,32,64,96,128",
    rounds: Annotated[int, typer.Option(min=3, help="Timed calls for each point.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU.")] = 1,
    device: options.CpuOrCuda | None = None,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time one MoE layer by batch size and number of active experts."""
    shapes = shape.split(",")
    unknown = [name for name in shapes if name not in SHAPES]
    if unknown:
        raise UserInputError(unknown_name("", unknown[0], SHAPES, "shape"))
    sizes = options.numbers("--batches", batches), options.numbers("--active", active)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch

    available: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in (None, available):
        raise UserInputError(
            f"--device is {device}, but vLLM's kernels here are for {available}; leave the option out"
        )
    torch.set_num_threads(threads)
    rows = [row for name in shapes for row in _rows(name, available, *sizes, rounds, seed)]
    path = publish(
        "moe_layer_latency",
        rows,
        inputs={"rounds": rounds, "threads": threads},
        seed=seed,
        out=out,
        notes="One layer alone, with random weights and the kernel that vLLM uses on this device. Fit by "
        f"least squares over all batch sizes: {'; '.join(map(partial(_describe_fit, rows), shapes))}",
    )
    for name in shapes:
        picture = path.with_suffix(".png") if len(shapes) == 1 else path.with_name(f"{path.stem}_{name}.png")
        shape_rows = [row for row in rows if row["shape"] == name]
        lines(shape_rows, "active_experts", ["latency_p50_ms"], picture, by="batch_size")


def _describe_fit(rows: list[dict[str, Any]], shape: str) -> str:
    shape_rows = [row for row in rows if row["shape"] == shape]
    active = np.array([[1, row["active_experts"]] for row in shape_rows])
    fixed, slope = np.linalg.lstsq(active, 1e3 * np.array([row["latency_p50_ms"] for row in shape_rows]))[0]
    return f"{shape} {fixed:.1f} us + {slope:.2f} us per active expert"


def _rows(
    shape: str, device: str, sizes: list[int], actives: list[int], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """Return one shape's rows: each batch size with each number of active experts that it can activate."""
    hidden, intermediate, experts, top_k = SHAPES[shape]
    layer = _Layer(device, hidden, intermediate, experts, seed)
    rng = np.random.default_rng(seed)
    points = [(b, a) for b in sizes for a in actives if top_k <= a <= min(experts, b * top_k)]
    if not points:
        raise UserInputError(
            f"no batch of {shape} activates these numbers of experts: --active must be from {top_k} to "
            f"{top_k} times the batch, at most {experts}"
        )
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(rounds + 1):  # the first round warms up
        for n in rng.permutation(len(points)):
            b, a = points[n]
            ids = draw_experts(b, a, experts, top_k, rng)
            times[b, a].append(layer.seconds(ids))
    return [
        {"shape": shape, "device": device, "batch_size": b, "active_experts": a}
        | {f"latency_p{q}_ms": 1e3 * float(np.percentile(measured[1:], q)) for q in (50, 90)}
        for (b, a), measured in times.items()
    ]


def draw_experts(batch: int, active: int, experts: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Return int[batch, top_k]: distinct experts for each token, exactly `active` in all."""
    chosen = rng.permutation(experts)[:active]
    dealt = np.concatenate([rng.permutation(chosen) for _ in range(-(-batch * top_k // active) + 1)])
    ids = np.empty((batch, top_k), np.int64)
    for token in range(batch):
        hand, rest = dealt[:top_k], dealt[top_k:]
        while len(set(hand)) < top_k:  # a hand that crosses two shuffles may repeat an expert
            missing = rng.choice(np.setdiff1d(chosen, hand), top_k - len(set(hand)), replace=False)
            hand = np.concatenate([np.unique(hand), missing])
        ids[token], dealt = hand, rest
    return ids


class _Layer:
    """The experts of one MoE layer on a device."""

    def __init__(self, device: str, hidden: int, intermediate: int, experts: int, seed: int) -> None:
        import torch

        from eldr_serve.engine.vllm.compat.moe import fused_moe

        self._device, self._hidden = device, hidden
        torch.manual_seed(seed)
        tensor_options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self._experts = fused_moe(
            torch.randn(experts, 2 * intermediate, hidden, **tensor_options) * hidden**-0.5,
            torch.randn(experts, hidden, intermediate, **tensor_options) * intermediate**-0.5,
        )
        self._graphs: dict[int, tuple[Any, Any]] = {}  # batch size -> chosen experts, graph

    def seconds(self, ids: np.ndarray) -> float:
        """Return the seconds of one call with these experts: wall clock, or a graph's replay by events."""
        import torch

        chosen = torch.as_tensor(ids, dtype=torch.int32)
        if self._device == "cuda":
            graph_experts, graph = self._graphs.get(len(ids)) or self._capture(chosen.cuda())
            graph_experts.copy_(chosen)
            return float(graph.time_replay())
        inputs = self._inputs(chosen)
        start = time.perf_counter()
        self._experts(*inputs)
        return time.perf_counter() - start

    def _capture(self, chosen: Any) -> tuple[Any, Any]:
        from benchmarks.lib.cuda_graph import TimedGraph

        inputs = self._inputs(chosen)
        self._graphs[len(chosen)] = chosen, TimedGraph(lambda: self._experts(*inputs))
        return self._graphs[len(chosen)]

    def _inputs(self, chosen: Any) -> tuple[Any, Any, Any]:
        """Return bf16[T,H], equal weights float32[T,k] and the experts int32[T,k]."""
        import torch

        x = torch.randn(len(chosen), self._hidden, dtype=torch.bfloat16, device=self._device)
        weights = torch.full(chosen.shape, 1 / chosen.shape[1], dtype=torch.float32, device=self._device)
        return x, weights, chosen


if __name__ == "__main__":
    run(moe_layer_latency)
