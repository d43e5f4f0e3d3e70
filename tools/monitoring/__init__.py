"""Alert rules and dashboards, written out of a short description: `python -m tools.monitoring`."""
