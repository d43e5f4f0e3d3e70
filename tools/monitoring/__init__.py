"""Alert rules and dashboards, generated from a short description: `python -m tools.monitoring`."""
