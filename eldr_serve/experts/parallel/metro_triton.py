"""METRO as one Triton kernel: one program per layer, without host synchronisation, usable in CUDA graphs.

The result is bitwise equal to `MetroPlan.route`. The loads of all ranks are in one vector of registers; one
loop assigns the experts that have several hosts, like the paper's threads under their locks.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.experts.parallel.metro import UNIT, MetroPlan

_UNIT = tl.constexpr(UNIT)
_NEVER = tl.constexpr(1 << 30)  # larger than any load
_IN_THE_LOOP = tl.constexpr(-2)


@triton.jit  # type: ignore[untyped-decorator]
def _metro(  # type: ignore[no-untyped-def]
    active,  # int32[N, E]
    shares,  # int32[N, E, G], of MetroPlan
    order,  # int32[N, M], of MetroPlan
    only,  # int32[N, E], output value of an expert outside the loop
    stored,  # int32[N, E, G], output value of each choice
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
    expert_valid, rank_valid = expert < num_experts, rank < num_ranks

    is_active = tl.load(active + expert, mask=expert_valid, other=0) > 0
    alone = tl.load(only + expert, mask=expert_valid, other=_IN_THE_LOOP)
    tl.store(out + expert, tl.where(is_active, alone, -1), mask=expert_valid & (alone != _IN_THE_LOOP))
    expected = tl.load(
        shares + expert[:, None] * num_ranks + rank[None, :],
        mask=is_active[:, None] & rank_valid[None, :],
        other=0,
    )
    load = tl.sum(tl.maximum(expected, 0), axis=0)
    for turn in range(num_choosing):
        current = tl.load(order + turn)
        share = tl.load(shares + current * num_ranks + rank, mask=rank_valid, other=-1)
        has_tokens = tl.load(active + current) > 0
        load -= tl.where(has_tokens, tl.maximum(share, 0), 0)
        # Load and rank in one number: the minimum is the first of the least loaded ranks.
        key = tl.where(share < 0, _NEVER, load * ranks_2 + rank)
        best = tl.min(key, axis=0)
        load += tl.where((key == best) & has_tokens, _UNIT, 0)
        choice = tl.load(stored + current * num_ranks + best % ranks_2)
        tl.store(out + current, tl.where(has_tokens, choice, -1))


class TritonMetro:
    """The plan of N layers on one device, and the kernel's output at a fixed address.

    Args:
        plan: plan of E experts on G ranks.
        device: a GPU; the CPU in Triton's interpreter.
        stored: int[N, E, G], output value of each choice, such as the rank's physical slot; None: the rank.
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

        def on_device(array: ArrayLike) -> Tensor:
            return torch.tensor(np.asarray(array), dtype=torch.int32, device=device)

        self._tables = on_device(plan.shares), on_device(plan.order), on_device(only), on_device(values)
        self._sizes = experts, ranks, plan.order.shape[1]
        self.chosen = torch.full((layers, experts), -1, dtype=torch.int32, device=device)

    def route(self, tokens: Tensor) -> Tensor:
        """Fill and return `chosen`, int32[N, E]: the output value of each expert's choice; -1 where inactive.

        Args:
            tokens: int32[N, E], contiguous; above 0 where the batch has tokens for the expert. Experts
                without a host must have none.
        """
        experts, ranks, choosing = self._sizes
        _metro[(len(tokens),)](
            tokens,
            *self._tables,
            self.chosen,
            choosing,
            experts,
            ranks,
            triton.next_power_of_2(experts),
            triton.next_power_of_2(ranks),
            num_warps=1,
        )
        return self.chosen
