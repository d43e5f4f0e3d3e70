"""The router's part of `GET /eldr/status`, as JSON types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.router.comparison import Comparison
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.messages import Settings
from eldr_serve.router.settings_check import SettingsCheck
from eldr_serve.router.step_costs import StepCosts
from eldr_serve.scheduling import Placer, policy_names


class RouterStatus:
    """What the router's state reports.

    Attributes:
        settings: the live settings.
        table: the live table.
        clients: ids of the clients, also of lost ones until they are dropped.
        positions: the replica in each position.
        predictions: quality of each client's predictions, see OnlinePredictor.status.
        earlier_failures: number of unusable predictions under earlier policies.
    """

    epoch: str
    settings: Settings
    table: RoutingTable | None
    placer: Placer
    check: SettingsCheck
    costs: StepCosts
    comparison: Comparison
    view: LiveView
    counters: Counter[str]
    clients: set[str]
    positions: list[str | None]
    predictions: dict[str, dict[str, Any]]
    earlier_failures: int
    clock: Callable[[], float]

    def status(self) -> dict[str, Any]:
        """Return the status; `kv_tokens`: prompt + generated tokens of requests in flight."""
        workers, live = self._workers(), self.settings
        return {
            "model": self.check.model_id,
            "policy": live.policy,
            "parameters": live.parameters,
            "settings_version": live.version,
            "table": self._table(len(workers)),
            "predictor": self.prediction,
            "step_cost": self.costs.status(),
            "decode_totals": self.costs.totals(self._layers),
            "comparison": self.comparison.status(),
            "workers": workers,
            "leases": len(self.placer.running),
            "decode_queue": {"size": self.queue_size, "oldest_wait_s": round(self.oldest_wait_s, 3)},
            "clients": len(self.clients),
            "epoch": self.epoch,
            "counters": dict(
                sorted({**self.counters, "predictor_failures": self.predictor_failures}.items())
            ),
        }

    def live(self) -> dict[str, Any]:
        """Return the status and the live page's other data."""
        shown = self.view.snapshot(self.placer, self.positions, self._layers)
        return self.status() | {"live": shown, "policies": policy_names()}

    @property
    def num_workers(self) -> int:
        """Return the number of live decode replicas."""
        return sum(replica is not None for replica in self.positions)

    @property
    def predictor_failures(self) -> int:
        """Return the number of unusable predictions, under this policy and earlier ones."""
        return self.earlier_failures + self.placer.policy.predictor_failures

    @property
    def prediction(self) -> dict[str, Any] | None:
        """Return the quality of the clients' predictions against measured counts; None without a predictor.

        `cosine` and `gain` (see OnlinePredictor) are means over the prompts that clients have observed.
        `on` is the number of `clients` whose predictor is better than the mean prompt.
        """
        if self.settings.predictor is None:
            return None
        reports = list(self.predictions.values())
        prompts = sum(one["prompts"] for one in reports)
        found = {"version": self.settings.predictor_version, "clients": len(reports), "prompts": prompts}
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
        since_s = min((lease.since_s for lease in self.placer.queue.values()), default=None)
        return 0.0 if since_s is None else self.clock() - since_s

    @property
    def _layers(self) -> int | None:
        return None if self.check.shape is None else self.check.shape[0]

    def _workers(self) -> list[dict[str, Any]]:
        loads = self.placer.loads()
        domains = None if self.table is None else self.table.domains
        return [
            {
                "worker": position,
                "replica": replica,
                "in_flight": int(loads.in_flight[position]),
                "kv_tokens": int(loads.kv_tokens[position]),
                "cluster_domain": (domains[position % len(domains)] or None) if domains else None,
            }
            for position, replica in enumerate(self.positions)
            if replica is not None
        ]

    def _table(self, workers: int) -> dict[str, Any] | None:
        table = self.table
        if table is None:
            return None
        return {
            "version": self.settings.table_version,
            "workers_fitted": len(table.centroids),
            "layers": len(table.spec.layers),
            "band": table.band,
            "refit_advised": len(table.centroids) != workers,
        }
