"""Grafana's dashboards: three, each of rows of panels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WIDTH, _ACROSS, _HEIGHT = 24, 3, 8  # width of Grafana's grid; panels in a row, and their height
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    """Curves over time.

    Attributes:
        unit: Grafana's name of the unit.
        curves: PromQL by legend; `{{label}}` in a legend is the label's value.
        about: how to read it.
    """

    title: str
    unit: str
    curves: dict[str, str]
    about: str = ""


Rows = dict[str, list[Panel]]


def _rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(ray_eldr_{counter}_total[5m]))"


def _rates(**counters: str) -> dict[str, str]:
    return {legend.replace("_", " "): _rate(counter) for legend, counter in counters.items()}


def _quantiles(histogram: str) -> dict[str, str]:
    return {
        f"p{share}": f"histogram_quantile(0.{share}, sum by (le) (rate(ray_eldr_{histogram}_bucket[5m])))"
        for share in (50, 99)
    }


def _a_step(total: str) -> dict[str, str]:
    """Return the mean of a total over decode steps, for each engine."""
    by = "ReplicaId"
    return {"{{ReplicaId}}": f"{_rate(total, by)} / {_rate('decode_steps', by)}"}


SERVICE: Rows = {
    "Clients": [
        Panel("Requests placed", "reqps", _rates(placed="placed")),
        Panel("Time to first token", "s", _quantiles("ttft_seconds"), "Of streams that have ended."),
        Panel("Time per output token", "s", _quantiles("tpot_seconds"), "Of streams that have ended."),
        Panel(
            "Refused", "reqps",
            _rates(
                places_429="refused_overload", limits_429="refused_limits",
                prefill_503="refused_prefill_full", backlog_503="refused_prefill_backlog",
                decode_503="queue_expired", seats_503="refused_decode_backlog",
            ),
        ),
        Panel(
            "In the ingresses", "short",
            {
                "in flight": "sum(ray_eldr_ingress_in_flight)", "waiting": "sum(ray_eldr_ingress_waiting)",
                "with a lease": "sum(ray_eldr_ingress_leases)",
            },
        ),
        Panel(
            "Stages, p50", "s", {"{{stage}}": 'max by (stage) (ray_eldr_stage_seconds{quantile="0.5"})'},
            "Of the newest 256 requests of the slowest ingress.",
        ),
    ],
    "Failures": [
        Panel(
            "Streams", "reqps", _rates(lost="streams_lost", resumed="resumed", slow_clients="slow_clients")
        ),
        Panel(
            "Tried again", "reqps",
            _rates(
                prefill="prefill_retries", decode="reroute", set_aside="set_aside",
                without_prefill="whole_without_prefill",
            ),
        ),
        Panel(
            "Readiness", "short",
            {
                "ingresses ready": "sum(ray_eldr_ingress_ready)",
                "ingresses without router": "sum(ray_eldr_ingress_router_away)",
                "{{deployment}} replicas": "sum by (deployment) (ray_serve_deployment_replica_healthy)",
            },
            "Healthy replicas are Ray Serve's own count.",
        ),
        Panel(
            "Errors inside", "reqps",
            _rates(policy="policy_errors", predictor="predictor_failures", shadow="shadow_errors",
                   router_lost="router_lost"),
        ),
        Panel(
            "Leases of lost ingresses", "reqps",
            _rates(leases="leases_of_lost_clients", queued="queued_of_lost_clients",
                   restored="leases_restored"),
        ),
        Panel(
            "Memory of nodes", "percentunit",
            {"{{ip}}": "max by (ip) (ray_node_mem_used) / max by (ip) (ray_node_mem_total)"},
        ),
    ],
    "Event loops": [
        Panel(
            "Stood still for 0.5 s or longer", "short", {"{{role}}": _rate("loop_stalls", "role")},
            "A second. While a loop stands still, nothing of its process goes on.",
        ),
        Panel(
            "Longest stall", "s", {"{{role}}": "max by (role) (ray_eldr_loop_longest_stall_seconds)"},
            "Since each process began.",
        ),
        Panel("Tasks", "short", {"{{role}}": "max by (role) (ray_eldr_loop_tasks)"}),
    ],
}  # fmt: skip

PLACEMENT: Rows = {
    "What it saves": [
        Panel(
            "Live policy against its shadow", "percentunit",
            {
                "change": "max by (policy, shadow) (ray_eldr_shadow_change_ratio)",
                "low": "max by (policy, shadow) (ray_eldr_shadow_change_low_ratio)",
                "high": "max by (policy, shadow) (ray_eldr_shadow_change_high_ratio)",
            },
            "Decode step time a token waits for, less 1; below 0 the live policy is faster. "
            "Empty without a shadow.",
        ),
        Panel(
            "Decode step time a token waits for", "s",
            {
                "priced": "max(ray_eldr_shadow_live_seconds)",
                "measured": "max(ray_eldr_shadow_measured_seconds)",
                "measured, 5 min": f"{_rate('decode_token_seconds')} / {_rate('decode_step_requests')}",
            },
            "Under the live policy. Where priced and measured part, the figure beside it is as wrong.",
        ),
        Panel(
            "Placed, by the rule that decided", "reqps",
            {"{{reason}}": _rate("placed_by_reason", "reason")},
        ),
        Panel(
            "On the most similar worker", "percentunit",
            {"share": f"{_rate('best_worker')} / {_rate('placed')}"},
            "Only policies with a routing table know one.",
        ),
    ],
    "Workers": [
        Panel(
            "Requests of each worker", "short", {"{{worker}}": "sum by (worker) (ray_eldr_decode_in_flight)"}
        ),
        Panel(
            "KV tokens of each worker", "short", {"{{worker}}": "sum by (worker) (ray_eldr_decode_kv_tokens)"}
        ),
        Panel("Workers chosen among", "short", _quantiles("band_size")),
        Panel(
            "Decode queue", "short",
            {"size": "sum(ray_eldr_decode_queue_size)"} | _rates(queued_a_second="queued"),
        ),
        Panel(
            "Wait in the decode queue", "s",
            {"oldest": "max(ray_eldr_decode_queue_oldest_wait_seconds)"}
            | _quantiles("decode_queue_wait_seconds"),
        ),
        Panel("Time to place a batch", "s", _quantiles("route_seconds")),
    ],
    "Signatures": [
        Panel(
            "Placed without a true signature", "reqps",
            _rates(missing="signature_missing", predicted="signature_predicted",
                   known_later="signatures_returned"),
        ),
        Panel(
            "Predictor", "short",
            {
                "gain": "max(ray_eldr_predictor_gain)", "cosine": "max(ray_eldr_predictor_cosine)",
                "processes that use it": "max(ray_eldr_predictor_on)",
            },
        ),
        Panel(
            "Policy and table", "short",
            {
                "table of {{policy}}": "max by (policy) (ray_eldr_table_version)",
                "refit advised": "max(ray_eldr_refit_advised)",
                "error of the step cost": "max(ray_eldr_step_cost_error_ratio)",
            },
        ),
    ],
}  # fmt: skip

ENGINES: Rows = {
    "Decode steps": [
        Panel(
            "Active experts of a step", "short", _a_step("decode_step_experts"), "Mean over MoE layers."
        ),
        Panel("Requests of a step", "short", _a_step("decode_step_requests")),
        Panel(
            "Predicted wait for prefill", "s",
            {"{{worker}}": "max by (worker) (ray_eldr_prefill_wait_seconds)"},
        ),
        Panel("Time of a step", "s", _a_step("decode_seconds")),
        Panel("Steps", "ops", {"{{ReplicaId}}": _rate("decode_steps", "ReplicaId")}),
        Panel("Counting experts, a step", "s", _quantiles("capture_seconds")),
        Panel(
            "Preempted by vLLM", "reqps",
            {"{{ReplicaId}}": "sum by (ReplicaId) (rate(ray_vllm_num_preemptions_total[5m]))"},
        ),
    ],
    "Memory": [
        Panel(
            "KV blocks in use, prefill", "percentunit",
            {"{{worker}}": "max by (worker) (ray_eldr_prefill_kv_usage_ratio)"},
        ),
        Panel(
            "KV blocks in use, decode", "percentunit",
            {"{{worker}}": "max by (worker) (ray_eldr_decode_kv_usage_ratio)"},
        ),
        Panel(
            "Prefill calls", "short",
            {"{{worker}}": "sum by (worker) (ray_eldr_ingress_prefill_in_flight)"},
        ),
        Panel(
            "Waiting in vLLM", "short",
            {"{{ReplicaId}}": "sum by (ReplicaId) (ray_vllm_num_requests_waiting)"},
        ),
    ],
}  # fmt: skip

DASHBOARDS = {"service": SERVICE, "placement": PLACEMENT, "engines": ENGINES}


def dashboard(name: str) -> dict[str, Any]:
    """Return Grafana's JSON of one of DASHBOARDS."""
    return {
        "uid": f"eldr-{name}",
        "title": f"eldr: {name}",
        "tags": ["eldr"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "links": [{"type": "dashboards", "tags": ["eldr"], "title": "eldr", "asDropdown": False}],
        "panels": list(_panels(DASHBOARDS[name])),
    }


def _panels(rows: Rows) -> Iterator[dict[str, Any]]:
    y, number = 0, 0
    for title, panels in rows.items():
        number += 1
        grid = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []}
        y += 1
        for at, panel in enumerate(panels):
            number += 1
            down, across = divmod(at, _ACROSS)
            width = _WIDTH // _ACROSS
            yield _panel(panel, number, x=across * width, y=y + down * _HEIGHT, width=width)
        y += _HEIGHT * -(-len(panels) // _ACROSS)


def _panel(panel: Panel, number: int, *, x: int, y: int, width: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 5}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for at, (legend, expr) in enumerate(panel.curves.items())
        ],
    }
