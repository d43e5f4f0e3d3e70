"""Autoscaling policy for Ray Serve: scale engines by requests in flight and by KV cache usage.

Serve counts only requests that go through its own handles, but the ingress sends requests over channels, so
Serve's default policy would see none. Therefore each engine reports, through `record_autoscaling_stats`, its
requests in flight (a decode engine adds its share of the router's decode queue) and its KV cache usage.
Serve's controller runs the policy and applies bounds, delays and factors to its result. Ray sends this module
to the controller by value, so it imports nothing of eldr_serve.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

IN_FLIGHT = "in_flight"  # name of the reported count
KV_IN_USE = "kv_in_use"  # name of the reported share of KV blocks in use
KV_TARGET = 0.8  # target of the mean share; above it, requests are soon preempted or refused


def compute_desired_replicas(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the desired number of engines.

    On average over `look_back_period_s`, each engine then has at most `target_ongoing_requests`, and at most
    KV_TARGET of its KV blocks in use. An engine that has not reported yet counts as idle; while there is one,
    the number does not fall.
    """
    reported = (ctx.aggregated_metrics or {}).get(IN_FLIGHT, {})
    desired = sum(reported.values()) / ctx.config.get_target_ongoing_requests()
    kv_in_use = (ctx.aggregated_metrics or {}).get(KV_IN_USE, {})
    desired = max(desired, sum(kv_in_use.values()) / KV_TARGET)
    if any(replica not in reported for replica in ctx.running_replicas) or not ctx.running_replicas:
        desired = max(desired, ctx.target_num_replicas)
    return desired, {}
