"""Ray settings that reduce the idle work of Ray and Serve.

They are read from the environment when Ray's processes start, so they are set where Ray is started.
"""

from __future__ import annotations

# docs/operations.md says what each costs.
QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_metrics_report_interval_ms": "60000",
}
