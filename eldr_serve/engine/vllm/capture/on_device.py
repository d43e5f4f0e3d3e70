"""Capture of experts with tensors on the model's device: a GPU, or the CPU of a compiled model.

This module runs in vLLM's workers. No step waits for it, because the host knows all sizes, and because the
results are copied to the host asynchronously.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eldr_serve.engine.vllm.capture.block_counts import BlockExpertCounts
from eldr_serve.engine.vllm.capture.expert_capture import ExpertCapture, MoeRouter
from eldr_serve.engine.vllm.capture.host_copy import HostCopy, to_device


class DeviceCapture(ExpertCapture):
    """Capture on the device.

    The hooks only copy into a fixed buffer, so that they can be part of a CUDA graph; all counting runs
    after the forward.

    Args:
        routers: see ExpertCapture.
        max_tokens: maximum number of tokens in a step, including padding.
        device, num_blocks, block_size, reports: see ExpertCapture.
    """

    def __init__(
        self,
        routers: Sequence[MoeRouter],
        *,
        max_tokens: int,
        device: torch.device | str,
        num_blocks: int | None,
        block_size: int,
        reports: bool = True,
    ) -> None:
        super().__init__(
            routers, device=device, num_blocks=num_blocks, block_size=block_size, reports=reports
        )
        shape = (self.num_layers, max_tokens, self.top_k)
        self._buffer = torch.zeros(shape, dtype=torch.int16, device=device)
        self._layers: tuple[Tensor, ...] = ()  # views of the buffer by layer, with the size of the last batch
        self._width = -1

    def store_choices(self, layer: int, experts: Tensor) -> None:
        if len(experts) != self._width:
            self._width = len(experts)
            self._layers = self._buffer[:, : self._width].unbind()
        if experts.shape[1] > self.top_k:
            experts = experts[:, : self.top_k]
        self._layers[layer].copy_(experts)

    def _record(self, cache: BlockExpertCounts, slots: Tensor, new_blocks: list[int]) -> None:
        cache.record(slots, self._choices(len(slots)), to_device(new_blocks, slots.device))

    def _prompt_counts(self, cache: BlockExpertCounts, blocks: list[int]) -> HostCopy:
        return self._copies.start(cache.total(to_device(blocks, cache.rows.device)))

    def _choices(self, tokens: int) -> Tensor:
        return self._buffer[:, :tokens]

    def _choices_at(self, selected: list[int], slots: Tensor, choices: Tensor) -> HostCopy:
        by_slot = slots.argsort()
        tokens = by_slot[torch.searchsorted(slots[by_slot], to_device(selected, slots.device))]
        return self._copies.start(choices[:, tokens].transpose(0, 1))
