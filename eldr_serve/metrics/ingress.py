"""Metrics of each ingress replica, by their keys under `ingress` in the status."""

from __future__ import annotations

from dataclasses import replace

from eldr_serve.metrics.definition import COUNTER, GAUGE, HISTOGRAM, Metric, index_by_name

_WITH_PREFILL = "with prefill engines"

INGRESS_STATUS = {
    "ready": Metric("eldr_ingress_ready", GAUGE, "0 or 1", "1: the ingress is ready for requests"),
    "all_warm": Metric(
        "eldr_ingress_all_warm", GAUGE, "0 or 1", "1: all pairs of running engines have exchanged blocks"
    ),
    "router_unreachable": Metric(
        "eldr_ingress_router_unreachable", GAUGE, "0 or 1", "1: the ingress cannot reach the router"
    ),
    "in_flight": Metric("eldr_ingress_in_flight", GAUGE, "requests", "requests admitted that have not ended"),
    "waiting": Metric("eldr_ingress_waiting", GAUGE, "requests", "requests that wait for admission"),
    "leases": Metric("eldr_ingress_leases", GAUGE, "requests", "requests that hold a lease of a worker"),
    "warm_pairs": Metric("eldr_ingress_warm_pairs", GAUGE, "pairs", "engine pairs that exchanged blocks"),
    "prefill_in_flight": Metric(
        "eldr_ingress_prefill_in_flight",
        GAUGE,
        "calls",
        "open calls to the prefill replica",
        ("worker",),
        only=_WITH_PREFILL,
    ),
    "prefill_oldest_s": Metric(
        "eldr_prefill_oldest_seconds",
        GAUGE,
        "s",
        "age of the oldest open call to the prefill replica",
        ("worker",),
        only=_WITH_PREFILL,
    ),
    "prefill_wait_s": Metric(
        "eldr_prefill_wait_seconds",
        GAUGE,
        "s",
        "predicted wait of a prompt that arrives now at the replica",
        ("worker",),
    ),
    "prefill_kv_usage": Metric(
        "eldr_prefill_kv_usage_ratio",
        GAUGE,
        "ratio",
        "share of the prefill replica's KV blocks in use",
        ("worker",),
        only=_WITH_PREFILL,
    ),
    "decode_kv_usage": Metric(
        "eldr_decode_kv_usage_ratio",
        GAUGE,
        "ratio",
        "share of the decode replica's KV blocks in use",
        ("worker",),
    ),
    "stages": Metric(
        "eldr_stage_seconds",
        HISTOGRAM,
        "s",
        "time of a stage of a request until its first token",
        ("stage",),
        (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60),
        only="with prefill engines, once a request was served",
    ),
}
INGRESS_STATUS = {key: replace(metric, status=f"ingress.{key}") for key, metric in INGRESS_STATUS.items()}

_MOVABLE = "with expert-parallel decode engines on CPU"

# Metrics of each decode replica, by their keys under `ingress.experts.REPLICA`.
EXPERTS = {
    "slices_left": Metric(
        "eldr_expert_slices_left",
        GAUGE,
        "slices",
        "remaining slices of a swap of the expert placement",
        ("worker",),
        only=_MOVABLE,
    ),
    "experts_moved": Metric(
        "eldr_experts_moved_total",
        COUNTER,
        "experts",
        "experts moved between slots since the replica's start",
        ("worker",),
        only=_MOVABLE,
    ),
    "replica_bytes": Metric(
        "eldr_expert_replica_bytes",
        GAUGE,
        "bytes",
        "memory of the slots for expert replicas, summed over all ranks",
        ("worker",),
        only=_MOVABLE,
    ),
}
EXPERTS = {key: replace(metric, status=f"ingress.experts.REPLICA.{key}") for key, metric in EXPERTS.items()}

# Metrics of predicted latencies, by their keys under `ingress.objectives.ttft` and `.tpot`.
_LATENCY_PREDICTION = {
    "requests": ("eldr_predicted_requests_total", COUNTER, "requests", "measured answers with an objective"),
    "met": ("eldr_objectives_met_total", COUNTER, "requests", "answers whose latency met their objective"),
    "predicted_s": ("eldr_predicted_seconds_total", COUNTER, "s", "sum of predicted latencies"),
    "measured_s": ("eldr_measured_seconds_total", COUNTER, "s", "sum of measured latencies"),
    "error_s": ("eldr_prediction_error_seconds_total", COUNTER, "s", "sum of absolute prediction errors"),
    "margin_s": (
        "eldr_prediction_margin_seconds",
        GAUGE,
        "s",
        "safety margin added to a prediction, so that it covers 97.5 % of recent answers",
    ),
}
LATENCY_PREDICTION = {
    key: Metric(*definition, ("latency",), status=f"ingress.objectives.LATENCY.{key}")
    for key, definition in _LATENCY_PREDICTION.items()
}
INGRESS = index_by_name(*INGRESS_STATUS.values(), *EXPERTS.values(), *LATENCY_PREDICTION.values())
