"""Metrics of each process, by their keys under `loops.ROLE` in the status."""

from __future__ import annotations

from dataclasses import replace

from eldr_serve.metrics.definition import COUNTER, GAUGE, Metric, index_by_name

STALL_S = 0.5  # longest time that an event loop may be blocked, s

_ROLE = ("role",)  # router, ingress, prefill or decode; /eldr/status shows router and ingress

LOOP = {
    "stalls": Metric(
        "eldr_loop_stalls_total", COUNTER, "times", "the event loop was blocked for 0.5 s or longer", _ROLE
    ),
    "longest_stall_s": Metric(
        "eldr_loop_longest_stall_seconds", GAUGE, "s", "longest time that the event loop was blocked", _ROLE
    ),
    "tasks": Metric("eldr_loop_tasks", GAUGE, "tasks", "tasks of the event loop", _ROLE),
}
LOOP = {key: replace(metric, status=f"loops.ROLE.{key}") for key, metric in LOOP.items()}
PROCESS = index_by_name(*LOOP.values())
