"""The Muon optimiser: momentum with orthogonalised updates."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def orthogonal(update: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """Iterate Newton-Schulz towards the nearest semi-orthogonal matrices of update [..., m, n]."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    x = x.view(-1, *x.shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return (x.mT if tall else x).reshape(update.shape).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for (batches of) matrices. Gate and up halves are separate."""

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, dtype: torch.dtype, momentum: float = 0.95
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p].setdefault("m", torch.zeros_like(p))
                state.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(state, group["momentum"])
                matrices = update.unflatten(-2, (2, -1)) if p.dim() == 3 and p.shape[-2] == 64 else update
                scale = math.sqrt(max(1.0, matrices.shape[-2] / matrices.shape[-1]))
                p.mul_(1 - 0.02 * group["lr"])
                p.add_(orthogonal(matrices, self.dtype).view_as(p), alpha=-group["lr"] * scale * 2.5)
