"""The connector's worker side, in each of vLLM's workers.

It counts the experts of each step after the forward, measures the step, and keeps the list of abandoned
prompts.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig

from eldr_serve.engine.abandoned import AbandonedPrompts
from eldr_serve.engine.vllm.capture.expert_capture import ExpertCapture
from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
from eldr_serve.engine.vllm.capture.on_host import HostCapture
from eldr_serve.engine.vllm.compat.checked import SUPPORTED_VLLM, UnsupportedEngineError
from eldr_serve.engine.vllm.compat.engine import model_runner
from eldr_serve.engine.vllm.compat.kv_cache import CountedGroup, forward_slots, graph_slots
from eldr_serve.engine.vllm.compat.moe import moe_routers
from eldr_serve.engine.vllm.compat.nixl import get_tensor_model_parallel_rank
from eldr_serve.engine.vllm.kv.metadata import EldrConnectorMetadata, StepCounts, StepPlan
from eldr_serve.engine.vllm.stats import EldrStats
from eldr_serve.engine.vllm.step_timer import StepTimer


class EldrConnectorWorker:
    """The worker side of EldrConnector.

    Args:
        vllm_config: configuration of the engine.
        kv_group: the group of the KV cache in whose blocks tokens are counted.
        num_blocks: number of blocks of the KV cache.

    Attributes:
        capture, timer: set when vLLM has allocated the KV cache.
        abandoned: prompts whose blocks no decode engine will read.
    """

    def __init__(self, vllm_config: VllmConfig, kv_group: CountedGroup, num_blocks: int) -> None:
        self.capture: ExpertCapture | None = None
        self.timer: StepTimer | None = None
        self.abandoned = AbandonedPrompts()
        self._vllm_config = vllm_config
        self._kv_group = kv_group
        self._num_blocks = num_blocks
        kv_role = vllm_config.kv_transfer_config.kv_role
        self._is_decode_only = kv_role == "kv_consumer"
        # Key of the prompt tokens in a step's record (see EldrStats). A prefill engine records no steps.
        self._prompt_key = {"kv_both": "prompt_tokens", "kv_consumer": "local_prompt_tokens"}.get(kv_role)
        # All ranks of tensor parallelism choose the same experts, so only the first one reports.
        self._reports = get_tensor_model_parallel_rank() == 0
        self._plan = StepPlan()  # plan of the current step
        self._kv_slots: Tensor | None = None  # int64[T], KV slots of the step's tokens
        self._counts = StepCounts()  # counts of the newest step, until they are taken
        self._stats = EldrStats()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Set the hooks on the model's routers, and allocate the expert counts beside the KV cache."""
        device = next(iter(kv_caches.values())).device
        routers = [router for _, router in moe_routers(self._vllm_config)]
        cache: dict[str, Any] = {
            # Prefill engines have counted a decode engine's prompts, so it needs no counts of blocks.
            "num_blocks": None if self._is_decode_only else self._num_blocks,
            "block_size": self._kv_group.block_size,
            "reports": self._reports,
        }
        if can_count_on_host(device, self._vllm_config):
            self.capture = HostCapture(routers, **cache)
        else:
            scheduler = self._vllm_config.scheduler_config
            graphs = self._vllm_config.compilation_config.cudagraph_capture_sizes or []
            max_tokens = max([scheduler.max_num_batched_tokens, scheduler.max_num_seqs, *graphs])
            self.capture = DeviceCapture(routers, max_tokens=max_tokens, device=device, **cache)
        self.timer = StepTimer(device)

    def start_step(self, metadata: EldrConnectorMetadata) -> None:
        """Take the plan of the step that begins now."""
        self._plan = metadata.plan
        self.abandoned.hold(metadata.held_prompts)
        self._kv_slots = forward_slots(self._kv_group.layer)
        if self.timer is not None:
            self.timer.begin()

    def start_load_kv(self, arguments: dict[str, Any]) -> None:
        """Find the step's KV slots in vLLM's arguments of `start_load_kv`, if they are not yet known."""
        if self._kv_slots is None:
            self._kv_slots = graph_slots(arguments, self._kv_group.layer)

    def finish_forward(self) -> None:
        """Record the end of the step's forward."""
        if self.timer is not None:
            self.timer.stop()

    def count_step(self) -> None:
        """Count the step whose forward has just run, and record its size and time.

        Raises:
            UnsupportedEngineError: the KV slots of its tokens are unknown.
        """
        plan, slots = self._plan, self._kv_slots
        if plan.tokens == 0:
            return
        if self.capture is None or self.timer is None or slots is None or len(slots) < plan.tokens:
            raise UnsupportedEngineError(
                f"{model_runner(self._vllm_config)} ran {plan.tokens} tokens without giving the ELDR "
                "connector their KV slots, so their experts cannot be counted; the connector supports vLLM "
                f"{SUPPORTED_VLLM}"
            )
        self.timer.stop()
        started_at_s = time.perf_counter()
        counts, active = self.capture.count_last_step(slots, plan)
        if not self._reports:
            return
        self._counts = counts
        self._stats.data["capture_s"].append(time.perf_counter() - started_at_s)
        size = {"requests": plan.requests, "kv_tokens": plan.kv_tokens}
        if active is not None:
            self.timer.finish(size, active)
        elif plan.prompt_tokens and self._prompt_key is not None:
            self.timer.finish(size | {self._prompt_key: plan.prompt_tokens}, None)

    def take_counts(self) -> StepCounts | None:
        """Return the counts of the step that `count_step` has just counted; None if the step has none."""
        counts, self._counts = self._counts, StepCounts()
        return counts if counts.prompts or counts.routes is not None else None

    def take_stats(self, transfers: Any) -> EldrStats | None:
        """Return the stats since the last call; None if there are none.

        Args:
            transfers: NIXL's stats, or None.
        """
        stats, self._stats = self._stats, EldrStats()
        if self.timer is not None:
            for record in self.timer.take_completed():
                stats.data["steps" if "active_by_layer" in record else "prompt_steps"].append(record)
        if transfers is not None and not transfers.is_empty():
            stats.data["nixl"] = transfers.data
        return None if stats.is_empty() else stats


def can_count_on_host(device: torch.device, vllm_config: VllmConfig) -> bool:
    """Return whether HostCapture is exact: the model runs on a CPU, and is not compiled."""
    return device.type == "cpu" and bool(vllm_config.model_config.enforce_eager)
