"""Experts of MoE layers in plain torch, since each rank would take seconds to import vLLM's kernel."""

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.lib.ep import timing
from benchmarks.lib.ep.parallel_layer import Products


def torch_products(w13: Tensor, w2: Tensor) -> Products:
    """Compute experts in turn with plain torch, from w13 [S, 2I, H] (gate over up) and w2 [S, H, I]."""

    def products(rows: Tensor, slot: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        for number in np.unique(slot.cpu().numpy()).tolist():
            of_expert = slot == number
            gate, up = (rows[of_expert] @ w13[number].T).chunk(2, -1)
            out[of_expert] = (torch.nn.functional.silu(gate) * up) @ w2[number].T
        return out

    return products


def time_layers_of_jobs(rank: int, jobs: list[timing.RankJob]) -> list[timing.LayerRun]:
    """Time the layers of all jobs on this rank, with `torch_products` in place of vLLM's kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "vllm_products", torch_products)
        return [timing.time_layers_together(rank, job) for job in jobs]
