"""The connector's scheduler side, in vLLM's engine core.

It plans the counts of each step for the worker, and adds the counts of a request to its answer.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig

from eldr_serve.engine.calls import CALIBRATE_KEY, EXPERT_COUNTS_KEY, REQUEST_KEY, ROUTES_KEY
from eldr_serve.engine.vllm.compat.kv_cache import CountedGroup
from eldr_serve.engine.vllm.kv.metadata import StepCounts, StepPlan
from eldr_serve.engine.vllm.kv.tracked_request import RouteCounts, TrackedRequest
from eldr_serve.engine.vllm.measurements import PromptCounts
from eldr_serve.experts.signature import pack_counts

logger = logging.getLogger(__name__)


class EldrConnectorScheduler:
    """The scheduler side of EldrConnector.

    Args:
        vllm_config: configuration of the engine.
        kv_group: the group of the KV cache in whose blocks tokens are counted.

    Attributes:
        kv_cache_manager: vLLM's KVCacheManager; the scheduler binds it after both have been made.
    """

    kv_cache_manager: Any

    def __init__(self, vllm_config: VllmConfig, kv_group: CountedGroup) -> None:
        kv_role = vllm_config.kv_transfer_config.kv_role
        self._is_prefill_only = kv_role == "kv_producer"
        self._is_decode_only = kv_role == "kv_consumer"
        self._drafts = vllm_config.speculative_config is not None
        self._kv_group = kv_group
        self._requests: dict[str, Any] = {}  # vLLM's objects of all unfinished requests
        self._tracked: dict[str, TrackedRequest] = {}  # the unfinished requests whose experts are counted
        # Prompts whose blocks are held since the last step: engine's id -> caller's name.
        self._held_prompts: dict[str, str] = {}
        self._prompt_counts: dict[str, PromptCounts] = {}  # caller's name of a prompt -> counts
        self._warned_of_limit = False

    def on_new_request(self, request: Any) -> None:
        """Track a request if its experts are to be counted; see eldr_serve.engine.calls."""
        self._limit_to_one_token(request)
        params = request.kv_transfer_params or {}
        self._requests[request.request_id] = request
        # An engine that drafts counts no decode steps, since it would also count rejected drafts.
        calibrate = bool(params.get(CALIBRATE_KEY)) and not self._drafts
        if calibrate or params.get("do_remote_decode") or REQUEST_KEY in params:
            routes = bool(params.get(ROUTES_KEY))
            decode = RouteCounts(request.num_prompt_tokens, keep=routes) if calibrate else None
            self._tracked[request.request_id] = TrackedRequest(request, routes, decode)

    def _limit_to_one_token(self, request: Any) -> None:
        """Cut the answers of a prefill engine with a drafter, before a rejected draft could be counted."""
        if not self._drafts or not self._is_prefill_only or request.max_tokens <= 1:
            return
        if not self._warned_of_limit:
            self._warned_of_limit = True
            logger.warning(
                "this prefill engine has a drafter, whose rejected tokens would be counted: answers are cut "
                "to one token"
            )
        request.max_tokens = 1

    def plan_step(self, scheduler_output: Any) -> StepPlan:
        """Return the plan of a step that vLLM has scheduled."""
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        plan = StepPlan(requests=len(scheduled), tokens=sum(scheduled.values()), drafts=drafts)
        for request_id, tokens in scheduled.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            before = request.num_computed_tokens
            plan.kv_tokens += before + tokens
            self._plan_new_blocks(plan, request_id, before, before + tokens)
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._plan_tracked(plan, tracked, before, before + tokens)
        return plan

    def _plan_new_blocks(self, plan: StepPlan, request_id: str, before: int, after: int) -> None:
        first, end = -(-before // self._kv_group.block_size), -(-after // self._kv_group.block_size)
        if first < end and not self._is_decode_only:
            plan.new_blocks += self._blocks(request_id)[first:end]

    def _plan_tracked(self, plan: StepPlan, tracked: TrackedRequest, before: int, after: int) -> None:
        request_id, prompt = tracked.request.request_id, tracked.request.num_prompt_tokens
        size = self._kv_group.block_size
        # After a preemption a prompt may end a second time, in one step with generated tokens: keep the
        # first sum.
        if before < prompt <= after and tracked.prompt_counts is None and not self._is_decode_only:
            plan.finished_prompts[request_id] = self._blocks(request_id)[: -(-prompt // size)]
        first = max(before, prompt)
        if tracked.decode is not None and first < after:
            # Avoid a list of all block ids in every step: it grows with the context.
            blocks = self.kv_cache_manager.get_blocks(request_id).blocks[self._kv_group.index]
            slots = [blocks[p // size].block_id * size + p % size for p in range(first, after)]
            plan.decode_slots[request_id] = first, slots

    def _blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self.kv_cache_manager.get_block_ids(request_id)[self._kv_group.index]
        return blocks

    def take_held_prompts(self) -> dict[str, str]:
        """Return the prompts whose blocks are held since the last call: engine's id -> caller's name."""
        prompts, self._held_prompts = self._held_prompts, {}
        return prompts

    def take_counts(self, counts: StepCounts) -> None:
        """Store the counts of a step, before its requests are finished."""
        for request_id, copy in counts.prompts.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.prompt_counts is None:
                tracked.prompt_counts = copy.wait()
                self._store_prompt_counts(tracked.request, tracked.prompt_counts)
        if counts.routes is None:
            return
        for request_id, first, chosen in counts.routes.split_by_request():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.decode is not None:
                tracked.decode.add(first, chosen, counts.routes.num_experts)

    def _store_prompt_counts(self, request: Any, counts: NDArray[np.int32]) -> None:
        """Store for `take_prompt_counts` the expert counts of a prompt that decodes in this engine."""
        params = request.kv_transfer_params or {}
        if REQUEST_KEY in params and not params.get("do_remote_decode"):
            self._prompt_counts[str(params[REQUEST_KEY])] = request.num_prompt_tokens, pack_counts(counts)

    def take_prompt_counts(self) -> dict[str, PromptCounts]:
        """Return the expert counts of prompts prefilled since the last call that decode in this engine.

        Returns:
            Caller's name of the prompt -> its length and packed counts.
        """
        prompt_counts, self._prompt_counts = self._prompt_counts, {}
        return prompt_counts

    def request_finished(
        self, request: Any, holds_blocks: bool, params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Stop tracking a request; return the `kv_transfer_params` of its answer, with its counts.

        Args:
            request: vLLM's object for the request.
            holds_blocks: whether its blocks are held for a decode engine.
            params: NIXL's `kv_transfer_params` of the answer.
        """
        self._requests.pop(request.request_id, None)
        name = (request.kv_transfer_params or {}).get(REQUEST_KEY)
        if holds_blocks and name is not None:
            self._held_prompts[request.request_id] = str(name)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return params
        if tracked.decode is not None:
            counts = tracked.describe_decode(prefilled_here=not self._is_decode_only)
            return (params or {}) | counts or None
        if tracked.prompt_counts is not None and params is not None:
            params[EXPERT_COUNTS_KEY] = pack_counts(tracked.prompt_counts)
        return params
