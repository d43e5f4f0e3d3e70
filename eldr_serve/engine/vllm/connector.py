"""The KV connector: NIXL's pull connector, which also returns expert counts in `kv_transfer_params`.

Load it with `kv_connector="EldrConnector", kv_connector_module_path="eldr_serve.engine.vllm.connector"`
(see eldr_serve.engine.vllm.config). Roles: kv_producer (prefill), kv_consumer (decode), kv_both
(calibration, and whole engines, which prefill and decode); kv_both transfers nothing and runs without NIXL.

In each step, the scheduler half lists the prompts that end in it and their blocks (`build_connector_meta`).
The worker half counts after the forward (`get_transfer_results`) and returns the sums
(`build_connector_worker_meta`). The scheduler stores them before it finishes requests
(eldr_serve.engine.vllm.scheduler), and `request_finished` adds them to the answer. A whole engine's answer
comes much later, so its sums are sent at once, with the stats (`take_prompt_counts`).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from eldr_serve.engine.abandoned import AbandonedPrompts
from eldr_serve.engine.keys import CALIBRATE, EXPERT_COUNTS, REQUEST, ROUTES
from eldr_serve.engine.vllm.capture import ExpertCapture, StepCounts, StepPlan, StepTimer
from eldr_serve.engine.vllm.compat.checked import CHECKED, UnsupportedEngineError
from eldr_serve.engine.vllm.compat.engine import check_engine, model_runner
from eldr_serve.engine.vllm.compat.kv_cache import counted_group, forward_slots, graph_slots
from eldr_serve.engine.vllm.compat.moe import moe_routers
from eldr_serve.engine.vllm.compat.nixl import (
    NixlConnectorMetadata,
    NixlPullConnector,
    WithoutTransfers,
    check_side_channel,
    clear_refusal,
    expire_send_leases,
    get_tensor_model_parallel_rank,
    kept_affinity,
    polled_nixl,
    side_channel_stopped,
)
from eldr_serve.engine.vllm.measured import PromptCounts
from eldr_serve.engine.vllm.stats import EldrPromMetrics, EldrStats
from eldr_serve.engine.vllm.tracked_request import RouteCounts, TrackedRequest
from eldr_serve.experts.signature import pack_counts

logger = logging.getLogger(__name__)


class EldrMetadata(NixlConnectorMetadata):
    """The message from the scheduler to the workers: NIXL's part, the step's plan, and finished prompts."""

    plan: StepPlan
    held: dict[str, str]  # engine's id -> caller's name, of finished prompts whose blocks are held


@dataclass
class EldrWorkerMetadata(KVConnectorWorkerMetadata):
    """The message from the first worker to the scheduler."""

    counts: StepCounts

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


class EldrConnector(NixlPullConnector):
    """NIXL pull connector that also counts experts."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_engine(vllm_config)
        self.counted = counted_group(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._is_consumer_only = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        self._is_producer_only = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._is_whole = vllm_config.kv_transfer_config.kv_role == "kv_both"
        if self._is_whole:
            super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
            half: Any = WithoutTransfers()
            self.connector_scheduler = half if role == KVConnectorRole.SCHEDULER else None
            self.connector_worker = half if role == KVConnectorRole.WORKER else None
        else:
            with clear_refusal(), polled_nixl(), kept_affinity():
                super().__init__(vllm_config, role, kv_cache_config)
        self._drafts = vllm_config.speculative_config is not None
        self._warned_of_cut = False
        # scheduler half
        self._tracked: dict[str, TrackedRequest] = {}
        self._requests: dict[str, Any] = {}
        self._held: dict[str, str] = {}  # see EldrMetadata.held; since the last step
        self._handshake: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
        self._prompt_counts: dict[str, PromptCounts] = {}  # of a whole engine, by callers' names; until taken
        # worker half
        self._capture: ExpertCapture | None = None
        self._timer: StepTimer | None = None
        self._slots: Tensor | None = None  # int64[T], KV slots of the current step
        self._counts = StepCounts()
        self._stats = EldrStats()
        self._abandoned = AbandonedPrompts()

    # -- scheduler half ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if isinstance(self.connector_scheduler, WithoutTransfers):
            return  # no other engine will connect
        check_side_channel(self.connector_scheduler)
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self._handshake = metadata

    def _watch_side_channel(self) -> None:
        """Restart vLLM's listener if it has stopped: one malformed packet to its port ends it."""
        if self._handshake and side_channel_stopped(self.connector_scheduler):
            logger.warning("NIXL's side channel had stopped listening; restarting it")
            try:
                self.set_xfer_handshake_metadata_pp_aware(self._handshake)
            except UnsupportedEngineError:  # the next request tries again
                logger.exception("NIXL's side channel does not start")

    def on_new_request(self, request: Any) -> None:
        self._watch_side_channel()
        if request.prompt_token_ids is not None:
            # NIXL shortens prompts of recurrent models in place; in one process the answer shares the list.
            request.prompt_token_ids = list(request.prompt_token_ids)
        super().on_new_request(request)
        self._limit_to_one_token(request)
        params = request.kv_transfer_params or {}
        self._requests[request.request_id] = request
        # Otherwise rejected drafts would be counted as decode steps.
        calibrate = bool(params.get(CALIBRATE)) and not self._drafts
        if calibrate or params.get("do_remote_decode") or REQUEST in params:
            routes = bool(params.get(ROUTES))
            decode = RouteCounts(request.num_prompt_tokens, keep=routes) if calibrate else None
            self._tracked[request.request_id] = TrackedRequest(request, routes, decode)

    def _limit_to_one_token(self, request: Any) -> None:
        """On a prefill engine with a drafter, end answers before a rejected draft could be counted."""
        if not self._drafts or not self._is_producer_only or request.max_tokens <= 1:
            return
        if not self._warned_of_cut:
            self._warned_of_cut = True
            logger.warning(
                "this prefill engine has a drafter, whose rejected tokens would be counted: answers are cut "
                "to one token"
            )
        request.max_tokens = 1

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = EldrMetadata()
        meta.__dict__.update(super().build_connector_meta(scheduler_output).__dict__)
        meta.plan = self._plan(scheduler_output)
        meta.held, self._held = self._held, {}
        return meta

    def _plan(self, scheduler_output: Any) -> StepPlan:
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        plan = StepPlan(requests=len(scheduled), tokens=sum(scheduled.values()), drafts=drafts)
        for request_id, tokens in scheduled.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            before = request.num_computed_tokens
            plan.kv_tokens += before + tokens
            self._plan_begun(plan, request_id, before, before + tokens)
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._plan_tracked(plan, tracked, before, before + tokens)
        return plan

    def _plan_begun(self, plan: StepPlan, request_id: str, before: int, after: int) -> None:
        first, end = -(-before // self.counted.block_size), -(-after // self.counted.block_size)
        if first < end and not self._is_consumer_only:
            plan.begun += self._blocks(request_id)[first:end]

    def _plan_tracked(self, plan: StepPlan, tracked: TrackedRequest, before: int, after: int) -> None:
        request_id, prompt = tracked.request.request_id, tracked.request.num_prompt_tokens
        size = self.counted.block_size
        # After a preemption a prompt may end a second time, in one step with generated tokens: keep the
        # first sum.
        if before < prompt <= after and tracked.prompt_counts is None and not self._is_consumer_only:
            plan.finished_prompts[request_id] = self._blocks(request_id)[: -(-prompt // size)]
        first = max(before, prompt)
        if tracked.decode is not None and first < after:
            # Avoid a list of all block ids in every step: it grows with the context.
            blocks = self._kv_cache_manager.get_blocks(request_id).blocks[self.counted.index]
            slots = [blocks[p // size].block_id * size + p % size for p in range(first, after)]
            plan.traced[request_id] = first, slots

    def _blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self._kv_cache_manager.get_block_ids(request_id)[self.counted.index]
        return blocks

    def take_counts(self, meta: EldrWorkerMetadata) -> None:
        """Store the workers' counts, before the requests of the step are finished."""
        for request_id, counts in meta.counts.prompts.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.prompt_counts is None:
                tracked.prompt_counts = counts.wait()
                self._keep_counts(tracked.request, tracked.prompt_counts)
        routes = meta.counts.routes
        if routes is None:
            return
        for request_id, first, chosen in routes.by_request():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.decode is not None:
                tracked.decode.take(first, chosen, routes.num_experts)

    def _keep_counts(self, request: Any, counts: NDArray[np.int32]) -> None:
        """Keep the expert counts of a prompt that decodes here for `take_prompt_counts`."""
        params = request.kv_transfer_params or {}
        if REQUEST in params and not params.get("do_remote_decode"):
            self._prompt_counts[str(params[REQUEST])] = request.num_prompt_tokens, pack_counts(counts)

    def take_prompt_counts(self) -> dict[str, PromptCounts]:
        """Return the expert counts of prompts prefilled since the last call that decode in this engine.

        Returns:
            Caller's name of the prompt -> its length and packed counts.
        """
        taken, self._prompt_counts = self._prompt_counts, {}
        return taken

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, *super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, *super().request_finished_all_groups(request, block_ids))

    def _finished(
        self, request: Any, delay_free: bool, params: dict[str, Any] | None
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        name = (request.kv_transfer_params or {}).get(REQUEST)
        if delay_free and name is not None:
            self._held[request.request_id] = str(name)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return delay_free, params
        if tracked.decode is not None:
            counts = tracked.decode_answer(prefilled_here=not self._is_consumer_only)
            return delay_free, (params or {}) | counts or None
        if tracked.prompt_counts is not None and params is not None:
            params[EXPERT_COUNTS] = pack_counts(tracked.prompt_counts)
        return delay_free, params

    # -- worker half -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        device = next(iter(kv_caches.values())).device
        scheduler = self._vllm_config.scheduler_config
        graphs = self._vllm_config.compilation_config.cudagraph_capture_sizes or []
        self._capture = ExpertCapture(
            [router for _, router in moe_routers(self._vllm_config)],
            max_tokens=max([scheduler.max_num_batched_tokens, scheduler.max_num_seqs, *graphs]),
            device=device,
            # A decode engine's prompts were counted by prefill engines; no rows are needed here.
            num_blocks=None if self._is_consumer_only else self._kv_cache_config.num_blocks,
            block_size=self.counted.block_size,
            reports=get_tensor_model_parallel_rank() == 0,
            on_host=device.type == "cpu" and self._vllm_config.model_config.enforce_eager,
        )
        self._timer = StepTimer(device)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, EldrMetadata):
            self._abandoned.hold(connector_metadata.held)
        self._slots = forward_slots(self.counted.layer)
        if self._timer is not None:
            self._timer.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._is_whole:
            super().start_load_kv(forward_context, **kwargs)
        if self._slots is None:
            self._slots = graph_slots(kwargs, self.counted.layer)

    def finish_forward(self) -> None:
        super().finish_forward()
        if self._timer is not None:
            self._timer.stop()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        counts, self._counts = self._counts, StepCounts()
        return EldrWorkerMetadata(counts) if counts.prompts or counts.routes is not None else None

    def abandon(self, names: list[str]) -> None:
        """Free the blocks of prompts that no decode engine will read, once these have ended."""
        self._abandoned.abandon(names)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        # Both model runners call this after the forward and before they collect the counts; V1 calls
        # `wait_for_save` later if it drafts tokens (speculative decoding). They also call it after an
        # exception in the forward: then nothing is counted, and that exception must propagate.
        if sys.exc_info()[0] is None:
            self._count()
        # In every step: a decode engine's heartbeat may have extended the lease since the last step.
        expire_send_leases(self.connector_worker, self._abandoned.due())
        results = super().get_transfer_results(finished_req_ids)
        self._abandoned.freed(results.finished_sending)
        return results

    def _count(self) -> None:
        metadata, slots = self._connector_metadata, self._slots
        assert isinstance(metadata, EldrMetadata)
        plan = metadata.plan
        if plan.tokens == 0:
            return
        if self._capture is None or self._timer is None or slots is None or len(slots) < plan.tokens:
            raise UnsupportedEngineError(
                f"{model_runner(self._vllm_config)} ran {plan.tokens} tokens without giving the ELDR "
                f"connector their KV slots, so their experts cannot be counted; it was checked on {CHECKED}"
            )
        self._timer.stop()
        start = time.perf_counter()
        counts, active = self._capture.after_forward(slots, plan)
        if get_tensor_model_parallel_rank() != 0:
            return  # all ranks choose the same experts, so only the first one reports
        self._counts = counts
        self._stats.data["capture_s"].append(time.perf_counter() - start)
        size = {"requests": plan.requests, "kv_tokens": plan.kv_tokens}
        if active is not None:
            self._timer.finish(size, active)
        elif plan.prompt_tokens and self._is_whole:
            self._timer.finish(size | {"prompt_tokens": plan.prompt_tokens}, None)

    # -- stats -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> EldrStats | None:
        nixl = super().get_kv_connector_stats()
        stats, self._stats = self._stats, EldrStats()
        if self._timer is not None:
            for record in self._timer.known():
                stats.data["prompt_steps" if "prompt_tokens" in record else "steps"].append(record)
        if nixl is not None and not nixl.is_empty():
            stats.data["nixl"] = nixl.data
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EldrStats:
        return EldrStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> EldrPromMetrics:
        return EldrPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
