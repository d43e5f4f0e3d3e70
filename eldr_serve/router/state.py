"""State of the DecodeRouter actor besides the placer: ingresses, settings, artifacts, recovery.

This is plain Python, to be tested without Ray. Nothing here awaits, so each call is atomic in the actor's
event loop: a swap never happens in the middle of a placement.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from eldr_serve.errors import SwapRefusedError
from eldr_serve.router.comparison import Comparison
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.messages import LOCAL_FALLBACK, IngressReport, NamedPolicy, Restore, Settings
from eldr_serve.router.positions import Positions
from eldr_serve.router.settings_check import SettingsCheck
from eldr_serve.router.step_costs import StepCosts
from eldr_serve.scheduling import BlockChanges, Lease, PlacementRequest, Placer, State, StepCost, StepSums

logger = logging.getLogger(__name__)

_RECENT = 1024


class RouterState:
    """Placement of prefilled requests on decode workers (see worker_names), for several ingresses.

    Each ingress reports the workers that it can reach, and its requests go to these only, if there are any.

    Ingresses limit the wait of their requests in the decode queue, and release those that time out.

    Args:
        model_id: tables and predictors of other models are refused.
        policy, parameters: the policy to start with; SwapRefusedError if it is unknown.
        shadow: policy to compare it with, if any.
        table: content of a RoutingTable file, or None to place by load until one is swapped in.
        predictor: content of a SignaturePredictor file, for the ingresses, which predict.
        cost: cost of a decode step until the engines' steps are measured.

    Attributes:
        on_leases: callback for new leases, of new and of queued requests.
        on_settings: callback for new settings; it precedes the leases that follow from them.
        recent: expert counts of recently placed prompts, which only `offline.live_placement` reads.
        settings: the live settings.
        table: the live table.
        ingresses: ids of the ingresses, also of lost ones until they are dropped.
        positions: positions of the decode workers.
        predictions: quality of each ingress's predictions, see OnlinePredictor.status.
        earlier_failures: number of unusable predictions under earlier policies.
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
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.on_leases: Callable[[list[Lease]], None] = lambda leased: None
        self.on_settings: Callable[[Settings], None] = lambda settings: None
        self.counters: Counter[str] = Counter()
        self.recent: deque[NDArray[Any]] = deque(maxlen=_RECENT)
        self.ingresses: set[str] = set()
        self.positions = Positions()
        self.predictions: dict[str, dict[str, Any]] = {}
        self.check = SettingsCheck(model_id)
        self.costs = StepCosts(clock, cost)
        self.clock = clock
        self.earlier_failures = 0
        self.view = LiveView(clock)
        first = Settings(
            version=0,
            policy=policy,
            parameters=dict(parameters or {}),
            table=table,
            table_version=int(table is not None),
            predictor=predictor,
            predictor_version=int(predictor is not None),
            shadow=shadow,
        )
        live_policy, shadow_policy, self.table = self.check.build_policies(first)
        if predictor is not None:
            self.check.require_predictor_fits(predictor)
        self.settings = first
        self.placer = Placer(
            live_policy,
            on_policy_error=lambda error: self.counters.update(policy_errors=1),
            seed=seed,
            clock=clock,
        )
        self.comparison = Comparison(self.placer, self.counters, clock=clock)
        if cost is not None:
            self.placer.update_cost_model(cost)
        self.view.changed(policy, self.table, first.table_version)
        self.comparison.begin(first, shadow_policy, cost)

    # -- settings ------------------------------------------------------------------------------

    def set_policy(self, policy: str, parameters: dict[str, Any]) -> Settings:
        """Change the policy. Raise SwapRefusedError, without a change, if it or a parameter is unknown."""
        self._adopt(replace(self._next_settings(), policy=policy, parameters=dict(parameters)))
        self.counters["policy_changes"] += 1
        self.dispatch()
        return self.settings

    def set_shadow(self, shadow: NamedPolicy | None) -> Settings:
        """Compare the live policy with another or none. Raise SwapRefusedError like set_policy."""
        settings = replace(self._next_settings(), shadow=shadow)
        _, shadow_policy, _ = self.check.build_policies(settings)
        self._publish(settings)
        self.comparison.begin(settings, shadow_policy, self.costs.cost)
        return settings

    def swap_table(self, table: bytes) -> Settings:
        """Make a table live. Raise SwapRefusedError, without a change, if it does not fit."""
        version = self.settings.table_version + 1
        self._adopt(replace(self._next_settings(), table=table, table_version=version))
        self.counters["table_swaps"] += 1
        self.dispatch()
        return self.settings

    def swap_predictor(self, predictor: bytes, tokenizer: str) -> Settings:
        """Make a predictor live. Raise SwapRefusedError, without a change, if it does not fit.

        Args:
            tokenizer: fingerprint of the served tokenizer.
        """
        self.check.require_predictor_fits(predictor, tokenizer)
        self._set_predictor(predictor)
        self.counters["predictor_swaps"] += 1
        return self.settings

    def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape that engines report; tables and predictors of other shapes are refused.

        If the live table or predictor has another shape, discard it; also discard predictions of that shape.
        """
        self.check.shape = (num_layers, num_experts)
        for lease in (*self.placer.running.values(), *self.placer.queue.values()):
            lease.request = self.check.without_unusable_prediction(lease.request)
        settings = self._without_unfit_artifacts(self.settings)
        if settings is not self.settings:  # make the policy again, without the wrong shape
            self._adopt(settings)

    def _without_unfit_artifacts(self, settings: Settings) -> Settings:
        """Return the settings, or newer ones without a table or predictor that does not fit."""
        kept = settings
        try:
            if kept.table is not None:
                self.check.read_table(kept.table)
        except SwapRefusedError as error:
            logger.error("requests are placed without a table: %s", error)
            kept = replace(kept, table=None, table_version=kept.table_version + 1)
            self.counters["tables_discarded"] += 1
        try:
            if kept.predictor is not None:
                self.check.require_predictor_fits(kept.predictor)
        except SwapRefusedError as error:
            logger.error("nothing is predicted: %s", error)
            kept = replace(kept, predictor=None, predictor_version=kept.predictor_version + 1)
        return kept if kept is settings else replace(kept, version=_version_after(settings))

    def _set_predictor(self, predictor: bytes) -> None:
        """Replace the predictor, and keep the policy with its state."""
        version = self.settings.predictor_version + 1
        settings = replace(self._next_settings(), predictor=predictor, predictor_version=version)
        self.check.build_policies(settings)
        self.predictions.clear()
        self._publish(settings)

    def set_deployed(self, deployed: str, older: Settings | None) -> None:
        """Mark the settings as those of the deployment with this fingerprint.

        Args:
            older: settings that these override when an ingress restores them; None: ingresses' settings win.
        """
        version = 0 if older is None else _version_after(older)
        self.settings = replace(self.settings, deployed=deployed, version=version)

    def _next_settings(self) -> Settings:
        return replace(self.settings, version=_version_after(self.settings))

    def _publish(self, settings: Settings) -> None:
        self.settings = settings
        self.on_settings(settings)

    def _adopt(self, settings: Settings) -> None:
        live_policy, shadow_policy, self.table = self.check.build_policies(settings)
        swapped = settings.table_version != self.settings.table_version
        if settings.predictor_version != self.settings.predictor_version:
            self.predictions.clear()
        self.earlier_failures += self.placer.policy.predictor_failures
        self._publish(settings)
        if swapped:
            self.placer.discard_scores()
        self.placer.set_policy(live_policy, self.costs.cost)
        self.view.changed(settings.policy, self.table, settings.table_version)
        self.comparison.begin(settings, shadow_policy, self.costs.cost)

    def observe_steps(
        self,
        steps: StepSums,
        worker: str = "",
        prefix_cache: tuple[int, int] = (0, 0),
        prefix_changes: BlockChanges | None = None,
    ) -> bool:
        """Add a decode worker's measurements, and update the policy's cost model from recent steps.

        Args:
            prefix_cache: tokens in a block and in the worker's whole cache; (0, 0) without a cache.
            prefix_changes: changes of the cache's blocks, if there are any and the engine reports them.

        Returns:
            Whether all blocks that the engine has reported are known.
        """
        known = False
        if worker in self.positions.workers:  # the last report of a lost worker may be late
            self.view.observe_steps(worker, steps)
            known = self.placer.report_prefix_cache(worker, prefix_cache, prefix_changes)
        self.comparison.observe_steps(steps)
        self.costs.observe(steps)
        if self.costs.cost is not None:
            self.placer.update_cost_model(self.costs.cost)
        return known

    # -- workers and ingresses ---------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Return the number of live decode workers."""
        return self.positions.num_live

    @property
    def queue_size(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self.placer.queue)

    def update_workers(self, ingress: str, workers: Iterable[str]) -> None:
        """Set the decode workers that an ingress can reach.

        Leases of lost workers stay until their ingresses release them.
        """
        self.positions.set_reachable(ingress, workers)
        self._set_workers()
        self.dispatch()

    def _set_workers(self) -> None:
        positions = self.positions
        self.placer.set_workers(positions.workers, unreachable=positions.unreachable)
        self.view.keep_workers(positions.live)

    def restore(self, message: Restore) -> None:
        """Restore from an ingress what this actor knew before it was restarted, besides leases (`hold`).

        All leases of the ingress that the message does not name have ended. Requests in the decode queue are
        not restored, since the ingress sends them again. A table or predictor that does not fit is discarded.
        """
        self.ingresses.add(message.ingress)
        if message.workers:
            self.positions.set_reachable(message.ingress, message.workers)
            self._set_workers()
        settings = message.settings
        if settings is not None and settings.version > self.settings.version:
            self._adopt(self._without_unfit_artifacts(settings))
            self.counters["settings_restored"] += 1
        if message.counts_shape is not None:
            self.expect_counts(*message.counts_shape)
        kept = set(message.leases)
        for lease in [*self.placer.running.values(), *self.placer.queue.values()]:
            if lease.ingress == message.ingress and lease.request_id not in kept:
                self.placer.finish(lease.request_id)
        self.dispatch()

    def drop(self, ingress: str) -> int:
        """Release all leases of an ingress, which restores them if it is alive; return their number."""
        lost = [r for r, lease in self.placer.running.items() if lease.ingress == ingress]
        queued = [r for r, lease in self.placer.queue.items() if lease.ingress == ingress]
        for request_id in lost + queued:
            self.placer.finish(request_id)
        self.ingresses.discard(ingress)
        self.predictions.pop(ingress, None)
        if self.positions.forget(ingress):
            self._set_workers()
        self.counters["leases_of_lost_ingresses"] += len(lost)
        self.counters["queued_of_lost_ingresses"] += len(queued)
        if lost:
            self.dispatch()
        return len(lost)

    def report(self, ingress: str, message: IngressReport) -> None:
        """Add what an ingress has counted."""
        self.counters.update(message.events)
        self.view.answered(message.answered)
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
        self.counters["counts_measured"] += 1
        self._remember(request)

    def hold(self, lease: Lease) -> None:
        """Add a lease that its ingress has made, or received from this actor before it was restarted."""
        lease.request = self.check.without_unusable_prediction(lease.request)
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
        self.placer.hold(lease)
        self.counters["placed_by_ingress" if lease.policy == LOCAL_FALLBACK else "leases_restored"] += 1

    def is_running(self, request_id: str) -> bool:
        """Return whether the request holds a worker."""
        return request_id in self.placer.running

    def is_stale(self, request: PlacementRequest) -> bool:
        """Return whether a request was scored with another table; its ingress will score it again."""
        return request.similarity is not None and request.table_version != self.settings.table_version

    def place(self, leases: list[Lease]) -> None:
        """Place or queue requests in state SENT, and dispatch the queue; stale requests stay SENT."""
        for lease in leases:
            lease.request = self.check.without_unusable_prediction(lease.request)
            self._remember(lease.request)
        queued = {lease.request_id for lease in leases if lease.request_id in self.placer.queue}
        leased = self.placer.submit(lease for lease in leases if not self.is_stale(lease.request))
        self.counters["queued"] += sum(
            lease.state is State.QUEUED and lease.request_id not in queued for lease in leases
        )
        self._lease(leased)

    def dispatch(self) -> None:
        """Let the policy assign workers to queued requests."""
        self._lease(self.placer.dispatch())

    def _remember(self, request: PlacementRequest) -> None:
        if request.expert_counts is not None and not request.predicted:
            self.recent.append(request.expert_counts)

    def _lease(self, leased: list[Lease]) -> None:
        self.view.placed(leased)
        for lease in leased:
            self.counters["placed"] += 1
            self.counters[f"reason:{lease.reason}"] += 1
            self.counters["best_worker"] += lease.is_best_match
            self.counters["counts_missing"] += lease.request.counts_missing
            self.counters["counts_predicted"] += lease.request.predicted
            self.counters["rerouted"] += lease.request.worker_failed
            if lease.request.blocks is not None:
                self.counters["prefill_tokens"] += lease.request.prompt_tokens
                self.counters["prefill_tokens_cached"] += lease.cached_tokens
        if leased:
            self.on_leases(leased)


def _version_after(settings: Settings) -> int:
    # Milliseconds, so that settings made after a restart are newer than those that ingresses restore.
    return max(settings.version + 1, time.time_ns() // 1_000_000)
