"""The worker's part: count the experts that each step's tokens chose, after the forward."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eldr_serve.engine.vllm.block_counts import BlockExpertCounts, active_experts
from eldr_serve.engine.vllm.host_copy import HostCopies, HostCopy, to_device


class MoeRouter(Protocol):
    """The part of vLLM's BaseRouter that is used here."""

    top_k: int
    global_num_experts: int

    def set_capture_fn(self, capture_fn: Callable[[Tensor], None] | None) -> None: ...


@dataclass
class StepPlan:
    """The scheduler's instructions for one step, besides the transfer itself.

    Attributes:
        begun: ids of the KV blocks whose first slot is written in this step.
        finished_prompts: request id -> KV block ids of its prompt, for prompts whose prefill ends here.
        traced: request id -> position of the first token generated in this step, and the KV slots of all
            tokens generated in it, for requests whose decode experts are counted.
        requests, tokens, kv_tokens: size of the step, and number of KV tokens that it attends to.
        drafts: how many of the tokens are drafts to be verified (speculative decoding).
    """

    begun: list[int] = field(default_factory=list)
    finished_prompts: dict[str, list[int]] = field(default_factory=dict)
    traced: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    drafts: int = 0

    @property
    def is_decode(self) -> bool:
        """Return whether this is a pure decode step: one token per request, and drafts after it."""
        return self.tokens - self.drafts == self.requests > 0

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens beyond one per request: parts of prompts."""
        return max(0, self.tokens - self.drafts - self.requests)


@dataclass
class StepRoutes:
    """The experts that the traced tokens of one step chose.

    Attributes:
        num_experts: number of experts in a layer.
        tokens: request id -> position of its first token, and number of its tokens in `chosen`.
        chosen: int16[tokens,L,k], the tokens of one request after those of another.
    """

    num_experts: int
    tokens: dict[str, tuple[int, int]]
    chosen: HostCopy

    def by_request(self) -> Iterator[tuple[str, int, NDArray[np.int16]]]:
        """Yield each request's id, the position of its first token, and its part of `chosen`."""
        chosen, start = self.chosen.wait(), 0
        for request, (first, tokens) in self.tokens.items():
            yield request, first, chosen[start : start + tokens]
            start += tokens


@dataclass
class StepCounts:
    """The results of one step: prompt counts int32[L,E] by request id, and routes of traced tokens."""

    prompts: dict[str, HostCopy] = field(default_factory=dict)
    routes: StepRoutes | None = None


