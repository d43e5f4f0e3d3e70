"""Capture of the experts that tokens choose: hooks on the routers, and counts after each forward.

This module, which runs in vLLM's workers, assembles the counts that the scheduler requests; `on_device`
counts with tensors on the device, and `on_host` in host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from eldr_serve.engine.vllm.capture.block_counts import BlockExpertCounts, active_experts
from eldr_serve.engine.vllm.capture.host_copy import HostCopies, HostCopy
from eldr_serve.engine.vllm.kv.metadata import StepCounts, StepPlan, StepRoutes


class MoeRouter(Protocol):
    """The part of vLLM's BaseRouter that is used here."""

    top_k: int
    global_num_experts: int

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None] | None) -> None: ...


class ExpertCapture(ABC):
    """Hooks on the MoE routers, and the cache of expert counts that they fill.

    Args:
        routers: one per MoE layer, ascending by layer.
        device: device of the KV cache.
        num_blocks, block_size: sizes of the KV cache; num_blocks is None if no counts are needed
            (decode).
        reports: whether counts leave the device. Ranks of tensor parallelism choose the same experts, so
            only the first one reports.

    Attributes:
        cache: expert counts of each KV block, or None.
    """

    def __init__(
        self,
        routers: Sequence[MoeRouter],
        *,
        device: torch.device | str,
        num_blocks: int | None,
        block_size: int,
        reports: bool = True,
    ) -> None:
        first = routers[0]
        if any((r.top_k, r.global_num_experts) != (first.top_k, first.global_num_experts) for r in routers):
            raise ValueError("the MoE layers differ in experts or top-k; expert counts need them equal")
        self.num_layers, self.num_experts, self.top_k = len(routers), first.global_num_experts, first.top_k
        self.cache = (
            BlockExpertCounts(num_blocks, block_size, self.num_layers, self.num_experts, device)
            if num_blocks is not None
            else None
        )
        self._copies = HostCopies(device)
        self._reports = reports
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self.store_choices, layer))

    def count_last_step(self, slots: Tensor, plan: StepPlan) -> tuple[StepCounts, HostCopy | None]:
        """Count the step that has just run.

        Args:
            slots: int64[T], KV slot of each token, then padding.
            plan: the step's plan.

        Returns:
            The counts that the plan requests, and the active experts int64[L] of a pure decode step.
        """
        slots, counts = slots[: plan.tokens], StepCounts()
        if self.cache is not None:
            self._record(self.cache, slots, plan.new_blocks)
        if not self._reports:
            return counts, None
        if self.cache is not None:
            for request, blocks in plan.finished_prompts.items():
                counts.prompts[request] = self._prompt_counts(self.cache, blocks)
        if not plan.decode_slots and not plan.is_decode:
            return counts, None
        choices = self._choices(plan.tokens)
        if plan.decode_slots:
            # Gather the routes of all requests at once: the cost hardly depends on their number.
            decode_slots = [slot for _, own_slots in plan.decode_slots.values() for slot in own_slots]
            routes = self._choices_at(decode_slots, slots, choices)
            tokens = {name: (first, len(own)) for name, (first, own) in plan.decode_slots.items()}
            counts.routes = StepRoutes(self.num_experts, tokens, routes)
        if not plan.is_decode:
            return counts, None
        return counts, self._copies.start(active_experts(choices, self.num_experts))

    @abstractmethod
    def store_choices(self, layer: int, experts: Tensor) -> None:
        """Store a layer's choices int[T,k]; the hook that a router calls in each forward.

        The tensor has more columns if shared experts, which all tokens use, follow the chosen experts.
        """

    @abstractmethod
    def _record(self, cache: BlockExpertCounts, slots: Tensor, new_blocks: list[int]) -> None:
        """Add the stored choices of the tokens at these KV slots int64[T]; see BlockExpertCounts.record."""

    @abstractmethod
    def _prompt_counts(self, cache: BlockExpertCounts, blocks: list[int]) -> HostCopy:
        """Return int32[L,E], the counts of all tokens in these KV blocks."""

    @abstractmethod
    def _choices(self, tokens: int) -> Tensor:
        """Return int16[L,T,k], the stored choices of the step's tokens, without padding."""

    @abstractmethod
    def _choices_at(self, selected: list[int], slots: Tensor, choices: Tensor) -> HostCopy:
        """Return int16[n,L,k], the choices of the tokens at the n selected of the KV slots int64[T]."""
