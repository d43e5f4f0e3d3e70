"""EP ranks as processes on this machine: one core and gloo each, or one GPU and nccl each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

T = TypeVar("T")


def run_on_ranks(ranks: int, work: Callable[..., T], *arguments: Any, timeout_s: float = 120.0) -> list[T]:
    """Run work(rank, *arguments) in `ranks` new processes with a process group, and return their results.

    A process has one compute thread and, on a CPU, one of this process's cores. Rank 0 has the last core. If
    a rank raises an exception, the other ranks end too, since their collectives fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            started = [
                pool.submit(_run_rank, rank, ranks, rendezvous, timeout_s, work, arguments)
                for rank in range(ranks)
            ]
            return [future.result() for future in started]


def device() -> str:
    """Return the compute device of this process's rank."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def read_gate(model: Path, layer: int) -> Tensor:
    """Read the gate of a layer, [E, H], from a Qwen3-MoE directory."""
    with safe_open(model / "model.safetensors", "pt") as file:
        weight: Tensor = file.get_tensor(f"model.layers.{layer}.mlp.gate.weight")
    return weight


def read_experts(model: Path, layer: int, experts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Read w13 [S, 2I, H] and w2 [S, H, I] of S slots with these experts."""
    with safe_open(model / "model.safetensors", "pt") as file:

        def part(expert: int, name: str) -> Tensor:
            tensor: Tensor = file.get_tensor(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight")
            return tensor

        w13 = torch.stack([torch.cat([part(e, "gate"), part(e, "up")]) for e in experts])
        return w13, torch.stack([part(e, "down") for e in experts])


def _run_rank(
    rank: int, ranks: int, rendezvous: str, timeout_s: float, work: Callable[..., T], arguments: Sequence[Any]
) -> T:
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-1 - rank % len(cores)]})
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        return work(rank, *arguments)
    finally:
        dist.destroy_process_group()