class ExpertCapture:
    """Hooks on the MoE routers, and the cache of expert counts that they fill.

    The hooks only copy into a fixed buffer, so that they can be part of a CUDA graph; all counting runs
    after the forward, on the device, and no step waits for it.

    Args:
        routers: one per MoE layer, ascending by layer.
        max_tokens: maximum number of tokens in a step, including padding.
        device: device of the KV cache.
        num_blocks, block_size: sizes of the KV cache; num_blocks is None if no counts are needed
            (decode).
        reports: whether counts leave the device. Ranks of tensor parallelism choose the same experts, so
            only the first one reports.
        on_host: the device is the host, and no router's tensor is overwritten after its hook has run, which
            holds if the model is not compiled. Then choices are not copied, and are counted without torch.
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
        on_host: bool = False,
    ) -> None:
        first = routers[0]
        if any((r.top_k, r.global_num_experts) != (first.top_k, first.global_num_experts) for r in routers):
            raise ValueError("the MoE layers differ in experts or top-k; expert counts need them equal")
        self.num_layers, self.num_experts, self.top_k = len(routers), first.global_num_experts, first.top_k
        self._referenced: list[Tensor] = [torch.zeros((0, self.top_k), dtype=torch.int32)] * self.num_layers
        shape = (self.num_layers, 0 if on_host else max_tokens, self.top_k)
        self._chosen = torch.zeros(shape, dtype=torch.int16, device=device)
        self.cache = (
            BlockExpertCounts(num_blocks, block_size, self.num_layers, self.num_experts, device)
            if num_blocks is not None
            else None
        )
        self._copies = HostCopies(device)
        self._reports = reports
        self._layers: tuple[Tensor, ...] = ()  # views of `_chosen` by layer, with the size of the last batch
        self._width = -1
        self._on_host = on_host
        if on_host and self.cache is not None:  # compile the loop now rather than with the first prompt
            self.cache.record_on_host(torch.zeros(0, dtype=torch.int64), self._referenced, self.top_k, [])
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._reference if on_host else self._copy, layer))

    def _reference(self, layer: int, experts: Tensor) -> None:
        self._referenced[layer] = experts

    def _copy(self, layer: int, experts: Tensor) -> None:
        if len(experts) != self._width:
            self._width = len(experts)
            self._layers = self._chosen[:, : self._width].unbind()
        if experts.shape[1] > self.top_k:  # followed by shared experts, which all tokens use
            experts = experts[:, : self.top_k]
        self._layers[layer].copy_(experts)

    def after_forward(self, slots: Tensor, plan: StepPlan) -> tuple[StepCounts, HostCopy | None]:
        """Count the step that has just run.

        Args:
            slots: int64[T], KV slot of each token, then padding.
            plan: the step's plan.

        Returns:
            The counts that the plan requests, and the active experts int64[L] of a pure decode step.
        """
        slots, counts = slots[: plan.tokens], StepCounts()
        if self.cache is not None and self._on_host:
            self.cache.record_on_host(slots, self._referenced, self.top_k, plan.begun)
        elif self.cache is not None:
            self.cache.record(slots, self._chosen[:, : plan.tokens], to_device(plan.begun, slots.device))
        if not self._reports:
            return counts, None
        if self.cache is not None and self._on_host:
            for request, blocks in plan.finished_prompts.items():
                counts.prompts[request] = HostCopy(self.cache.total_on_host(blocks))
        elif self.cache is not None:
            for request, blocks in plan.finished_prompts.items():
                total = self.cache.total(to_device(blocks, slots.device))
                counts.prompts[request] = self._copies.start(total)
        if not plan.traced and not plan.is_decode:
            return counts, None
        chosen = self._chosen[:, : plan.tokens]
        if self._on_host:
            shown = [experts[: plan.tokens, : self.top_k] for experts in self._referenced]
            chosen = torch.stack(shown).to(torch.int16)
        if plan.traced:
            counts.routes = self._routes(slots, chosen, plan.traced)
        if not plan.is_decode:
            return counts, None
        return counts, self._copies.start(active_experts(chosen, self.num_experts))

    def _routes(self, slots: Tensor, chosen: Tensor, traced: dict[str, tuple[int, list[int]]]) -> StepRoutes:
        """Gather the routes of all traced requests at once: the cost hardly depends on their number."""
        wanted = [slot for _, of_request in traced.values() for slot in of_request]
        if self._on_host:  # for few tokens numpy is twice as fast as torch
            held = slots.numpy()
            order = held.argsort()
            rows = order[held[order].searchsorted(wanted)]
            copy = HostCopy(chosen.numpy()[:, rows].swapaxes(0, 1))
        else:
            by_slot = slots.argsort()
            on_device = by_slot[torch.searchsorted(slots[by_slot], to_device(wanted, slots.device))]
            copy = self._copies.start(chosen[:, on_device].transpose(0, 1))
        tokens = {request: (first, len(of_request)) for request, (first, of_request) in traced.items()}
        return StepRoutes(self.num_experts, tokens, copy)


class StepTimer:
    """Measures the time from the start of a step in the worker to the end of its forward, s.

    On CPU the forward has ended when it returns, and thread time is measured: engines may share cores, and
    the work of others is no cost of this step. (Wall time would also grow with the number of requests on
    the machine, and a fit would attribute that to the requests of the step.) On CUDA the forward has only
    been launched, so CUDA events are recorded, and a step's time is known one or more steps later.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._start: Any = None
        self._end: Any = None
        self._waiting: deque[tuple[Any, Any, HostCopy | None, dict[str, int]]] = deque()

    def begin(self) -> None:
        """Record the start of a step."""
        self._start, self._end = self._now(), None

    def stop(self) -> None:
        """Record the end of the step's forward; only the first call in a step counts.

        Model Runner V2 reports the end (`finish_forward`), since sampling comes before `wait_for_save`. V1
        does not, but runs nothing between the forward and `wait_for_save`.
        """
        if self._end is None:
            self._end = self._now()

    def finish(self, record: dict[str, int], active: HostCopy | None) -> None:
        """Store the record of the step just stopped, and its active experts int64[L] if counted."""
        self._waiting.append((self._start, self._end, active, record))

    def known(self) -> list[dict[str, Any]]:
        """Return the records of steps whose time and experts have become available; each only once."""
        found = []
        while self._waiting and self._ready(*self._waiting[0][1:3]):
            start, end, active, record = self._waiting.popleft()
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            made: dict[str, Any] = record | {"seconds": seconds}
            if active is not None:
                by_layer = active.wait().tolist()
                made |= {"active_experts": sum(by_layer) / len(by_layer), "active_by_layer": by_layer}
            found.append(made)
        return found

    def _ready(self, end: Any, active: HostCopy | None) -> bool:
        if active is not None:
            return active.ready
        return not self._cuda or bool(end.query())

    def _now(self) -> Any:
        if not self._cuda:
            return time.thread_time()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
