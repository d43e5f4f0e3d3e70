"""State of the DecodeRouter actor besides the placer: clients, settings, artifacts, recovery.

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

from eldr_serve.errors import SwapRefused
from eldr_serve.router.comparison import Comparison
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.messages import OWN_LOAD, NamedPolicy, Report, Restore, Settings
from eldr_serve.router.settings_check import SettingsCheck
from eldr_serve.router.step_costs import StepCosts
from eldr_serve.scheduling import Lease, PlacementRequest, Placer, State, StepSums

logger = logging.getLogger(__name__)

_RECENT = 1024


class RouterState:
    """Placement of prefilled requests on decode replicas, for several clients.

    Each decode replica has a position, and position i serves centroid i. The position of a lost replica
    stays vacant (its centroid's requests go to the next most similar workers) until a new replica takes the
    lowest vacant position, so that the other replicas keep their centroids.

    Clients limit the wait of their requests in the decode queue, and release those that time out.

    Args:
        model_id: tables and predictors of other models are refused.
        policy, parameters: the policy to start with; SwapRefused if it is unknown.
        shadow: policy to compare it with, if any.
        table: content of a RoutingTable file, or None to place by load until one is swapped in.
        predictor: content of a SignaturePredictor file, for the clients, which predict.

    Attributes:
        on_leases: callback for new leases, of new and of queued requests.
        on_settings: callback for new settings; it precedes the leases that follow from them.
        recent: expert counts of recently placed prompts, for a refit.
        settings: the live settings.
        table: the live table.
        clients: ids of the clients, also of lost ones until they are dropped.
        positions: the replica in each position.
        predictions: quality of each client's predictions, see OnlinePredictor.status.
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
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.on_leases: Callable[[list[Lease]], None] = lambda leased: None
        self.on_settings: Callable[[Settings], None] = lambda settings: None
        self.counters: Counter[str] = Counter()
        self.recent: deque[NDArray[Any]] = deque(maxlen=_RECENT)
        self.clients: set[str] = set()
        self.positions: list[str | None] = []
        self.predictions: dict[str, dict[str, Any]] = {}
        self.check = SettingsCheck(model_id)
        self.costs = StepCosts(clock)
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
        made, other, self.table = self.check.policies(first)
        if predictor is not None:
            self.check.predictor(predictor)
        self.settings = first
        self.placer = Placer(
            made, failed=lambda error: self.counters.update(policy_errors=1), seed=seed, clock=clock
        )
        self.comparison = Comparison(self.placer, self.counters, clock=clock)
        self.view.changed(policy, self.table, first.table_version)
        self.comparison.begin(first, other, None)

    # -- settings ------------------------------------------------------------------------------

    def set_policy(self, policy: str, parameters: dict[str, Any]) -> Settings:
        """Change the policy. Raise SwapRefused, without a change, if it or a parameter is unknown."""
        self._adopt(replace(self._next(), policy=policy, parameters=dict(parameters)))
        self.counters["policy_changes"] += 1
        self.dispatch()
        return self.settings

    def set_shadow(self, shadow: NamedPolicy | None) -> Settings:
        """Compare the live policy with another or none. Raise SwapRefused like set_policy."""
        settings = replace(self._next(), shadow=shadow)
        _, made, _ = self.check.policies(settings)
        self._publish(settings)
        self.comparison.begin(settings, made, self.costs.cost)
        return settings

    def swap_table(self, table: bytes) -> Settings:
        """Make a table live. Raise SwapRefused, without a change, if it does not fit."""
        self._adopt(replace(self._next(), table=table, table_version=self.settings.table_version + 1))
        self.counters["table_swaps"] += 1
        self.dispatch()
        return self.settings

    def swap_predictor(self, predictor: bytes, tokenizer: str) -> Settings:
        """Make a predictor live. Raise SwapRefused, without a change, if it does not fit.

        Args:
            tokenizer: fingerprint of the served tokenizer.
        """
        self.check.predictor(predictor, tokenizer)
        self._set_predictor(predictor)
        self.counters["predictor_swaps"] += 1
        return self.settings

    def expect_counts(self, num_layers: int, num_experts: int) -> None:
        """Set the shape that engines report; tables and predictors of other shapes are refused.

        If the live predictor has another shape, discard it and its predictions.
        """
        self.check.shape = (num_layers, num_experts)
        if self.settings.predictor is None:
            return
        try:
            self.check.predictor(self.settings.predictor)
        except SwapRefused as error:
            logger.error("nothing is predicted: %s", error)
            self._set_predictor(None)
            for lease in (*self.placer.running.values(), *self.placer.queue.values()):
                lease.request = self.check.without_misfit(lease.request)
            self._adopt(self.settings)  # make the policy again, without the wrong shape

    def _set_predictor(self, predictor: bytes | None) -> None:
        """Replace the predictor, and keep the policy with its state."""
        version = self.settings.predictor_version + 1
        settings = replace(self._next(), predictor=predictor, predictor_version=version)
        self.check.policies(settings)
        self.predictions.clear()
        self._publish(settings)

    def supersede(self, deployed: str, older: Settings | None) -> None:
        """Mark the settings as those of the deployment with this fingerprint.

        Args:
            older: settings that these override when a client restores them; None: clients' settings win.
        """
        version = 0 if older is None else _version_after(older)
        self.settings = replace(self.settings, deployed=deployed, version=version)

    def _next(self) -> Settings:
        return replace(self.settings, version=_version_after(self.settings))

    def _publish(self, settings: Settings) -> None:
        self.settings = settings
        self.on_settings(settings)

    def _adopt(self, settings: Settings) -> None:
        policy, shadow, self.table = self.check.policies(settings)
        swapped = settings.table_version != self.settings.table_version
        if settings.predictor_version != self.settings.predictor_version:
            self.predictions.clear()
        self.earlier_failures += self.placer.policy.predictor_failures
        self._publish(settings)
        if swapped:
            self.placer.forget_scores()
        self.placer.set_policy(policy, self.costs.cost)
        self.view.changed(settings.policy, self.table, settings.table_version)
        self.comparison.begin(settings, shadow, self.costs.cost)

    def observe_steps(
        self, steps: StepSums, replica: str = "", prefix_cache: tuple[int, int] = (0, 0)
    ) -> None:
        """Add a decode engine's measurements, and update the policy's cost model from recent steps.

        Args:
            prefix_cache: tokens in a block and in the replica's whole cache; (0, 0) without a cache.
        """
        block_tokens, kv_tokens = prefix_cache
        if block_tokens and replica in self.positions:  # the last report of a lost replica may be late
            self.placer.prefixes.holds(replica, kv_tokens, block_tokens)
        self.view.observe_steps(replica, steps)
        self.comparison.observe_steps(steps)
        self.costs.observe(steps)
        if self.costs.cost is not None:
            self.placer.update_cost_model(self.costs.cost)

    # -- workers and clients ---------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Return the number of live decode replicas."""
        return sum(replica is not None for replica in self.positions)

    @property
    def queue_size(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self.placer.queue)

    def update_workers(self, replicas: Iterable[str]) -> None:
        """Set the live decode replicas. Leases of lost replicas stay until their clients release them."""
        self._set_workers(replicas)
        self.dispatch()

    def _set_workers(self, replicas: Iterable[str]) -> None:
        live = set(replicas)
        self.positions = [replica if replica in live else None for replica in self.positions]
        for replica in sorted(live.difference(filter(None, self.positions))):
            if None in self.positions:
                self.positions[self.positions.index(None)] = replica
            else:
                self.positions.append(replica)
        while self.positions and self.positions[-1] is None:
            self.positions.pop()
        self.placer.set_workers(self.positions)

    def restore(self, message: Restore) -> None:
        """Restore from a client what an earlier incarnation of this actor knew, besides leases (`hold`).

        All leases of the client that the message does not name have ended. Requests in the decode queue are
        not restored, since the client sends them again.
        """
        self.clients.add(message.client)
        if message.workers:
            self._set_workers(message.workers)
        settings = message.settings
        if settings is not None and settings.version > self.settings.version:
            self._adopt(settings)
            self.counters["settings_restored"] += 1
        if message.counts_shape is not None:  # live settings are not checked against it
            self.check.shape = message.counts_shape
        held = set(message.leases)
        for known in [*self.placer.running.values(), *self.placer.queue.values()]:
            if known.client == message.client and known.request_id not in held:
                self.placer.finish(known.request_id)
        self.dispatch()

    def drop(self, client: str) -> int:
        """Release all leases of a client, and return their number. A client that is alive restores them."""
        lost = [r for r, lease in self.placer.running.items() if lease.client == client]
        queued = [r for r, lease in self.placer.queue.items() if lease.client == client]
        for request_id in lost + queued:
            self.placer.finish(request_id)
        self.clients.discard(client)
        self.predictions.pop(client, None)
        self.counters["leases_of_lost_clients"] += len(lost)
        self.counters["queued_of_lost_clients"] += len(queued)
        if lost:
            self.dispatch()
        return len(lost)

    def report(self, client: str, message: Report) -> None:
        """Add what a client has counted."""
        self.counters.update(message.events)
        self.view.answered(message.answered)
        if message.prediction is not None:
            self.predictions[client] = message.prediction

    # -- placement -------------------------------------------------------------------------------
    # Changes of load take effect with the next `place` or `dispatch`.

    def progress(self, generated_tokens: dict[str, int]) -> None:
        """Set the totals of generated tokens by request id."""
        self.placer.progress(generated_tokens)

    def finish(self, request_id: str, generated_tokens: int = 0) -> None:
        """End a request's lease or its wait for one; policies learn lengths from its tokens."""
        self.placer.progress({request_id: generated_tokens})
        self.placer.finish(request_id)

    def counted(self, request: PlacementRequest) -> None:
        """Take a leased request's measured counts and length."""
        self.placer.counted(request)
        self.counters["counts_measured"] += 1
        self._remember(request)

    def hold(self, lease: Lease) -> None:
        """Take a lease that its client has made, or received from an earlier incarnation of this actor."""
        lease.request = self.check.without_misfit(lease.request)
        known = self.placer.running.get(lease.request_id)
        new_counts = lease.request.expert_counts is not None and not lease.request.predicted
        if known is not None and (known.replica, known.policy) == (lease.replica, lease.policy):
            known.client = lease.client
            self.placer.progress({lease.request_id: lease.generated_tokens})
            if known.request.predicted and new_counts:
                self.placer.counted(lease.request)
            return
        known = known or self.placer.queue.get(lease.request_id)
        if known is not None and not new_counts:
            lease.request = known.request
        self.placer.hold(lease)
        self.counters["placed_by_client" if lease.policy == OWN_LOAD else "leases_restored"] += 1

    def is_stale(self, request: PlacementRequest) -> bool:
        """Return whether a request was scored with another table; its client will score it again."""
        return request.similarity is not None and request.table_version != self.settings.table_version

    def place(self, asked: list[Lease]) -> None:
        """Place or queue requests in state SENT, and dispatch the queue; stale requests stay SENT."""
        for lease in asked:
            lease.request = self.check.without_misfit(lease.request)
            self._remember(lease.request)
        queued = {lease.request_id for lease in asked if lease.request_id in self.placer.queue}
        leased = self.placer.submit(lease for lease in asked if not self.is_stale(lease.request))
        self.counters["queued"] += sum(
            lease.state is State.QUEUED and lease.request_id not in queued for lease in asked
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
            self.counters["best_worker"] += lease.best
            self.counters["counts_missing"] += lease.request.counts_missing
            self.counters["counts_predicted"] += lease.request.predicted
            self.counters["rerouted"] += bool(lease.request.exclude)
            if lease.request.blocks is not None:
                self.counters["prefill_tokens"] += lease.request.prompt_tokens
                self.counters["prefill_tokens_cached"] += lease.cached_tokens
        if leased:
            self.on_leases(leased)


def _version_after(settings: Settings) -> int:
    # Milliseconds, so that settings made after a restart are newer than those that clients restore.
    return max(settings.version + 1, time.time_ns() // 1_000_000)
