"""A policy for Serve's autoscaler: as many engines as their requests in flight ask for.

Serve counts the requests that go through its own handles. Ours go through channels, so its default policy
sees none. Each engine reports its own count by `record_autoscaling_stats`.
Serve's controller runs the policy, and applies bounds, delays and factors to what it returns; this module
travels to it by value, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

IN_FLIGHT = "in_flight"  # the reported count's name


def by_requests_in_flight(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Engines so that each has `target_ongoing_requests`, by means over `look_back_period_s`.

    An engine that has not reported yet counts as idle, and while there is one no engine is taken away.
    """
    reported = (ctx.aggregated_metrics or {}).get(IN_FLIGHT, {})
    desired = sum(reported.values()) / ctx.config.get_target_ongoing_requests()
    if any(replica not in reported for replica in ctx.running_replicas) or not ctx.running_replicas:
        desired = max(desired, ctx.target_num_replicas)
    return desired, {}
