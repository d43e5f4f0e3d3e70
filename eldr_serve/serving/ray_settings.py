"""Ray's own settings under which requests take the shortest way; environment of all processes of Ray.

They are read when Ray's processes start and import Ray Serve, so they are set where Ray is started.
"""

from __future__ import annotations

# HAProxy in front (ray[serve] brings it), which forwards to a uvicorn in each ingress replica.
SHORT_WAY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}

# What Ray and Serve do while nothing happens, less often; see docs/data_path.md for what each costs.
QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_metrics_report_interval_ms": "60000",
}
