"""State of the DecodeRouter actor: its settings, measurements and parts, and their recovery after a restart.

This module does not use Ray, so tests need no cluster. It never awaits, so each call is atomic in the
actor's event loop: no swap happens in the middle of a placement.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from eldr_serve.metrics import RouterEvent
from eldr_serve.router.comparison import Comparison
from eldr_serve.router.ingresses import Ingresses
from eldr_serve.router.leases import Leases
from eldr_serve.router.live_settings import LiveSettingsStore, SettingsChange
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.positions import Positions
from eldr_serve.router.settings_check import SettingsCheck
from eldr_serve.router.step_costs import StepCosts
from eldr_serve.router_protocol.messages import LiveSettings, NamedPolicy, Restore
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.decode_loads import DecodeLoads
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize, PromptBlocks
from eldr_serve.scheduling.types import Lease

_MAX_REPORTERS = 10_000  # workers, including lost ones, whose newest report is remembered


class RouterState:
    """The state of the router, which places the requests of several ingresses on decode workers.

    It applies new settings and measurements to its parts, which the actor also calls directly.

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
        epoch: id of this state; it changes with each restart of the actor and each changed deployment.
        live_settings: the live settings; operators change them here.
        model_id: id of the served model.
        placer: the running and the queued requests, and the live policy.
        comparison: comparison of the live policy with the shadow.
        costs: measured cost of decode steps.
        view: data of the live page.
        leases: changes of the running and the queued requests.
        ingresses: the ingresses, the workers that they reach, and their reports.
        positions: positions of the decode workers.
        counters: the counters of the status; the keys are RouterEvent, IngressEvent or NamedCounter.key.
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
        self.counters: Counter[str] = Counter()
        self._check = SettingsCheck(model_id)
        self.positions = Positions()
        self.costs = StepCosts(clock, cost)
        self.view = LiveView(clock)
        self._report_numbers: dict[str, int] = {}  # newest number of each worker, oldest report first
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
            first, policies.table, check=self._check, counters=self.counters, on_change=self._apply
        )
        self.placer = Placer(
            policies.policy,
            on_policy_error=lambda error: self.counters.update([RouterEvent.POLICY_ERRORS]),
            adapters=adapters,
            seed=seed,
            clock=clock,
        )
        self.leases = Leases(
            self.placer,
            lambda: self.settings.table_version,
            self._check,
            self.counters,
            self.view,
            clock,
        )
        self.ingresses = Ingresses(self.positions, self.placer, self.leases, self.counters, self.view)
        self.set_callbacks()
        self.comparison = Comparison(self.placer, self.counters, clock=clock)
        if cost is not None:
            self.placer.update_cost_model(cost)
        self.view.record_change(policy, policies.table, first.table_version)
        self.comparison.begin(first, policies.shadow, cost)

    def set_callbacks(
        self,
        *,
        on_granted: Callable[[list[Lease]], None] = lambda leases: None,
        on_settings: Callable[[LiveSettings], None] = lambda settings: None,
        on_positions: Callable[[tuple[str | None, ...]], None] = lambda positions: None,
    ) -> None:
        """Set the functions that receive later changes; they replace earlier functions.

        Args:
            on_granted: called with leases of new and of queued requests when they are granted.
            on_settings: called with new settings, before the leases that follow from them are granted.
            on_positions: called with new positions of the decode workers.
        """
        self.leases.on_granted, self._on_settings = on_granted, on_settings
        self.ingresses.on_positions = on_positions

    @property
    def settings(self) -> LiveSettings:
        """Return the live settings."""
        return self.live_settings.current

    @property
    def counts_shape(self) -> tuple[int, int] | None:
        """Return the shape (MoE layers, experts) of expert counts as engines report it; None until known."""
        return self._check.shape

    def set_patience(self, patience_s: float) -> None:
        """Set the patience of the decode queue; see DecodeQueue."""
        self.placer.queue.patience_s = patience_s

    def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape that engines report; tables and predictors of other shapes are refused.

        Discard the live table, the live predictor and all predictions that have another shape.
        """
        self._check.shape = (num_layers, num_experts)
        self.leases.remove_unusable_predictions()
        self.live_settings.discard_unfit_artifacts()

    def swap_fitted_table(self, table: bytes, version: int, *, refit: bool) -> int | None:
        """Swap in a table of the signature pool if table `version` is still live; return the new version.

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
            self.ingresses.predictions.clear()
        self._on_settings(settings)
        if change.replaces_policy:
            self.counters[RouterEvent.PREDICTOR_FAILURES] += self.placer.policy.predictor_failures
            if settings.table_version != change.before.table_version:
                self.placer.discard_scores()
            self.placer.set_policy(change.policies.policy, self.costs.cost)
            self.view.record_change(settings.policy, change.policies.table, settings.table_version)
        if change.restarts_comparison:
            self.comparison.begin(settings, change.policies.shadow, self.costs.cost)
        if change.places_queue:
            self.leases.dispatch()

    def observe_steps(
        self,
        steps: StepSums,
        worker: str = "",
        prefix_cache: PrefixCacheSize | None = None,
        prefix_changes: BlockChanges | None = None,
        number: int | None = None,
    ) -> bool:
        """Add a decode worker's measurements, and update the policy's cost model from recent steps.

        Args:
            prefix_cache: size of the worker's cache; None if it has no prefix cache.
            prefix_changes: changes of the cache's blocks, if there are any and the engine reports them.
            number: number of the worker's report, from 1. A worker sends a report again if it gets no answer;
                its steps count once. None: the report is not sent again.

        Returns:
            Whether the router has all blocks that the engine has reported.
        """
        if number is not None and self._has_arrived(worker, number):
            steps = StepSums()
        has_all_blocks = False
        if worker in self.positions.workers:  # the last report of a lost worker may be late
            self.view.observe_steps(worker, steps)
            has_all_blocks = self.placer.report_prefix_cache(worker, prefix_cache, prefix_changes)
        self.comparison.observe_steps(steps)
        self.costs.observe(steps)
        if self.costs.cost is not None:
            self.placer.update_cost_model(self.costs.cost)
        return has_all_blocks

    def _has_arrived(self, worker: str, number: int) -> bool:
        """Record the number of a worker's report; return whether this report has arrived before."""
        newest = self._report_numbers.pop(worker, 0)
        self._report_numbers[worker] = max(number, newest)
        if len(self._report_numbers) > _MAX_REPORTERS:
            del self._report_numbers[next(iter(self._report_numbers))]
        return number <= newest

    def decode_loads(self, blocks: PromptBlocks | None) -> DecodeLoads:
        """Return the loads of all live workers, for predictions of latency in the ingresses.

        Args:
            blocks: blocks of the prompt in question if the worker computes it too.
        """
        return DecodeLoads(
            self.placer.workers.worker_loads(blocks),
            self.leases.queue_size,
            self.costs.time_model(math.prod(self.counts_shape or (0,))),
            self.leases.cached_share.value,
        )

    def restore_from_ingress(self, message: Restore) -> None:
        """Restore from an ingress what this actor knew before its restart, except leases (see `adopt_lease`).

        All leases of the ingress that the message does not name have ended. Requests in the decode queue are
        not restored, since the ingress sends them again. Settings that do not fit are discarded; see
        LiveSettingsStore.restore.
        """
        self.ingresses.add_ingress(message.ingress, message.workers, message.positions)
        if message.settings is not None:
            self.live_settings.restore(message.settings)
        if message.counts_shape is not None:
            self.expect_counts(*message.counts_shape)
        self.leases.finish_requests_of(message.ingress, keep=set(message.leases))
        self.leases.dispatch()
