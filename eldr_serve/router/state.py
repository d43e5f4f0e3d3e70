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
from eldr_serve.experts.routing_table import ArtifactError, RoutingTable
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.router.comparison import Comparison
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.messages import Exchange, NamedPolicy, Reply, Restore, Restored, Settings
from eldr_serve.router.outbox import Outbox
from eldr_serve.scheduling import (
    Placement,
    PlacementRequest,
    Placer,
    Policy,
    PolicyError,
    State,
    StepCost,
    StepSums,
    make_policy,
    policy_names,
)

logger = logging.getLogger(__name__)

_COST_HALF_LIFE_S = 600.0  # half-life of a decode step's weight in the fitted cost
_RECENT = 1024
_MAX_SETTINGS_BYTES = 60 * 2**20  # table and predictor, which share one frame of the channel


class RouterState:
    """Placement of prefilled requests on decode replicas, for several clients.

    Each decode replica has a slot, and slot i serves centroid i. The slot of a lost replica stays vacant (its
    centroid's requests go to the next most similar workers) until a new replica takes the lowest vacant slot,
    so that the other replicas keep their centroids.

    Leases of requests from the decode queue go to `outbox`. Clients limit the wait of their requests, and
    release those that time out.

    Args:
        model_id: tables and predictors of other models are refused.
        policy, parameters: the policy to start with; SwapRefused if it is unknown.
        shadow: policy to compare it with, if any.
        table: content of a RoutingTable file, or None to place by load until one is swapped in.
        predictor: content of a SignaturePredictor file, for the clients, which predict.
        client_timeout_s: silence of a client after which its leases are dropped, s.
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
        client_timeout_s: float = 30.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()
        self.recent: deque[NDArray[Any]] = deque(maxlen=_RECENT)  # signatures, for a refit
        self._model_id = model_id
        self._client_timeout_s = client_timeout_s
        self._clock = clock
        self._slots: list[str | None] = []
        self._signature_shape: tuple[int, int] | None = None
        self._last_seen: dict[str, float] = {}
        self._predictions: dict[str, dict[str, Any]] = {}  # client -> quality of its predictions
        self._predictor_failures = 0  # under earlier policies
        self._steps = StepSums()
        self._steps_at = clock()
        self._all_steps = StepSums()
        self._cost: StepCost | None = None
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
        made, other, self._table = self._validated(first)
        if predictor is not None:
            self._check_predictor(predictor)
        self._settings = first
        self.placer = Placer(
            made, failed=lambda error: self.counters.update(policy_errors=1), seed=seed, clock=clock
        )
        self.comparison = Comparison(self.placer, self.counters, clock=clock)
        self.view.changed(policy, self._table, first.table_version)
        self.comparison.begin(first, other, None)

    # -- settings ------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """Return the live settings."""
        return self._settings

    def set_policy(self, policy: str, parameters: dict[str, Any]) -> Settings:
        """Change the policy. Raise SwapRefused, without a change, if it or a parameter is unknown."""
        self._adopt(replace(self._next(), policy=policy, parameters=dict(parameters)))
        self.counters["policy_changes"] += 1
        self._dispatch()
        return self._settings

    def set_shadow(self, shadow: NamedPolicy | None) -> Settings:
        """Compare the live policy with another or none. Raise SwapRefused like set_policy."""
        settings = replace(self._next(), shadow=shadow)
        _, made, _ = self._validated(settings)
        self._settings = settings
        self.comparison.begin(settings, made, self._cost)
        return settings

    def swap_table(self, table: bytes) -> Settings:
        """Make a table live. Raise SwapRefused, without a change, if it does not fit."""
        self._adopt(replace(self._next(), table=table, table_version=self._settings.table_version + 1))
        self.counters["table_swaps"] += 1
        self._dispatch()
        return self._settings

    def swap_predictor(self, predictor: bytes, tokenizer: str) -> Settings:
        """Make a predictor live. Raise SwapRefused, without a change, if it does not fit.

        Args:
            tokenizer: fingerprint of the served tokenizer.
        """
        self._check_predictor(predictor, tokenizer)
        self._set_predictor(predictor)
        self.counters["predictor_swaps"] += 1
        return self._settings

    def expect_signatures(self, num_layers: int, num_experts: int) -> None:
        """Set the shape that engines report; tables and predictors of other shapes are refused.

        If the live predictor has another shape, discard it and its predictions.
        """
        self._signature_shape = (num_layers, num_experts)
        if self._settings.predictor is None:
            return
        try:
            self._check_predictor(self._settings.predictor)
        except SwapRefused as error:
            logger.error("nothing is predicted: %s", error)
            self._set_predictor(None)
            for placement in (*self.placer.running.values(), *self.placer.queue.values()):
                placement.request = self._without_misfit(placement.request)
            self._adopt(self._settings)  # make the policy again, without the wrong shape

    def _without_misfit(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request without its prediction if that has a different shape than the engines'."""
        counts, shape = request.signature, self._signature_shape
        if not request.predicted or counts is None or shape is None or counts.shape == shape:
            return request
        return replace(request, signature=None, signature_missing=True, predicted=False)

    def _set_predictor(self, predictor: bytes | None) -> None:
        """Replace the predictor, and keep the policy with its state."""
        version = self._settings.predictor_version + 1
        settings = replace(self._next(), predictor=predictor, predictor_version=version)
        self._validated(settings)
        self._predictions.clear()
        self._settings = settings

    def supersede(self, deployed: str, older: Settings | None) -> None:
        """Mark the settings as those of the deployment with this fingerprint.

        Args:
            older: settings that these override when a client restores them; None: clients' settings win.
        """
        version = 0 if older is None else _version_after(older)
        self._settings = replace(self._settings, deployed=deployed, version=version)

    def _next(self) -> Settings:
        return replace(self._settings, version=_version_after(self._settings))

    def _validated(self, settings: Settings) -> tuple[Policy, Policy | None, RoutingTable | None]:
        size = len(settings.table or b"") + len(settings.predictor or b"")
        if size > _MAX_SETTINGS_BYTES:
            raise SwapRefused(
                f"table and predictor have {size / 2**20:.0f} MiB together, the maximum is "
                f"{_MAX_SETTINGS_BYTES / 2**20:.0f}"
            )
        try:
            table = RoutingTable.from_bytes(settings.table) if settings.table is not None else None
            policy = make_policy(settings.policy, **settings.parameters).with_table(table)
            shadow = None
            if settings.shadow is not None:
                named = settings.shadow
                shadow = make_policy(named.name, **named.parameters).with_table(table)
        except (ArtifactError, PolicyError) as error:
            raise SwapRefused(str(error)) from error
        if table is not None:
            self._check_table(table)
        return policy, shadow, table

    def _check_table(self, table: RoutingTable) -> None:
        if table.model != self._model_id:
            raise SwapRefused(f"the table is for model {table.model!r}, but {self._model_id!r} is served")
        shape = (table.num_layers, table.num_experts)
        if self._signature_shape not in (None, shape):
            raise SwapRefused(
                f"the table is for {shape[0]} MoE layers x {shape[1]} experts, but the prefill engines "
                f"report {self._signature_shape[0]} x {self._signature_shape[1]}"
            )

    def _check_predictor(self, predictor: bytes, tokenizer: str | None = None) -> None:
        try:
            SignaturePredictor.from_bytes(predictor).require_fit(
                model=self._model_id, tokenizer=tokenizer, shape=self._signature_shape
            )
        except ArtifactError as error:
            raise SwapRefused(str(error)) from error

    def _adopt(self, settings: Settings) -> None:
        policy, shadow, self._table = self._validated(settings)
        swapped = settings.table_version != self._settings.table_version
        if settings.predictor_version != self._settings.predictor_version:
            self._predictions.clear()
        self._predictor_failures += self.placer.policy.predictor_failures
        self._settings = settings
        if swapped:
            self.placer.forget_scores()
        self.placer.set_policy(policy, self._cost)
        self.view.changed(settings.policy, self._table, settings.table_version)
        self.comparison.begin(settings, shadow, self._cost)

    def observe_steps(
        self, steps: StepSums, replica: str = "", prefix_cache: tuple[int, int] = (0, 0)
    ) -> None:
        """Add a decode engine's measurements, and update the policy's cost model from recent steps.

        Args:
            prefix_cache: tokens in a block and in the replica's whole cache; (0, 0) without a cache.
        """
        now = self._clock()
        block_tokens, kv_tokens = prefix_cache
        if block_tokens and replica in self._slots:  # the last report of a lost replica may be late
            self.placer.prefixes.holds(replica, kv_tokens, block_tokens)
        self.view.observe_steps(replica, steps)
        self.comparison.observe_steps(steps)
        self._all_steps += steps
        keep = 0.5 ** ((now - self._steps_at) / _COST_HALF_LIFE_S)
        self._steps, self._steps_at = self._steps.faded(keep) + steps, now
        self._cost = self._steps.fit() or self._cost
        if self._cost is not None:
            self.placer.update_cost_model(self._cost)

    # -- workers and clients ---------------------------------------------------------------------

    def update_workers(self, replicas: Iterable[str]) -> None:
        """Set the live decode replicas. Leases of lost replicas stay until their clients release them."""
        self._set_workers(replicas)
        self._dispatch()

    def _set_workers(self, replicas: Iterable[str]) -> None:
        live = set(replicas)
        self._slots = [replica if replica in live else None for replica in self._slots]
        for replica in sorted(live.difference(filter(None, self._slots))):
            if None in self._slots:
                self._slots[self._slots.index(None)] = replica
            else:
                self._slots.append(replica)
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        self.placer.set_workers(self._slots)

    def restore(self, message: Restore) -> Restored:
        """Restore from a client what an earlier incarnation of this actor knew.

        All other leases of the client have ended. Requests in the decode queue are not restored, since the
        client sends them again.
        """
        self._last_seen[message.client] = self._clock()
        if message.workers:
            self._set_workers(message.workers)
        settings = message.settings
        if settings is not None and settings.version > self._settings.version:
            self._adopt(settings)
            self.counters["settings_restored"] += 1
        if message.signature_shape is not None:  # live settings are not checked against it
            self._signature_shape = message.signature_shape
        held = {lease.request_id for lease in message.leases}
        for known in [*self.placer.running.values(), *self.placer.queue.values()]:
            if known.client == message.client and known.request_id not in held:
                self.placer.finish(known.request_id)
        for lease in message.leases:
            lease = replace(lease, request=self._without_misfit(lease.request))
            running = self.placer.running.get(lease.request_id)
            if running is None or (running.replica, running.policy) != (lease.replica, lease.policy):
                self.placer.hold(replace(lease, client=message.client))
                self.counters["leases_restored"] += 1
        self._dispatch()
        return Restored(self.epoch, self._settings)

    def drop_silent_clients(self) -> int:
        """Drop the clients that have been silent too long; return the number of their leases."""
        now = self._clock()
        return self.drop({c for c, seen in self._last_seen.items() if now - seen > self._client_timeout_s})

    def drop(self, silent: set[str]) -> int:
        """Release all leases of clients, and return their number. A client that is alive restores them."""
        lost = [r for r, placement in self.placer.running.items() if placement.client in silent]
        queued = [r for r, placement in self.placer.queue.items() if placement.client in silent]
        for request_id in lost + queued:
            self.placer.finish(request_id)
        for client in silent:
            self._last_seen.pop(client, None)
            self._predictions.pop(client, None)
            self.outbox.drop(client)
        self.counters["leases_of_lost_clients"] += len(lost)
        self.counters["queued_of_lost_clients"] += len(queued)
        if lost:
            self._dispatch()
        return len(lost)

    # -- placement -------------------------------------------------------------------------------

    def exchange(self, message: Exchange) -> Reply:
        """Apply progress and releases first, so that placements see the newest load."""
        if message.known_epoch != self.epoch or message.client not in self._last_seen:
            return Reply(self.epoch, self._settings.version, refused="unknown-client")
        self._last_seen[message.client] = self._clock()
        self.counters.update(message.events)
        self.view.answered(message.answered)
        self.placer.progress(message.progress)
        for request_id in message.released:
            self.placer.finish(request_id)
        for lease in message.held:
            self._hold(replace(lease, client=message.client))
        for request in message.counted:
            self.placer.counted(request)
        self.counters["signatures_returned"] += len(message.counted)
        if message.prediction is not None:
            self._predictions[message.client] = message.prediction
        asked = [Placement(self._without_misfit(r), State.SENT, message.client) for r in message.placements]
        true = (r.signature for r in (*message.placements, *message.counted) if not r.predicted)
        self.recent.extend(counts for counts in true if counts is not None)
        queued = {r.request_id for r in message.placements if r.request_id in self.placer.queue}
        # A request scored with another table stays SENT; its client fetches this table and sends it again.
        live = self._settings.table_version
        leased = self.placer.submit(
            p for p in asked if p.request.similarity is None or p.request.table_version == live
        )
        own = set(map(id, asked))
        self.outbox.put(placement for placement in leased if id(placement) not in own)
        self._count(leased)
        self.counters["queued"] += sum(p.state is State.QUEUED and p.request_id not in queued for p in asked)
        return Reply(self.epoch, self._settings.version, tuple(p.answer() for p in asked))

    def _hold(self, lease: Placement) -> None:
        known = self.placer.running.get(lease.request_id) or self.placer.queue.get(lease.request_id)
        self.placer.hold(lease if known is None else replace(lease, request=known.request))
        self.counters["placed_by_client"] += 1

    def _dispatch(self) -> None:
        leased = self.placer.dispatch()
        self.outbox.put(leased)
        self._count(leased)

    def _count(self, leased: Iterable[Placement]) -> None:
        leased = list(leased)
        self.view.placed(leased)
        for placement in leased:
            self.counters["placed"] += 1
            self.counters[f"reason:{placement.reason}"] += 1
            self.counters["best_worker"] += placement.best
            self.counters["signature_missing"] += placement.request.signature_missing
            self.counters["signature_predicted"] += placement.request.predicted
            self.counters["rerouted"] += bool(placement.request.exclude)
            if placement.request.blocks is not None:
                self.counters["prefill_tokens"] += placement.request.prompt_tokens
                self.counters["prefill_tokens_cached"] += placement.cached_tokens

    # -- status -----------------------------------------------------------------------

    @property
    def model_id(self) -> str:
        """Return the id of the served model."""
        return self._model_id

    @property
    def num_clients(self) -> int:
        """Return the number of connected ingresses."""
        return len(self._last_seen)

    @property
    def num_workers(self) -> int:
        """Return the number of live decode replicas."""
        return sum(replica is not None for replica in self._slots)

    def status(self) -> dict[str, Any]:
        """Return the status as JSON types; `kv_tokens`: prompt + generated tokens of requests in flight."""
        loads = self.placer.loads()
        workers = [
            {
                "worker": slot,
                "replica": replica,
                "in_flight": int(loads.in_flight[slot]),
                "kv_tokens": int(loads.kv_tokens[slot]),
                "cluster_domain": self._domain(slot),
            }
            for slot, replica in enumerate(self._slots)
            if replica is not None
        ]
        table = self._table
        return {
            "model": self._model_id,
            "policy": self._settings.policy,
            "parameters": self._settings.parameters,
            "settings_version": self._settings.version,
            "table": None
            if table is None
            else {
                "version": self._settings.table_version,
                "workers_fitted": len(table.centroids),
                "layers": len(table.spec.layers),
                "band": table.band,
                "refit_advised": len(table.centroids) != len(workers),
            },
            "predictor": self.prediction,
            "step_cost": self._step_cost(),
            "decode_totals": self._decode_totals(),
            "comparison": self.comparison.status(),
            "workers": workers,
            "leases": len(self.placer.running),
            "decode_queue": {"size": self.queue_size, "oldest_wait_s": round(self.oldest_wait_s, 3)},
            "clients": len(self._last_seen),
            "epoch": self.epoch,
            "counters": dict(
                sorted({**self.counters, "predictor_failures": self.predictor_failures}.items())
            ),
        }

    def live(self) -> dict[str, Any]:
        """Return the status and the live page's other data as JSON types."""
        layers = None if self._signature_shape is None else self._signature_shape[0]
        shown = self.view.snapshot(self.placer, self._slots, layers)
        return self.status() | {"live": shown, "policies": policy_names()}

    @property
    def predictor_failures(self) -> int:
        """Return the number of unusable predictions, under this policy and earlier ones."""
        return self._predictor_failures + self.placer.policy.predictor_failures

    @property
    def prediction(self) -> dict[str, Any] | None:
        """Return the quality of the clients' predictions against true signatures; None without a predictor.

        `cosine` and `gain` (see OnlinePredictor) are means over the prompts that clients have observed.
        `on` is the number of `clients` whose predictor is better than the mean prompt.
        """
        if self._settings.predictor is None:
            return None
        reports = list(self._predictions.values())
        prompts = sum(one["prompts"] for one in reports)
        found = {"version": self._settings.predictor_version, "clients": len(reports), "prompts": prompts}
        found["on"] = sum(one["on"] for one in reports)
        for name in ("cosine", "gain"):
            found[name] = sum(one[name] * one["prompts"] for one in reports) / max(prompts, 1)
        return found

    @property
    def queue_size(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self.placer.queue)

    @property
    def oldest_wait_s(self) -> float:
        """Return the longest current wait for a worker, s; 0 without waiting requests."""
        since_s = min((p.since_s for p in self.placer.queue.values()), default=None)
        return 0.0 if since_s is None else self._clock() - since_s

    def _step_cost(self) -> dict[str, float]:
        """Return the weighted number of steps, and the cost fitted to them, s, once it is known."""
        steps = {"steps": round(self._steps.steps, 1)}
        if self._cost is None:
            return steps
        return steps | self._cost.as_dict() | {"relative_error": self._steps.error(self._cost)}

    def _decode_totals(self) -> dict[str, float] | None:
        """Return sums over all decode steps; None until the number of MoE layers is known."""
        if self._signature_shape is None:
            return None
        steps = self._all_steps
        return {
            "steps": steps.steps,
            "requests": steps.requests,
            "active_experts": steps.experts / self._signature_shape[0],  # mean over layers
            "seconds": steps.seconds,
            "token_seconds": steps.waited,
        }

    def _domain(self, slot: int) -> str | None:
        if self._table is None or not self._table.domains:
            return None
        return self._table.domains[slot % len(self._table.domains)] or None


def _version_after(settings: Settings) -> int:
    # Milliseconds, so that settings made after a restart are newer than those that clients restore.
    return max(settings.version + 1, time.time_ns() // 1_000_000)
