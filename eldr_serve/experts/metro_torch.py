"""METRO's greedy on tensors, for CPUs and for GPUs without Triton: bit for bit as `MetroPlan.route`.

The greedy is a recurrence: expert after expert, each looks at the loads that its predecessors left. Here
all experts choose at once from a guess of their predecessors' choices, and again from those, until nothing
changes. A choice is final once all before it are, so the fixed point is the greedy's and no other; it
comes after some ten rounds rather than one turn an expert.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eldr_serve.experts.replica_routing import UNIT, MetroPlan

_NEVER = 1 << 30  # above any load


class TorchMetro:
    """A plan's layers N, held on one device.

    Args:
        plan: of E experts on G ranks.
        device: where tokens will be.
    """

    def __init__(self, plan: MetroPlan, device: torch.device | str = "cpu") -> None:
        shares, order = torch.from_numpy(plan.shares), torch.from_numpy(plan.order.copy())
        ranks = shares.shape[2]
        # Load and rank in one number, so that the smallest is the first of the least loaded.
        self._scale = 1 << (ranks - 1).bit_length()
        chosen = shares.gather(1, order[..., None].expand(-1, -1, ranks)).mT
        rank = torch.arange(ranks, dtype=torch.int32)
        self._order = order.to(device)
        self._only_rank = torch.from_numpy(np.argmax(plan.shares, axis=2)).to(device)
        self._start = shares.clamp(min=0).double().to(device)  # [N, E, G]; products of doubles are exact
        self._expected = (self._scale * chosen.clamp(min=0)).int().to(device)  # [N, G, M]
        self._key = torch.where(chosen < 0, _NEVER, rank[:, None]).int().to(device)

    def route(self, tokens: Tensor) -> Tensor:
        """int64[N, E] rank of each expert of tokens int[N, E]; -1 where it has none.

        Experts without a host must have no tokens: nothing is checked, since nothing may wait for a device.
        """
        wanted = tokens > 0
        choosing = wanted.gather(1, self._order)[:, None].int()
        load = self._scale * (wanted[:, None].double() @ self._start).mT.int()
        alone = self._key + load - (self._expected * choosing).cumsum(2, dtype=torch.int32)
        earlier = torch.zeros_like(alone)  # experts on each rank by those before
        keys, best = alone, alone.amin(1, keepdim=True)
        while True:
            taken = (keys == best) * choosing
            torch.cumsum(taken[..., :-1], 2, dtype=torch.int32, out=earlier[..., 1:])
            keys = torch.add(alone, earlier, alpha=self._scale * UNIT)
            last, best = best, keys.amin(1, keepdim=True)
            if torch.equal(best, last):
                break
        rank = self._only_rank.scatter(1, self._order, (best[:, 0] % self._scale).long())
        return rank.masked_fill_(~wanted, -1)
