"""What the DecodeRouter actor holds: workers, leases, live load, the policy and the centroid table.

Plain Python, so that every rule is tested without Ray. Nothing in here waits, so each call is atomic
in the actor's event loop: a table swap falls between two placements, never inside one.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from eldr_serve.artifacts import ArtifactError, RoutingTable
from eldr_serve.routing import (
    Decision,
    GuardedPolicy,
    LoadLedger,
    Loads,
    PlacementRequest,
    Policy,
    PolicyError,
    StepCost,
    StepSums,
    make_policy,
    worker_similarity,
)
from eldr_serve.serving.errors import SwapRefused
from eldr_serve.serving.messages import Exchange, Lease, Reply, Restore, Restored, Settings
from eldr_serve.serving.pool import Outbox, Pool, Waiting

_COST_HALF_LIFE_S = 600.0  # of a decode step's weight in the fitted cost


@dataclass
class _Running:
    """A request that holds a worker."""

    client: str
    lease: Lease
    handoff: PlacementRequest
    generated_tokens: int


class RouterState:
    """Placement of prefilled requests on decode replicas.

    A decode replica sits in a slot, and slot i serves centroid i. A replica that goes leaves its
    slot vacant (its centroid's requests go to the next most similar workers), and the next one that
    comes takes the lowest vacant slot, so that the others keep their centroids.

    Under a pooled policy requests wait in `pool` until the policy gives them workers; it is asked again
    after whatever may change its mind. A lease for a request that had to wait goes into `outbox`. How
    long a request may wait is its client's business: one that gives up is released like any other.

    Args:
        model_id: a table of another model is refused.
        policy, parameters: the policy to start with; PolicyError if there is no such one.
        table: a RoutingTable file's bytes, or None to place by load until one is swapped in.
        client_timeout_s: leases of a client that is silent for longer are dropped.
    """

    def __init__(
        self,
        *,
        model_id: str,
        policy: str,
        parameters: dict[str, Any] | None = None,
        table: bytes | None = None,
        client_timeout_s: float = 30.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self._model_id = model_id
        self._client_timeout_s = client_timeout_s
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._slots: list[str | None] = []
        # Of the slots: which are taken, and where the ledger has their loads.
        self._slot: dict[str, int] = {}  # of each replica
        self._taken = np.zeros(0, bool)
        self._places = np.zeros(0, np.int64)
        self._signature_shape: tuple[int, int] | None = None
        self._running: dict[str, _Running] = {}
        self._pool = Pool()
        self.outbox = Outbox()
        self._ledger = LoadLedger()
        self._last_seen: dict[str, float] = {}
        self.counters: Counter[str] = Counter()
        self._predictor_failures = 0  # under the policies before this one
        self._steps = StepSums()
        self._steps_at = clock()
        self._all_steps = StepSums()
        self._cost: StepCost | None = None
        self._table: RoutingTable | None = None
        self._policy = self._guarded(make_policy(policy))
        self._settings = Settings(0, policy, dict(parameters or {}), None, 0)
        self._adopt(self._checked(self._settings, table=table, table_version=0 if table is None else 1))

    # -- settings ------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self._settings

    def set_policy(self, policy: str, parameters: dict[str, Any]) -> Settings:
        """Change the policy; SwapRefused, and no change, if it or a parameter is unknown."""
        changed = Settings(
            self._next_version(), policy, dict(parameters), self._settings.table, self._settings.table_version
        )
        self._adopt(self._checked(changed, table=changed.table, table_version=changed.table_version))
        self.counters["policy_changes"] += 1
        self._post(self._dispatch())
        return self._settings

    def swap_table(self, table: bytes) -> Settings:
        """Make `table` the live one; SwapRefused, and no change, if it does not fit."""
        changed = Settings(self._next_version(), self._settings.policy, self._settings.parameters, None, 0)
        version = self._settings.table_version + 1
        self._adopt(self._checked(changed, table=table, table_version=version))
        self.counters["table_swaps"] += 1
        self._post(self._dispatch())
        return self._settings

    def expect_signatures(self, num_layers: int, num_experts: int) -> None:
        """Tell the shape that the prefill engines really report; a table of another is refused."""
        self._signature_shape = (num_layers, num_experts)

    def _next_version(self) -> int:
        # Milliseconds, so that what an operator says after a restart is newer than what clients restore.
        return max(self._settings.version + 1, time.time_ns() // 1_000_000)

    def _checked(
        self, settings: Settings, *, table: bytes | None, table_version: int
    ) -> tuple[Settings, Policy, RoutingTable | None]:
        try:
            parsed = RoutingTable.from_bytes(table) if table is not None else None
            policy = make_policy(settings.policy, **settings.parameters).with_table(parsed)
        except (ArtifactError, PolicyError) as error:
            raise SwapRefused(str(error)) from error
        if parsed is not None:
            self._check_table(parsed)
        complete = Settings(settings.version, settings.policy, settings.parameters, table, table_version)
        return complete, policy, parsed

    def _check_table(self, table: RoutingTable) -> None:
        if table.model != self._model_id:
            raise SwapRefused(f"the table is of model {table.model!r}, but {self._model_id!r} is served")
        shape = (table.num_layers, table.num_experts)
        if self._signature_shape not in (None, shape):
            raise SwapRefused(
                f"the table is for {shape[0]} MoE layers x {shape[1]} experts, but the prefill engines "
                f"report {self._signature_shape[0]} x {self._signature_shape[1]}"
            )

    def _adopt(self, checked: tuple[Settings, Policy, RoutingTable | None]) -> None:
        swapped = checked[0].table_version != self._settings.table_version
        self._predictor_failures += self._policy.policy.predictor_failures
        self._settings, policy, self._table = checked
        self._policy = self._guarded(policy)
        if swapped:
            self._pool.forget_scores()
        if self._cost is not None:
            self._policy.update_cost_model(self._cost)
        self._tell_policy_all()

    def _guarded(self, policy: Policy) -> GuardedPolicy:
        return GuardedPolicy(policy, lambda: self.counters.update(policy_errors=1))

    def observe_steps(self, steps: StepSums) -> None:
        """Take what decode engines measured; the policy follows the cost fitted to recent steps."""
        now = self._clock()
        self._all_steps += steps
        keep = 0.5 ** ((now - self._steps_at) / _COST_HALF_LIFE_S)
        self._steps, self._steps_at = self._steps.faded(keep) + steps, now
        self._cost = self._steps.fit() or self._cost
        if self._cost is not None:
            self._policy.update_cost_model(self._cost)

    # -- workers and clients ---------------------------------------------------------------------

    def update_workers(self, replicas: Iterable[str]) -> None:
        """Take the live decode replicas; leases of one that is gone stay until their client lets go."""
        self._set_workers(replicas)
        self._post(self._dispatch())

    def _set_workers(self, replicas: Iterable[str]) -> None:
        live, before = set(replicas), list(self._slots)
        self._slots = [replica if replica in live else None for replica in self._slots]
        for replica in sorted(live.difference(filter(None, self._slots))):
            if None in self._slots:
                self._slots[self._slots.index(None)] = replica
            else:
                self._slots.append(replica)
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        if self._slots != before:
            self._slot = {replica: slot for slot, replica in enumerate(self._slots) if replica is not None}
            self._taken = np.array([replica is not None for replica in self._slots], bool)
            self._places = self._ledger.places(self._slots)
            self._tell_policy_all()

    def restore(self, message: Restore) -> Restored:
        """Take back from a client what an earlier incarnation of this actor knew.

        What waits in the pool is not restored: the client asks for it again.
        """
        self._last_seen[message.client] = self._clock()
        if message.workers:
            self._set_workers(message.workers)
        settings = message.settings
        if settings is not None and settings.version > self._settings.version:
            self._adopt(self._checked(settings, table=settings.table, table_version=settings.table_version))
            self.counters["settings_restored"] += 1
        for lease in message.leases:
            if lease.request_id not in self._running:
                self._hold(message.client, lease, _handoff_of(lease))
                self.counters["leases_restored"] += 1
        self._post(self._dispatch())
        return Restored(self.epoch, self._settings)

    def drop_silent_clients(self) -> int:
        """Release what clients hold that have not been heard of; returns how many leases."""
        now = self._clock()
        silent = {c for c, seen in self._last_seen.items() if now - seen > self._client_timeout_s}
        lost = [request for request, running in self._running.items() if running.client in silent]
        for request in lost:
            self._release(request)
        self.counters["pooled_of_lost_clients"] += self._pool.drop_clients(silent)
        for client in silent:
            del self._last_seen[client]
            self.outbox.drop(client)
        self.counters["leases_of_lost_clients"] += len(lost)
        if lost:
            self._post(self._dispatch())
        return len(lost)

    # -- placement -------------------------------------------------------------------------------

    def exchange(self, message: Exchange) -> Reply:
        """Progress and release first, so that placements see the newest load."""
        if message.known_epoch != self.epoch or message.client not in self._last_seen:
            return Reply(self.epoch, self._settings.version, refused="unknown-client")
        self._last_seen[message.client] = self._clock()
        self.counters.update(message.events)
        self._progress(message.progress)
        for request in message.released:
            self._release(request)
        for lease in message.held:
            handoff = self._handoff_known(lease)
            self._release(lease.request_id)
            self._hold(message.client, lease, handoff)
            self.counters["placed_by_client"] += 1
        asked_again = {r.request_id for r in message.placements if r.request_id in self._pool}
        placed = {r.request_id: self._place(message.client, r) for r in message.placements}
        granted = self._dispatch()
        for request_id in placed.keys() & granted.keys():
            placed[request_id] = granted.pop(request_id)
        self._post(granted)
        pooled = frozenset(request_id for request_id in placed if request_id in self._pool)
        self.counters["pooled"] += len(pooled - asked_again)
        leases = tuple(placed[r.request_id] for r in message.placements)
        return Reply(self.epoch, self._settings.version, leases, pooled)

    def _handoff_known(self, lease: Lease) -> PlacementRequest:
        known = self._running.get(lease.request_id) or self._pool.get(lease.request_id)
        return _handoff_of(lease) if known is None else known.handoff

    def _progress(self, generated_tokens: dict[str, int]) -> None:
        known = {
            request_id: tokens
            for request_id, tokens in generated_tokens.items()
            if request_id in self._running and tokens > self._running[request_id].generated_tokens
        }
        for request_id, tokens in known.items():
            self._running[request_id].generated_tokens = tokens
            self._ledger.progress(request_id, tokens)
        if known:
            self._policy.on_progress(known)

    def _place(self, client: str, request: PlacementRequest) -> Lease | None:
        """The request's lease; None if it waits in the pool from now on, or cannot be placed."""
        if request.similarity is not None and request.table_version != self._settings.table_version:
            return None  # scored with another table: the caller fetches this one and asks again
        loads = self._loads(request.exclude)
        if not loads.available.any():
            loads = self._loads(())
        if not loads.available.any():
            return None
        if self._policy.pooled and request.may_wait and not request.exclude:
            self._leave(request.request_id)
            self._pool.add(Waiting(client, request, request, self._clock()))
            return None
        handoff = request
        return self._lease(client, request, handoff, self._policy.select(handoff, loads, self._rng), loads)

    def _dispatch(self) -> dict[str, Lease]:
        """Give workers to requests of the pool, as the policy says; the leases by request id."""
        if not len(self._pool):
            return {}
        loads = self._loads(())
        if not loads.available.any():
            return {}
        return {
            w.request.request_id: self._lease(w.client, w.request, w.handoff, decision, loads, w.since_s)
            for w, decision in self._decisions(self._pool.waiting)
        }

    def _decisions(self, waiting: list[Waiting]) -> Iterator[tuple[Waiting, Decision]]:
        if self._policy.pooled:
            handoffs = [w.handoff for w in waiting]
            for index, decision in self._policy.dispatch(handoffs, self._loads(()), self._rng):
                yield waiting[index], decision
        else:  # the policy was changed: nobody waits under this one
            for w in waiting:
                yield w, self._policy.select(w.handoff, self._loads(()), self._rng)

    def _post(self, granted: dict[str, Lease]) -> None:
        for request_id, lease in granted.items():
            self.outbox.put(self._running[request_id].client, lease)

    def _lease(
        self,
        client: str,
        request: PlacementRequest,
        handoff: PlacementRequest,
        decision: Decision,
        loads: Loads,
        since_s: float | None = None,
    ) -> Lease:
        replica = self._slots[decision.worker]
        assert replica is not None, "a policy chose a vacant slot"
        lease = Lease(
            request.request_id,
            replica,
            request.prompt_tokens,
            request.max_new_tokens,
            request.prompt_key,
            decision.worker,
            decision.band,
            decision.similarity,
            _is_best(decision.worker, handoff, loads),
            decision.reason,
            self._policy.name,
            waited_s=0.0 if since_s is None else self._clock() - since_s,
        )
        self._release(request.request_id)  # a request that is placed again leaves its first worker
        self._hold(client, lease, handoff, decision)
        self.counters["placed"] += 1
        self.counters[f"reason:{decision.reason}"] += 1
        self.counters["best_worker"] += lease.best
        self.counters["signature_missing"] += request.signature_missing
        self.counters["rerouted"] += bool(request.exclude)
        return lease

    def _loads(self, exclude: tuple[str, ...]) -> Loads:
        available = self._taken.copy()
        available[[self._slot[replica] for replica in exclude if replica in self._slot]] = False
        return self._ledger.loads(self._places, available)

    def _hold(
        self, client: str, lease: Lease, handoff: PlacementRequest, decision: Decision | None = None
    ) -> None:
        self._running[lease.request_id] = _Running(client, lease, handoff, lease.generated_tokens)
        self._ledger.add(lease.request_id, lease.replica, lease.prompt_tokens)
        self._ledger.progress(lease.request_id, lease.generated_tokens)
        self._tell_policy(self._running[lease.request_id], decision)

    def _release(self, request_id: str) -> None:
        """The request neither waits nor runs any more."""
        self._pool.discard(request_id)
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            self.outbox.withdraw(running.client, request_id)
            self._ledger.release(request_id)
            self._policy.on_finished(request_id)

    def _tell_policy(self, running: _Running, decision: Decision | None = None) -> None:
        request_id, slot = running.lease.request_id, self._slot.get(running.lease.replica)
        if slot is None:
            self._policy.on_finished(request_id)
            return
        self._policy.on_assigned(running.handoff, slot, decision)
        if running.generated_tokens:
            self._policy.on_progress({request_id: running.generated_tokens})

    def _tell_policy_all(self) -> None:
        """Workers sit in other slots now, or the policy is a new one."""
        for running in self._running.values():
            self._tell_policy(running)

    # -- what people look at -----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """JSON-able; `kv_tokens` are prompt + generated tokens of the requests in flight."""
        loads = self._loads(())
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
            "step_cost": self._step_cost(),
            "decode_totals": self._decode_totals(),
            "workers": workers,
            "leases": len(self._running),
            "pool": {"size": len(self._pool), "oldest_wait_s": round(self.oldest_wait_s, 3)},
            "clients": len(self._last_seen),
            "epoch": self.epoch,
            "counters": dict(
                sorted({**self.counters, "predictor_failures": self.predictor_failures}.items())
            ),
        }

    @property
    def predictor_failures(self) -> int:
        """Predictions that could not be used, under this policy and those before it."""
        return self._predictor_failures + self._policy.policy.predictor_failures

    @property
    def pool_size(self) -> int:
        """Requests that wait for a worker."""
        return len(self._pool)

    @property
    def oldest_wait_s(self) -> float:
        """How long the request that came first has waited, s; 0 in an empty pool."""
        since_s = self._pool.since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def _step_cost(self) -> dict[str, float]:
        """The fitted cost, s, once there is one; from how many steps, older ones counting less."""
        steps = {"steps": round(self._steps.steps, 1)}
        if self._cost is None:
            return steps
        return steps | self._cost.as_dict() | {"relative_error": self._steps.error(self._cost)}

    def _decode_totals(self) -> dict[str, float] | None:
        """Sums over all decode steps so far; None until the number of MoE layers is known."""
        if self._signature_shape is None:
            return None
        steps = self._all_steps
        return {
            "steps": steps.steps,
            "requests": steps.requests,
            "active_experts": steps.experts / self._signature_shape[0],  # mean over layers
            "seconds": steps.seconds,
        }

    def _domain(self, slot: int) -> str | None:
        if self._table is None or not self._table.domains:
            return None
        return self._table.domains[slot % len(self._table.domains)] or None


def _handoff_of(lease: Lease) -> PlacementRequest:
    return PlacementRequest(
        lease.request_id,
        lease.counts,
        lease.prompt_tokens,
        lease.max_new_tokens,
        prompt_key=lease.prompt_key,
    )


def _is_best(worker: int, handoff: PlacementRequest, loads: Loads) -> bool:
    if handoff.similarity is None:
        return False
    similarity = worker_similarity(handoff.similarity, len(loads))
    return bool(similarity[worker] >= similarity[loads.available].max())
