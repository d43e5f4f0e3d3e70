"""A low-bit replica of the served model, whose gates foretell its routing (DIRECTOR, section V-A).

Weights are rounded to integers of few bits, a scale for each group of them; they are kept here as the numbers
that those integers stand for, so the replica computes in float: what it predicts is what a packed one would
predict with exact activations, its time is not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SCALE_BITS = 16


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """The weight [..., D] rounded to symmetric integers, with a scale for each `group` along D."""
    limit = 2 ** (bits - 1) - 1
    padded = nn.functional.pad(weight.float(), (0, -weight.shape[-1] % group))
    grouped = padded.reshape(*padded.shape[:-1], -1, group)
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
    found: Tensor = ((grouped / scale).round() * scale).flatten(-2)[..., : weight.shape[-1]]
    return found.to(weight.dtype)


@torch.no_grad()
def quantise_(model: nn.Module, bits: int, *, group: int = 32) -> float:
    """Round every matrix of the model in place, but for its gates; returns the replica's size over bf16's.

    Raises:
        ValueError: bits outside 2 to 8.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"weights of {bits} bits: it must be from 2 to 8")
    size = whole = 0.0
    for name, weight in model.named_parameters():
        whole += 16 * weight.numel()
        if weight.ndim < 2 or ".gate." in name:
            size += 16 * weight.numel()
            continue
        weight.copy_(rounded(weight, bits, group))
        size += bits * weight.numel() + _SCALE_BITS * weight.numel() / group
    return size / whole
