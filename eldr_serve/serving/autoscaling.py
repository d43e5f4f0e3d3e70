"""A policy for Serve's autoscaler: as many engines as their requests and their KV caches ask for.

Serve counts the requests that go through its own handles. Ours go through channels, so its default policy
sees none. Each engine reports by `record_autoscaling_stats`: requests in flight, of a decode engine with its
share of those that wait in the router's decode queue, and how full its KV cache is.
Serve's controller runs the policy, and applies bounds, delays and factors to what it returns; this module
travels to it by value, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

IN_FLIGHT = "in_flight"  # the reported count's name
KV_IN_USE = "kv_in_use"  # and that of the share of KV blocks in use
KV_TARGET = 0.8  # mean share that engines are wanted for; above it requests are preempted or refused soon


def by_requests_in_flight(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Engines so that each has `target_ongoing_requests`, and KV blocks in use below KV_TARGET, whichever is
    more; by means over `look_back_period_s`.

    An engine that has not reported yet counts as idle, and while there is one no engine is taken away.
    """
    reported = (ctx.aggregated_metrics or {}).get(IN_FLIGHT, {})
    desired = sum(reported.values()) / ctx.config.get_target_ongoing_requests()
    kv_in_use = (ctx.aggregated_metrics or {}).get(KV_IN_USE, {})
    desired = max(desired, sum(kv_in_use.values()) / KV_TARGET)
    if any(replica not in reported for replica in ctx.running_replicas) or not ctx.running_replicas:
        desired = max(desired, ctx.target_num_replicas)
    return desired, {}
