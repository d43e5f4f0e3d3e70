"""Capture of experts in host memory, for models on CPUs that are not compiled.

It runs in vLLM's workers. For the few tokens of a CPU's step, one compiled loop and numpy are faster than a
dozen torch operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eldr_serve.engine.vllm.capture.block_counts import BlockExpertCounts
from eldr_serve.engine.vllm.capture.expert_capture import ExpertCapture, MoeRouter
from eldr_serve.engine.vllm.capture.host_copy import HostCopy


class HostCapture(ExpertCapture):
    """Capture in host memory.

    The hooks keep the routers' own tensors, which is exact because a model that is not compiled overwrites no
    router's tensor after its hook has run.

    Args:
        routers, num_blocks, block_size, reports: see ExpertCapture.
    """

    def __init__(
        self, routers: Sequence[MoeRouter], *, num_blocks: int | None, block_size: int, reports: bool = True
    ) -> None:
        super().__init__(routers, device="cpu", num_blocks=num_blocks, block_size=block_size, reports=reports)
        self._experts: list[Tensor] = [torch.zeros((0, self.top_k), dtype=torch.int32)] * self.num_layers
        if self.cache is not None:  # compile the loop now rather than with the first prompt
            self._record(self.cache, torch.zeros(0, dtype=torch.int64), [])

    def store_choices(self, layer: int, experts: Tensor) -> None:
        self._experts[layer] = experts

    def _record(self, cache: BlockExpertCounts, slots: Tensor, new_blocks: list[int]) -> None:
        rows, slot_array = cache.rows.numpy(), slots.numpy()
        for block in new_blocks:
            rows[block] = 0
        count = _counting_loop()
        for layer, experts in enumerate(self._experts):
            count(rows, slot_array, experts.numpy(), layer, self.top_k, cache.block_size)

    def _prompt_counts(self, cache: BlockExpertCounts, blocks: list[int]) -> HostCopy:
        return HostCopy(cache.rows.numpy()[blocks].sum(0, dtype=np.int32))

    def _choices(self, tokens: int) -> Tensor:
        return torch.stack([experts[:tokens, : self.top_k] for experts in self._experts]).to(torch.int16)

    def _choices_at(self, selected: list[int], slots: Tensor, choices: Tensor) -> HostCopy:
        all_slots = slots.numpy()
        by_slot = all_slots.argsort()
        tokens = by_slot[all_slots[by_slot].searchsorted(selected)]
        return HostCopy(choices.numpy()[:, tokens].swapaxes(0, 1))


@lru_cache
def _counting_loop() -> Any:
    """Return the loop over a layer's tokens, compiled on first use by numba, a dependency of vLLM."""
    from numba import njit

    def count(rows: Any, slots: Any, experts: Any, layer: int, top_k: int, block_size: int) -> None:
        for token in range(len(slots)):
            block = slots[token] // block_size
            for choice in range(top_k):
                rows[block, layer, experts[token, choice]] += 1

    return njit(boundscheck=True)(count)
