"""The Muon optimiser: momentum with orthogonalised updates."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of x, x xT x and (x xT)^2 x
_WEIGHT_DECAY = 0.02
_UPDATE_SCALE = 2.5
_GATE_AND_UP_ROWS = 64  # rows of an expert's matrix that holds the gate and up halves


def orthogonal(update: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """Iterate Newton-Schulz towards the nearest semi-orthogonal matrices of update [..., m, n]."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    x = x.view(-1, *x.shape[-2:])
    linear, cubic, quintic = _NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        x = torch.baddbmm(x, gram, x, beta=linear)
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
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                has_halves = p.dim() == 3 and p.shape[-2] == _GATE_AND_UP_ROWS
                matrices = update.unflatten(-2, (2, -1)) if has_halves else update
                scale = math.sqrt(max(1.0, matrices.shape[-2] / matrices.shape[-1]))
                p.mul_(1 - _WEIGHT_DECAY * group["lr"])
                step_size = group["lr"] * scale * _UPDATE_SCALE
                p.add_(orthogonal(matrices, self.dtype).view_as(p), alpha=-step_size)
