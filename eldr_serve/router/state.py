"""State of the DecodeRouter actor: ingresses, workers, leases, and their recovery after a restart.

This is plain Python, to be tested without Ray. Nothing here awaits, so each call is atomic in the actor's
event loop: a swap never happens in the middle of a placement.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from numpy.typing import NDArray

from eldr_serve.metrics import NamedCounter, RouterEvent
from eldr_serve.router.comparison import Comparison
from eldr_serve.router.live_settings import LiveSettingsStore, SettingsChange
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.positions import Positions
from eldr_serve.router.settings_check import SettingsCheck
from eldr_serve.router.step_costs import StepCosts
from eldr_serve.router_protocol.messages import (
    LOCAL_FALLBACK,
    IngressReport,
    LiveSettings,
    NamedPolicy,
    Restore,
)
from eldr_serve.scheduling import (
    BlockChanges,
    DecodeLoads,
    Lease,
    LeaseState,
    LoadedAdapters,
    PlacementRequest,
    Placer,
    PrefixCacheSize,
    PromptBlocks,
    StepCost,
    StepSums,
)
from eldr_serve.scheduling.cached_share import CachedShare

_MAX_RECENT_COUNTS = 1024


class RouterState:
    """The state of the router, which places the requests of several ingresses on decode workers.

    A worker is a replica or one of its data-parallel ranks (see worker_names). Each ingress reports the
    workers that it can reach. If it can reach any, its requests go only to them. Ingresses limit the wait of
    their requests in the decode queue, and release requests that time out.

    Args:
        model_id: tables and predictors of other models are refused.
        policy, parameters: the policy to start with; SwapRefusedError if it is unknown.
        shadow: policy to compare it with, if any.
        table: content of a RoutingTable file, or None to place by load until one is swapped in.
        predictor: content of a SignaturePredictor file, with which the ingresses predict expert counts.
        cost: cost of a decode step until the engines' steps are measured.
        adapters: LoRA adapters of the workers.
        seed: seed of the random numbers that policies use.
        clock: monotonic clock, s.

    Attributes:
        epoch: identifies this state; each restart of the actor and each changed deployment has another one.
        live_settings: the live settings; operators change them here.
        model_id: id of the served model.
        placer: the running and the queued requests, and the live policy.
        comparison: comparison of the live policy with the shadow.
        costs: measured cost of decode steps.
        view: data of the live page.
        counters: the counters of the status, by RouterEvent, IngressEvent or NamedCounter.key.
        recent_counts: expert counts of recently placed prompts, which only `offline.live_placement` reads.
        ingresses: ids of the ingresses, also of lost ones until they are dropped.
        positions: positions of the decode workers.
        predictions: quality of each ingress's predictions, see OnlinePredictor.status.
    """

    def __init__(
        self,
        *,
        model_id: str,
        policy: str,
        parameters: dict[str, Any] | None = None,
        shadow: NamedPolicy | None = None,
        table: bytes | None = None,
        predictor: bytes | None = None,
        cost: StepCost | None = None,
        adapters: LoadedAdapters | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.model_id = model_id
        self._clock = clock
        self.counters: Counter[str] = Counter()
        self.recent_counts: deque[NDArray[Any]] = deque(maxlen=_MAX_RECENT_COUNTS)
        self.ingresses: set[str] = set()
        self.positions = Positions()
        self.predictions: dict[str, dict[str, Any]] = {}
        self._cached_share = CachedShare()
        self._check = SettingsCheck(model_id)
        self.costs = StepCosts(clock, cost)
        self.view = LiveView(clock)
        self.set_callbacks()
        first = LiveSettings(
            version=0,
            policy=policy,
            parameters=dict(parameters or {}),
            table=table,
            table_version=int(table is not None),
            predictor=predictor,
            predictor_version=int(predictor is not None),
            shadow=shadow,
        )
        policies = self._check.build_policies(first)
        if predictor is not None:
            self._check.require_predictor_fits(predictor)
        self.live_settings = LiveSettingsStore(
            first,
            policies.table,
            check=self._check,
            counters=self.counters,
            on_change=self._apply,
            dispatch=self.dispatch,
        )
        self.placer = Placer(
            policies.policy,
            on_policy_error=lambda error: self.counters.update([RouterEvent.POLICY_ERRORS]),
            adapters=adapters,
            seed=seed,
            clock=clock,
        )
        self.comparison = Comparison(self.placer, self.counters, clock=clock)
        if cost is not None:
            self.placer.update_cost_model(cost)
        self.view.record_change(policy, policies.table, first.table_version)
        self.comparison.begin(first, policies.shadow, cost)

    def set_callbacks(
        self,
        *,
        on_leases: Callable[[list[Lease]], None] = lambda leases: None,
        on_settings: Callable[[LiveSettings], None] = lambda settings: None,
    ) -> None:
        """Set the functions that receive later leases and settings; they replace earlier functions.

        Args:
            on_leases: called with leases of new and of queued requests when they are granted.
            on_settings: called with new settings, before the leases that follow from them are granted.
        """
        self._on_leases, self._on_settings = on_leases, on_settings

    # -- settings and measurements ---------------------------------------------------------------

    @property
    def settings(self) -> LiveSettings:
        """Return the live settings."""
        return self.live_settings.current

    @property
    def counts_shape(self) -> tuple[int, int] | None:
        """Return the shape (MoE layers, experts) of expert counts as engines report it; None until known."""
        return self._check.shape

    def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape that engines report; tables and predictors of other shapes are refused.

        If the live table or predictor has another shape, discard it; also discard predictions of that shape.
        """
        self._check.shape = (num_layers, num_experts)
        for lease in (*self.placer.running.values(), *self.placer.queue.values()):
            lease.request = self._check.without_unusable_prediction(lease.request)
        self.live_settings.discard_unfit_artifacts()

    def swap_fitted_table(self, table: bytes, version: int, *, refit: bool) -> int | None:
        """Swap in a table of the signature pool if this version is still live; return the new version.

        Return None if another table has become live in the meantime; that table is kept.

        Raises:
            SwapRefusedError: the table does not fit.
        """
        if self.settings.table_version != version:
            return None
        settings = self.live_settings.swap_table(table)
        self.counters[RouterEvent.REFITS] += refit
        return settings.table_version

    def _apply(self, change: SettingsChange) -> None:
        settings = change.now
        if settings.predictor_version != change.before.predictor_version:
            self.predictions.clear()
        self._on_settings(settings)
        if change.replaces_policy:
            self.counters[RouterEvent.PREDICTOR_FAILURES] += self.placer.policy.predictor_failures
            if settings.table_version != change.before.table_version:
                self.placer.discard_scores()
            self.placer.set_policy(change.policies.policy, self.costs.cost)
            self.view.record_change(settings.policy, change.policies.table, settings.table_version)
        if change.restarts_comparison:
            self.comparison.begin(settings, change.policies.shadow, self.costs.cost)

    def observe_steps(
        self,
        steps: StepSums,
        worker: str = "",
        prefix_cache: PrefixCacheSize | None = None,
        prefix_changes: BlockChanges | None = None,
    ) -> bool:
        """Add a decode worker's measurements, and update the policy's cost model from recent steps.

        Args:
            prefix_cache: size of the worker's cache; None if it has no prefix cache.
            prefix_changes: changes of the cache's blocks, if there are any and the engine reports them.

        Returns:
            Whether the router has all blocks that the engine has reported.
        """
        has_all_blocks = False
        if worker in self.positions.workers:  # the last report of a lost worker may be late
            self.view.observe_steps(worker, steps)
            has_all_blocks = self.placer.report_prefix_cache(worker, prefix_cache, prefix_changes)
        self.comparison.observe_steps(steps)
        self.costs.observe(steps)
        if self.costs.cost is not None:
            self.placer.update_cost_model(self.costs.cost)
        return has_all_blocks

    def decode_loads(self, blocks: PromptBlocks | None) -> DecodeLoads:
        """Return the loads of all live workers, for predictions of latency in the ingresses.

        Args:
            blocks: blocks of the prompt in question if the worker computes it too.
        """
        return DecodeLoads(
            self.placer.worker_loads(blocks),
            self.queue_size,
            self.costs.time_model(math.prod(self.counts_shape or (0,))),
            self._cached_share.value,
        )

    # -- workers and ingresses ---------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Return the number of live decode workers."""
        return self.positions.num_live

    @property
    def queue_size(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self.placer.queue)

    @property
    def oldest_wait_s(self) -> float:
        """Return the longest present wait for a worker, s; 0 if no request waits."""
        queued_at_s = min((lease.queued_at_s for lease in self.placer.queue.values()), default=None)
        return 0.0 if queued_at_s is None else self._clock() - queued_at_s

    def update_workers(self, ingress: str, workers: Iterable[str]) -> None:
        """Set the decode workers that an ingress can reach.

        Leases of lost workers stay until their ingresses release them.
        """
        self.positions.set_reachable(ingress, workers)
        self._set_workers()
        self.dispatch()

    def _set_workers(self) -> None:
        self.placer.set_workers(self.positions.workers, unreachable=self.positions.unreachable)
        self.view.keep_workers(self.positions.live_workers)

    def restore(self, message: Restore) -> None:
        """Restore from an ingress what this actor knew before its restart, but no leases (`adopt_lease`).

        All leases of the ingress that the message does not name have ended. Requests in the decode queue are
        not restored, since the ingress sends them again. A table or predictor that does not fit is discarded.
        """
        self.ingresses.add(message.ingress)
        if message.workers:
            self.positions.set_reachable(message.ingress, message.workers)
            self._set_workers()
        if message.settings is not None:
            self.live_settings.restore(message.settings)
        if message.counts_shape is not None:
            self.expect_counts(*message.counts_shape)
        leased_ids = set(message.leases)
        for lease in [*self.placer.running.values(), *self.placer.queue.values()]:
            if lease.ingress == message.ingress and lease.request_id not in leased_ids:
                self.placer.finish(lease.request_id)
        self.dispatch()

    def drop(self, ingress: str) -> int:
        """Release all leases of an ingress, which restores them if it is alive; return their number."""
        running_ids = [r for r, lease in self.placer.running.items() if lease.ingress == ingress]
        queued_ids = [r for r, lease in self.placer.queue.items() if lease.ingress == ingress]
        for request_id in running_ids + queued_ids:
            self.placer.finish(request_id)
        self.ingresses.discard(ingress)
        self.predictions.pop(ingress, None)
        if self.positions.forget(ingress):
            self._set_workers()
        self.counters[RouterEvent.LEASES_OF_LOST_INGRESSES] += len(running_ids)
        self.counters[RouterEvent.QUEUED_OF_LOST_INGRESSES] += len(queued_ids)
        if running_ids:
            self.dispatch()
        return len(running_ids)

    def report(self, ingress: str, message: IngressReport) -> None:
        """Add what an ingress has counted."""
        self.counters.update(message.events)
        self.view.add_answers(message.streams)
        if message.prediction is not None:
            self.predictions[ingress] = message.prediction

    # -- placement -------------------------------------------------------------------------------
    # Changes of load take effect with the next `place` or `dispatch`.

    def progress(self, generated_tokens: dict[str, int]) -> None:
        """Set the totals of generated tokens by request id."""
        self.placer.progress(generated_tokens)

    def finish(self, request_id: str, generated_tokens: int = 0) -> None:
        """End a request's lease or its wait for one; policies learn lengths from its tokens."""
        self.placer.progress({request_id: generated_tokens})
        self.placer.finish(request_id)

    def set_measured_counts(self, request: PlacementRequest) -> None:
        """Set a leased request's measured counts and length."""
        self.placer.set_measured_counts(request)
        self.counters[RouterEvent.COUNTS_MEASURED] += 1
        self._keep_counts(request)

    def adopt_lease(self, lease: Lease) -> None:
        """Add a lease that its ingress has made, or received from this actor before it was restarted."""
        lease.request = self._check.without_unusable_prediction(lease.request)
        current = self.placer.running.get(lease.request_id)
        new_counts = lease.request.expert_counts is not None and not lease.request.predicted
        if current is not None and (current.worker, current.policy) == (lease.worker, lease.policy):
            current.ingress = lease.ingress
            self.placer.progress({lease.request_id: lease.generated_tokens})
            if current.request.predicted and new_counts:
                self.placer.set_measured_counts(lease.request)
            return
        current = current or self.placer.queue.get(lease.request_id)
        if current is not None and not new_counts:
            lease.request = current.request
        self.placer.adopt_lease(lease)
        is_fallback = lease.policy == LOCAL_FALLBACK
        self.counters[RouterEvent.PLACED_BY_INGRESS if is_fallback else RouterEvent.LEASES_RESTORED] += 1

    def is_running(self, request_id: str) -> bool:
        """Return whether the request holds a worker."""
        return request_id in self.placer.running

    def is_stale(self, request: PlacementRequest) -> bool:
        """Return whether a request was scored with another table; its ingress will score it again."""
        return request.similarity is not None and request.table_version != self.settings.table_version

    def place(self, leases: list[Lease]) -> None:
        """Place or queue requests in state SENT, and dispatch the queue; stale requests stay SENT."""
        for lease in leases:
            lease.request = self._check.without_unusable_prediction(lease.request)
            self._keep_counts(lease.request)
        queued_ids = {lease.request_id for lease in leases if lease.request_id in self.placer.queue}
        granted_leases = self.placer.submit(lease for lease in leases if not self.is_stale(lease.request))
        self.counters[RouterEvent.QUEUED] += sum(
            lease.state is LeaseState.QUEUED and lease.request_id not in queued_ids for lease in leases
        )
        self._grant(granted_leases)

    def dispatch(self) -> None:
        """Let the policy assign workers to queued requests."""
        self._grant(self.placer.dispatch())

    def _keep_counts(self, request: PlacementRequest) -> None:
        if request.expert_counts is not None and not request.predicted:
            self.recent_counts.append(request.expert_counts)

    def _grant(self, leases: list[Lease]) -> None:
        self.view.add_leases(leases)
        for lease in leases:
            self.counters[RouterEvent.PLACED] += 1
            self.counters[NamedCounter.REASON.key(lease.reason)] += 1
            self.counters[RouterEvent.MOST_SIMILAR_WORKER] += lease.is_most_similar
            self.counters[RouterEvent.COUNTS_MISSING] += lease.request.counts_missing
            self.counters[RouterEvent.COUNTS_PREDICTED] += lease.request.predicted
            self.counters[RouterEvent.REROUTED] += lease.request.worker_failed
            if lease.request.blocks is not None:
                self.counters[RouterEvent.PREFILL_TOKENS] += lease.request.prompt_tokens
                self.counters[RouterEvent.PREFILL_TOKENS_CACHED] += lease.cached_tokens
                self._cached_share.record(lease.cached_tokens, lease.request.prompt_tokens)
        if leases:
            self._on_leases(leases)
