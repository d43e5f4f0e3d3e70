"""A MoE layer's time follows its active experts, not its batch (counterpart of the paper's Figure 2).

    python -m benchmarks.moe_layer_latency --shape qwen3-30b-a3b

One layer of random bf16 weights at a model's shape, through the kernel that vLLM serves with: its CPU
fused-MoE kernel here, its Triton kernel where there is a CUDA device. Each call takes other experts
than the one before, so that weights come from memory as they do when other layers ran in between.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import options
from tools.cli import BadInput, run
from tools.plots import lines
from tools.results import publish

SHAPES = {  # hidden size, intermediate size, experts, top-k
    "demo-wide": (160, 1024, 64, 4),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}


def moe_layer_latency(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "qwen3-30b-a3b",
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "16,32,64,128",
    active: Annotated[str, typer.Option(help="Active experts, with commas.")] = "8,16,32,64,96,128",
    rounds: Annotated[int, typer.Option(min=3, help="Timed calls for each point.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU.")] = 1,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time one MoE layer by batch size and number of active experts."""
    if shape not in SHAPES:
        raise BadInput(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch

    torch.set_num_threads(threads)
    hidden, intermediate, experts, top_k = SHAPES[shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = _Layer(torch, device, hidden, intermediate, experts, seed)
    rng = np.random.default_rng(seed)
    points = [
        (b, a)
        for b in map(int, batches.split(","))
        for a in map(int, active.split(","))
        if top_k <= a <= min(experts, b * top_k)
    ]
    if not points:
        raise BadInput("no batch can activate so many experts; see --batches and --active")
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(rounds + 1):  # the first round warms up
        for n in rng.permutation(len(points)):
            b, a = points[n]
            ids = routes(b, a, experts, top_k, rng)
            times[b, a].append(layer.seconds(ids))
    rows: list[dict[str, Any]] = [
        {
            "shape": shape,
            "device": device,
            "batch_size": b,
            "active_experts": a,
            "latency_p50_ms": 1e3 * float(np.median(measured[1:])),
            "latency_p90_ms": 1e3 * float(np.percentile(measured[1:], 90)),
        }
        for (b, a), measured in times.items()
    ]
    path = publish(
        "moe_layer_latency", rows, inputs={"rounds": rounds, "threads": threads}, seed=seed, out=out,
        notes="random weights, one layer alone; the kernel that vLLM uses on this device",
    )  # fmt: skip
    lines(rows, "active_experts", ["latency_p50_ms"], path.with_suffix(".png"), by="batch_size")


def routes(batch: int, active: int, experts: int, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """int[batch, top_k]: distinct experts a token, exactly `active` in all."""
    chosen = rng.permutation(experts)[:active]
    dealt = np.concatenate([rng.permutation(chosen) for _ in range(-(-batch * top_k // active) + 1)])
    ids = np.empty((batch, top_k), np.int64)
    for token in range(batch):
        hand, rest = dealt[:top_k], dealt[top_k:]
        while len(set(hand)) < top_k:  # a deal that crosses two rounds may repeat an expert
            missing = rng.choice(np.setdiff1d(chosen, hand), top_k - len(set(hand)), replace=False)
            hand = np.concatenate([np.unique(hand), missing])
        ids[token], dealt = hand, rest
    return ids


class _Layer:
    """One MoE layer's experts on a device."""

    def __init__(
        self, torch: Any, device: str, hidden: int, intermediate: int, experts: int, seed: int
    ) -> None:
        from eldr_serve.engine.vllm.compat.moe import fused_moe

        self._torch, self._device, self._hidden = torch, device, hidden
        torch.manual_seed(seed)
        options = {"dtype": torch.bfloat16, "device": device}
        self._experts = fused_moe(
            torch.randn(experts, 2 * intermediate, hidden, **options) * hidden**-0.5,
            torch.randn(experts, hidden, intermediate, **options) * intermediate**-0.5,
        )

    def seconds(self, ids: np.ndarray) -> float:
        """Time of one call with these experts, s."""
        torch = self._torch
        x = torch.randn(len(ids), self._hidden, dtype=torch.bfloat16, device=self._device)
        weights = torch.full(ids.shape, 1 / ids.shape[1], dtype=torch.float32, device=self._device)
        chosen = torch.as_tensor(ids, dtype=torch.int32, device=self._device)
        settle = torch.cuda.synchronize if self._device == "cuda" else torch.cpu.synchronize
        settle()
        start = time.perf_counter()
        self._experts(x, weights, chosen)
        settle()
        return time.perf_counter() - start


if __name__ == "__main__":
    run(moe_layer_latency)
