"""The result table of the comparison of whole replicas."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from benchmarks.lib.normalised_time import NormalisedTime, fit_sensitivity
from loadgen.statistics import median_ci, put_interval

OURS = "eldr/marginal-cost"
METRICS = (
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "latency_p50_ms",
    "requests_per_s",
    "engine_ms_per_token",
)
SERVER_TIMES = {"server_ttft": "time_to_first_token", "server_queue": "request_queue_time"}
STEPS = {"active_experts": "active_experts", "batch_size": "requests"}


def means(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the means over the period between two readings of running sums."""
    more = {key: value - before.get(key, 0.0) for key, value in after.items()}
    steps = more.get("steps", 0.0)
    figures = {name: more[key] / steps for name, key in STEPS.items() if steps > 0}
    for name in SERVER_TIMES:
        if f"{name}_sum" in more:
            figures[f"{name}_mean_ms"] = 1000 * more[f"{name}_sum"] / max(1.0, more[f"{name}_count"])
    return figures


def normalise_speed(trials: dict[str, dict[str, Any]], clock: NormalisedTime) -> dict[str, dict[str, Any]]:
    """Return the trials with METRICS and CPU times normalised to the cores' mean speed.

    Each trial also has the divisors: `slow`, and `slow_cpu` for CPU times, which exclude the time that the
    hypervisor took.
    """
    cases = [key.partition("/")[2] for key in trials]
    slowdowns = [clock.slowdown(*trial["span"]) for trial in trials.values()]
    engine_ms = [trial["engine_ms_per_token"] for trial in trials.values()]
    clock = clock.change_sensitivity(fit_sensitivity(cases, slowdowns, engine_ms))
    normalised = {}
    for key, trial in trials.items():
        start, end = trial["span"]
        slow, slow_cpu = (end - start) / clock.seconds(start, end), clock.slowdown(start, end)
        by = dict.fromkeys(METRICS, slow) | {"requests_per_s": 1 / slow, "engine_ms_per_token": slow_cpu}
        normalised[key] = trial | {name: trial[name] / by[name] for name in METRICS}
        normalised[key]["cpu_ms"] = {part: ms / slow_cpu for part, ms in trial["cpu_ms"].items()}
        normalised[key] |= {"slow": slow, "slow_cpu": slow_cpu}
    return normalised


def rows(trials: dict[str, dict[str, Any]], systems: list[str], workloads: list[str]) -> list[dict[str, Any]]:
    """Return medians over rounds. `trials` has the keys `ROUND/WORKLOAD/SYSTEM`."""
    table = []
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, trial in trials.items():
        number, workload, system = key.split("/", 2)
        by_case.setdefault((workload, system), {})[number] = trial
    for workload, system in product(workloads, systems):
        of_system, of_ours = by_case.get((workload, system), {}), by_case.get((workload, OURS), {})
        if not of_system:
            continue
        row: dict[str, Any] = {"workload": workload, "system": system, "rounds": len(of_system)}
        for name in ("requests", "failures"):
            row[name] = sum(trial[name] for trial in of_system.values())
        for name in METRICS:
            put_interval(row, name, median_ci([trial[name] for trial in of_system.values()]))
        for name in METRICS:
            pairs = [(of_ours[n][name], of_system[n][name]) for n in of_system if n in of_ours]
            if system != OURS and pairs:
                change = median_ci([100 * (a / b - 1) for a, b in pairs])
                put_interval(row, f"ours_{name.removesuffix('_ms')}_pct", change)
        for name in (*STEPS, *(f"{name}_mean_ms" for name in SERVER_TIMES)):
            if values := [trial[name] for trial in of_system.values() if name in trial]:
                row[name] = float(np.median(values))
        for part in sorted({part for trial in of_system.values() for part in trial["cpu_ms"]}):
            part_ms = [trial["cpu_ms"].get(part, 0.0) for trial in of_system.values()]
            row[f"{part}_cpu_ms"] = float(np.median(part_ms))
        table.append(row)
    return table
