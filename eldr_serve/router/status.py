"""The router's part of `GET /eldr/status`, as JSON types."""

from __future__ import annotations

from typing import Any

from eldr_serve.metrics import RouterEvent
from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import policy_names


def router_status(state: RouterState) -> dict[str, Any]:
    """Return the status.

    `kv_tokens`: prompt + generated tokens of requests in flight. `cached_blocks`: number of blocks in the
    prefix cache as the engine reports it; None if the engine reports no blocks, so the cache is estimated.
    """
    workers, settings, leases = _workers(state), state.settings, state.leases
    return {
        "model": state.model_id,
        "policy": settings.policy,
        "parameters": settings.parameters,
        "settings_version": settings.version,
        "table": _table(state),
        "predictor": _prediction(state),
        "step_cost": state.costs.status(),
        "decode_totals": state.costs.totals(_num_layers(state)),
        "comparison": state.comparison.status(),
        "workers": workers,
        "leases": len(state.placer.running),
        "decode_queue": {"size": leases.queue_size, "oldest_wait_s": round(leases.oldest_wait_s, 3)},
        "ingresses": len(state.ingresses.ids),
        "epoch": state.epoch,
        "counters": _counters(state),
    }


def live_status(state: RouterState) -> dict[str, Any]:
    """Return the status and the live page's other data."""
    page = state.view.snapshot(state.placer, _num_layers(state))
    return router_status(state) | {"live": page, "policies": policy_names()}


def _counters(state: RouterState) -> dict[str, int]:
    """Return the counters in alphabetical order, with unusable predictions of the live policy."""
    key = RouterEvent.PREDICTOR_FAILURES
    counters = {**state.counters, key: state.counters[key] + state.placer.policy.predictor_failures}
    return {str(name): count for name, count in sorted(counters.items())}


def _prediction(state: RouterState) -> dict[str, Any] | None:
    """Return how well the ingresses' predictions agree with measured counts; None without a predictor.

    `cosine` and `gain` (see OnlinePredictor) are means over the prompts that ingresses have observed.
    `on` is the number of `ingresses` whose predictor is better than the mean prompt.
    """
    if state.settings.predictor is None:
        return None
    reports = list(state.ingresses.predictions.values())
    prompts = sum(report["prompts"] for report in reports)
    quality = {"version": state.settings.predictor_version, "ingresses": len(reports), "prompts": prompts}
    quality["on"] = sum(report["on"] for report in reports)
    for name in ("cosine", "gain"):
        quality[name] = sum(report[name] * report["prompts"] for report in reports) / max(prompts, 1)
    return quality


def _num_layers(state: RouterState) -> int | None:
    return None if state.counts_shape is None else state.counts_shape[0]


def _workers(state: RouterState) -> list[dict[str, Any]]:
    loads, table = state.placer.workers.loads(), state.live_settings.table
    domains = None if table is None else table.domains
    return [
        {
            "position": position,
            "worker": worker,
            "in_flight": int(loads.in_flight[position]),
            "kv_tokens": int(loads.kv_tokens[position]),
            "cached_blocks": state.placer.workers.prefixes.reported_blocks(worker),
            "cluster_domain": (domains[position % len(domains)] or None) if domains else None,
        }
        for position, worker in enumerate(state.positions.workers)
        if worker is not None
    ]


def _table(state: RouterState) -> dict[str, Any] | None:
    table = state.live_settings.table
    if table is None:
        return None
    return {
        "version": state.settings.table_version,
        "workers_fitted": len(table.centroids),
        "layers": len(table.spec.layers),
        "band": table.band,
        "refit_advised": len(table.centroids) != state.positions.num_live,
    }
