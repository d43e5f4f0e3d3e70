"""METRO as one Triton kernel: one program per layer, without host synchronisation, usable in CUDA graphs.

The result is bitwise equal to `MetroPlan.route`. All experts that have several hosts choose at once, and
choose again until no choice changes (see metro_torch). The paper has threads with locks (METRO, section V).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.experts.parallel.metro import EXPERT_LOAD, MetroPlan

_EXPERT_LOAD = tl.constexpr(EXPERT_LOAD)
_NOT_A_HOST = tl.constexpr(1 << 30)  # value larger than any load
_SEVERAL_HOSTS = tl.constexpr(-2)


@triton.jit  # type: ignore[untyped-decorator]
def _metro(  # type: ignore[no-untyped-def]
    active,  # int32[N, E]
    shares,  # int32[N, E, G], of MetroPlan
    order,  # int32[N, M], of MetroPlan
    only,  # int32[N, E], output value of an expert with one host
    output_values,  # int32[N, E, G], output value of each choice
    out,  # int32[N, E]
    num_choosing,
    num_experts: tl.constexpr,
    num_ranks: tl.constexpr,
    experts_2: tl.constexpr,  # the next powers of 2
    ranks_2: tl.constexpr,
    choosing_2: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    active += layer * num_experts
    shares += layer * num_experts * num_ranks
    order += layer * num_choosing
    only += layer * num_experts
    output_values += layer * num_experts * num_ranks
    out += layer * num_experts
    expert = tl.arange(0, experts_2)
    rank = tl.arange(0, ranks_2)
    expert_valid, rank_valid = expert < num_experts, rank < num_ranks

    is_active = tl.load(active + expert, mask=expert_valid, other=0) > 0
    value = tl.load(only + expert, mask=expert_valid, other=_SEVERAL_HOSTS)
    tl.store(out + expert, tl.where(is_active, value, -1), mask=expert_valid & (value != _SEVERAL_HOSTS))
    expected = tl.load(
        shares + expert[:, None] * num_ranks + rank[None, :],
        mask=is_active[:, None] & rank_valid[None, :],
        other=0,
    )
    load = tl.sum(tl.maximum(expected, 0), axis=0)

    turn = tl.arange(0, choosing_2)
    chooser = tl.load(order + turn, mask=turn < num_choosing, other=0)
    chooses = (turn < num_choosing) & (tl.load(active + chooser) > 0)
    cell = chooser[:, None] * num_ranks + rank[None, :]
    share = tl.load(shares + cell, mask=(turn < num_choosing)[:, None] & rank_valid[None, :], other=-1)
    before = load[None, :] - tl.cumsum(tl.where(chooses[:, None], tl.maximum(share, 0), 0), axis=0)
    # One number encodes load and rank, so that its minimum is the first of the least loaded ranks.
    alone = tl.where(share < 0, _NOT_A_HOST, before * ranks_2 + rank[None, :])
    keys = alone
    best = tl.min(keys, axis=1)
    num_changed = 1
    while num_changed > 0:
        chosen = ((keys == best[:, None]) & chooses[:, None]).to(tl.int32)
        earlier = tl.cumsum(chosen, axis=0) - chosen
        keys = tl.where(share < 0, _NOT_A_HOST, alone + earlier * (_EXPERT_LOAD * ranks_2))
        last = best
        best = tl.min(keys, axis=1)
        num_changed = tl.sum((best != last).to(tl.int32), axis=0)
    choice = tl.load(output_values + chooser * num_ranks + best % ranks_2, mask=chooses, other=-1)
    tl.store(out + chooser, choice, mask=turn < num_choosing)


class TritonMetro:
    """The plan of N layers on one device, and the kernel's output at a fixed address.

    Args:
        plan: plan of E experts on G ranks.
        device: a GPU, or the CPU in Triton's interpreter.
        output_values: int[N, E, G], the value that each choice puts out, such as the rank's physical slot;
            None: the rank.
    """

    def __init__(
        self, plan: MetroPlan, device: torch.device | str, *, output_values: ArrayLike | None = None
    ) -> None:
        layers, experts, ranks = plan.shares.shape
        values = np.broadcast_to(
            np.arange(ranks) if output_values is None else np.asarray(output_values), plan.shares.shape
        )
        only = np.take_along_axis(values, plan.shares.argmax(axis=2)[..., None], axis=2)[..., 0]
        only[np.arange(layers)[:, None], plan.order] = _SEVERAL_HOSTS.value

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
        experts_2, ranks_2, choosing_2 = map(triton.next_power_of_2, (experts, ranks, max(choosing, 1)))
        _metro[(len(tokens),)](
            tokens,
            *self._tables,
            self.chosen,
            choosing,
            experts,
            ranks,
            experts_2,
            ranks_2,
            choosing_2,
            num_warps=num_warps(choosing_2 * ranks_2),
        )
        return self.chosen


def num_warps(size: int) -> int:
    """Return the warps for a tile of this size, a power of 2, so that its values fit into registers."""
    return min(max(size // 512, 1), 16)
