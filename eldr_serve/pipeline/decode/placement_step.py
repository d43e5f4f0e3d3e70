"""Placement of a request on a decode worker, and the conditions for it."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prefill.prompt import Prompt
from eldr_serve.request import make_placement_request, prompt_key
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling.types import Lease
from eldr_serve.scheduling.worker_names import replica_of


class PlacementStep:
    """Places requests on decode workers that have not failed them.

    Args:
        fleet: the decode replicas.
        decode_starts: estimates the wait for a slot of a decode engine.
        outliers: excludes decode workers that fail repeatedly.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        router_client: RouterClient,
        counters: IngressCounters,
        options: PathOptions,
        decode_starts: DecodeStartEstimator,
        outliers: OutlierDetector,
    ) -> None:
        self._fleet = fleet
        self._router_client = router_client
        self._counters = counters
        self._options = options
        self._decode_starts = decode_starts
        self._outliers = outliers

    async def wait_for_decode_replica(self) -> None:
        """Wait until some decode replica can be reached; raise OverloadedError if none appears."""
        clock = asyncio.get_running_loop().time
        wait_s = self._options.replica_wait_s
        until_s = clock() + wait_s
        with self._fleet.waiters.take_turn() as turn:
            while not self._fleet.live_workers:
                if clock() >= until_s:
                    raise OverloadedError(
                        f"no decode replica could be reached for {wait_s:g} s; see `eldr status`"
                    )
                await turn.wait_until(until_s)

    def refuse_if_slots_are_late(self, context: RequestContext) -> None:
        """Raise OverloadedError if a new request would wait too long for a slot of a decode engine."""
        if context.has_earlier_attempt:
            return
        wait_s = self._decode_starts.estimate_wait_s()
        bound_s = self._options.slot_wait_s
        if wait_s > bound_s:
            self._counters.count(IngressEvent.REFUSED_DECODE_BACKLOG)
            why = f"a request would wait {wait_s:.0f} s for a decode engine's slot; {bound_s:g} s are allowed"
            # Spread the retries over the time in which that many slots become free.
            raise OverloadedError(why, retry_after_s=math.ceil(wait_s - bound_s * random.random()))

    async def place(self, context: RequestContext, prompt: Prompt) -> Lease:
        """Return a lease of a worker; raise OverloadedError if no engine can take the request."""
        if context.answer.num_tokens:  # it would be lost if all engines had left during its last prefill
            await self.wait_for_decode_replica()
        client_request, prompt_ids = context.request, context.prompt_ids
        failed_workers, drained_workers = context.failures.decode_workers, context.drained_workers
        counts, blocks = prompt.expert_counts, None
        if prompt.ids_to_compute is not None:
            blocks = context.blocks(prompt.ids_to_compute, self._fleet.directory.block_tokens)
        request = replace(
            make_placement_request(
                context.request_id,
                client_request.fields,
                client_request.hints,
                prompt_tokens=len(prompt_ids) if prompt_ids is not None else 0,
            ),
            resumed_tokens=0 if counts is None else context.answer.num_ids,
            blocks=blocks,
            exclude=self._workers_to_avoid(context, prompt),
            prompt_key=prompt_key(client_request.fields, client_request.adapter),
            adapter=client_request.adapter,
            tenant=client_request.tenant,
            priority=client_request.priority,
            worker_failed=bool(failed_workers),
            first_token_due_in_s=context.due_in_s,
        )
        # A request is queued unless a decode worker failed it or is drained.
        wait_s = 0.0 if failed_workers or drained_workers else self._options.queue_timeout_s
        token_ids = context.predictable_ids
        return await self._router_client.place(
            request,
            counts,
            token_ids=token_ids,
            wait_s=wait_s,
            generated_tokens=context.answer.num_tokens,
        )

    def release(self, context: RequestContext) -> None:
        """End the request's lease, if it has one."""
        self._router_client.release(context.request_id, is_complete=context.answer.is_complete)

    def _workers_to_avoid(self, context: RequestContext, prompt: Prompt) -> tuple[str, ...]:
        """Return the workers to avoid.

        - workers that failed this request or left while they answered it
        - other ranks of their replicas
        - ejected workers
        - workers that would compute the prompt or the answer too late
        """
        past_workers = (*context.failures.decode_workers, *context.drained_workers)
        replicas, usable_workers = context.past_replicas, set(self._outliers.usable_workers)
        other_workers = (
            name
            for name in self._fleet.live_workers
            if name not in usable_workers or replica_of(name) in replicas
        )
        return tuple(dict.fromkeys((*past_workers, *other_workers, *prompt.workers_to_avoid)))
