"""METRO's greedy as one Triton kernel: a program a layer, no word from the host, so that CUDA graphs hold it.

Bit for bit what `MetroPlan.route` chooses. The loads of all ranks sit in one vector of registers; the experts
that have a choice take their turns in one loop, as the paper's threads do behind their locks.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.experts.metro import UNIT, MetroPlan

_UNIT = tl.constexpr(UNIT)
_NEVER = tl.constexpr(1 << 30)  # above any load
_IN_THE_LOOP = tl.constexpr(-2)


@triton.jit  # type: ignore[untyped-decorator]
def _metro(  # type: ignore[no-untyped-def]
    active,  # int32[N, E]
    shares,  # int32[N, E, G], of MetroPlan
    order,  # int32[N, M], of MetroPlan
    only,  # int32[N, E], what to store for an expert outside the loop
    stored,  # int32[N, E, G], what to store for each choice
    out,  # int32[N, E]
    num_choosing,
    num_experts: tl.constexpr,
    num_ranks: tl.constexpr,
    experts_2: tl.constexpr,  # the next powers of 2
    ranks_2: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    active += layer * num_experts
    shares += layer * num_experts * num_ranks
    order += layer * num_choosing
    only += layer * num_experts
    stored += layer * num_experts * num_ranks
    out += layer * num_experts
    expert = tl.arange(0, experts_2)
    rank = tl.arange(0, ranks_2)
    real, there = expert < num_experts, rank < num_ranks

    wanted = tl.load(active + expert, mask=real, other=0) > 0
    alone = tl.load(only + expert, mask=real, other=_IN_THE_LOOP)
    tl.store(out + expert, tl.where(wanted, alone, -1), mask=real & (alone != _IN_THE_LOOP))
    expected = tl.load(
        shares + expert[:, None] * num_ranks + rank[None, :], mask=wanted[:, None] & there[None, :], other=0
    )
    load = tl.sum(tl.maximum(expected, 0), axis=0)
    for turn in range(num_choosing):
        mine = tl.load(order + turn)
        share = tl.load(shares + mine * num_ranks + rank, mask=there, other=-1)
        asked = tl.load(active + mine) > 0
        load -= tl.where(asked, tl.maximum(share, 0), 0)
        # Load and rank in one number: the smallest is the first of the least loaded.
        key = tl.where(share < 0, _NEVER, load * ranks_2 + rank)
        best = tl.min(key, axis=0)
        load += tl.where((key == best) & asked, _UNIT, 0)
        choice = tl.load(stored + mine * num_ranks + best % ranks_2)
        tl.store(out + mine, tl.where(asked, choice, -1))


class TritonMetro:
    """A plan's layers N on one device, and the kernel's output, which stays at one address.

    Args:
        plan: of E experts on G ranks.
        device: a GPU; the CPU in Triton's interpreter.
        stored: int[N, E, G], what stands for each choice, such as the rank's physical slot; None: the rank.
    """

    def __init__(
        self, plan: MetroPlan, device: torch.device | str, *, stored: ArrayLike | None = None
    ) -> None:
        layers, experts, ranks = plan.shares.shape
        values = np.broadcast_to(
            np.arange(ranks) if stored is None else np.asarray(stored), plan.shares.shape
        )
        only = np.take_along_axis(values, plan.shares.argmax(axis=2)[..., None], axis=2)[..., 0]
        only[np.arange(layers)[:, None], plan.order] = _IN_THE_LOOP.value

        def held(array: ArrayLike) -> Tensor:
            return torch.tensor(np.asarray(array), dtype=torch.int32, device=device)

        self._tables = held(plan.shares), held(plan.order), held(only), held(values)
        self._sizes = experts, ranks, plan.order.shape[1]
        self.chosen = torch.full((layers, experts), -1, dtype=torch.int32, device=device)

    def route(self, tokens: Tensor) -> Tensor:
        """Fill and return `chosen`, int32[N, E]: what is stored for each expert's choice; -1 where inactive.

        Args:
            tokens: int32[N, E], contiguous; above 0 where the batch has tokens for the expert. One without
                a host must have none.
        """
        experts, ranks, choosing = self._sizes
        _metro[(len(tokens),)](
            tokens, *self._tables, self.chosen, choosing, experts, ranks,
            triton.next_power_of_2(experts), triton.next_power_of_2(ranks), num_warps=1,
        )  # fmt: skip
        return self.chosen
