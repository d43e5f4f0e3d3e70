"""METRO in PyTorch, for CPUs and for GPUs without Triton; bitwise equal to `MetroPlan.route`.

In the greedy algorithm each choice depends on the loads after the previous choices. Here all experts choose
at once, from estimates of the previous choices, and choose again until no choice changes. A choice is
final once all choices before it are final, so the fixed point is the greedy result. It takes some ten rounds
instead of one step per expert.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from eldr_serve.experts.parallel.metro import EXPERT_LOAD, MetroPlan

_NOT_A_HOST = 1 << 30  # value larger than any load


class TorchMetro:
    """The plan of N layers on one device.

    Args:
        plan: plan of E experts on G ranks.
        device: device of the tokens.
        output_values: int[N, E, G], the value that each choice puts out, such as the rank's physical slot;
            None: the rank.
    """

    def __init__(
        self, plan: MetroPlan, device: torch.device | str = "cpu", *, output_values: ArrayLike | None = None
    ) -> None:
        shares, order = torch.from_numpy(plan.shares), torch.from_numpy(plan.order.copy())
        ranks = shares.shape[2]
        # One number encodes load and rank, so that its minimum is the first of the least loaded ranks.
        self._scale = 1 << (ranks - 1).bit_length()
        chosen = shares.gather(1, order[..., None].expand(-1, -1, ranks)).mT
        rank = torch.arange(ranks, dtype=torch.int32)
        self._order = order.to(device)
        self._only_rank = torch.from_numpy(np.argmax(plan.shares, axis=2)).to(device)
        self._fair_shares = shares.clamp(min=0).double().to(device)  # [N, E, G]; exact in double
        self._expected = (self._scale * chosen.clamp(min=0)).int().to(device)  # [N, G, M]
        self._output_values = (
            None if output_values is None else torch.as_tensor(np.array(output_values), device=device)
        )
        self.chosen = torch.full(shares.shape[:2], -1, dtype=torch.int32, device=device)
        self._key = torch.where(chosen < 0, _NOT_A_HOST, rank[:, None]).int().to(device)

    def route(self, tokens: Tensor) -> Tensor:
        """Fill and return `chosen`, int32[N, E]: the output value of each expert's choice; -1 where inactive.

        Args:
            tokens: int[N, E], above 0 where the batch has tokens for the expert. Experts without a host must
                have none; this is not checked.
        """
        active = tokens > 0
        choosing = active.gather(1, self._order)[:, None].int()
        load = self._scale * (active[:, None].double() @ self._fair_shares).mT.int()
        alone = self._key + load - (self._expected * choosing).cumsum(2, dtype=torch.int32)
        earlier = torch.zeros_like(alone)  # earlier experts' choices of each rank
        keys, best = alone, alone.amin(1, keepdim=True)
        while True:
            taken = (keys == best) * choosing
            torch.cumsum(taken[..., :-1], 2, dtype=torch.int32, out=earlier[..., 1:])
            keys = torch.add(alone, earlier, alpha=self._scale * EXPERT_LOAD)
            last, best = best, keys.amin(1, keepdim=True)
            if self.is_final(best, last):
                break
        rank = self._only_rank.scatter(1, self._order, (best[:, 0] % self._scale).long())
        choice = (
            rank if self._output_values is None else self._output_values.gather(2, rank[..., None])[..., 0]
        )
        return self.chosen.copy_(choice).masked_fill_(~active, -1)

    def is_final(self, best: Tensor, last: Tensor) -> bool:
        """Return whether a round has changed no choice."""
        return torch.equal(best, last)
