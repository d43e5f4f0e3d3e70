"""Measure how much idle CPU time each of Ray's settings saves.

    python -m benchmarks.serving.ray_idle --rounds 1 --record idle.jsonl
    python -m benchmarks.serving.ray_idle --rounds 0 --record idle.jsonl

An application over engines that compute nothing (one prefill and two decode replicas) starts and then stays
idle. It starts in turn with each single setting, with the settings of eldr_serve/config/ray_settings.py
(`shipped`), with all settings, and with none.

`idle_pct` is the CPU time of all processes of the application, % of a core. Other columns have the CPU time
of its parts. `saved_pct` is the `idle_pct` of `none` minus the row's, paired over rounds, with its 95 %
interval. It is negative if the setting costs more. `--record FILE` keeps each start, so that rounds can be
spread over several runs.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from benchmarks.lib import options
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.cpu_time import PARTS, cpu_s
from benchmarks.lib.fakes.service import run_in_process, serve_fake
from benchmarks.lib.rounds import medians
from eldr_serve.commands.run import run
from eldr_serve.config.ray_settings import QUIET
from eldr_serve.errors import UserInputError
from loadgen.journal import Journal
from loadgen.results import publish
from loadgen.statistics import median_ci, put_interval

BENCHMARKS = {"ray_idle": "all"}
_OTHERS = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
SETTINGS: dict[str, dict[str, str]] = {
    "none": {},
    **{name: {name: value} for name, value in (QUIET | _OTHERS).items()},
    "shipped": QUIET,
    "all": QUIET | _OTHERS,
}
_DECODE_REPLICAS = 2


def _measure(environment: dict[str, str], idle_s: float, settle_s: float, port: int) -> dict[str, float]:
    """Return idle CPU time by part, % of a core. Needs its own process: Ray reads settings at import."""
    os.environ |= environment
    with serve_fake(port, use_ingress_port=True, decode_replicas=_DECODE_REPLICAS, prefill_s=0.0, seed=0):
        time.sleep(settle_s)
        before, start = cpu_s(), time.perf_counter()
        time.sleep(idle_s)
        after, took_s = cpu_s(), time.perf_counter() - start
    return {part: 100 * (after[part] - before[part]) / took_s for part in after}


def summarise(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per setting, from starts in chronological order."""
    parts = sorted({*PARTS.values(), "ray"})
    rows = [
        {"setting": start["setting"], "idle_pct": sum(start["parts"].values())}
        | {f"{part.replace(' ', '_')}_pct": start["parts"].get(part, 0.0) for part in parts}
        for start in starts
    ]
    bare_pct = [row["idle_pct"] for row in rows if row["setting"] == "none"]
    summaries = medians(rows, keys=("setting",), with_interval=("idle_pct",))
    for row in summaries:
        idle_pct = [start["idle_pct"] for start in rows if start["setting"] == row["setting"]]
        differences = [bare - idle for bare, idle in zip(bare_pct, idle_pct, strict=False)]
        put_interval(row, "saved_pct", median_ci(differences))
    return summaries


def ray_idle(
    settings: Annotated[str, typer.Option(help=f"Settings, of {', '.join(SETTINGS)}; default: all.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Starts of each setting; 0: only print --record.")] = 3,
    idle_s: Annotated[float, typer.Option(min=1, help="Time without a request, s.")] = 20.0,
    settle_s: Annotated[float, typer.Option(min=0, help="Time between start and measurement, s.")] = 5.0,
    record: options.Record = None,
    port: options.Ports = 8330,
    out: options.Out = None,
) -> None:
    """Measure the CPU time of the idle application under each of Ray's settings."""
    unwind_on_sigterm()
    names = settings.split(",") if settings else list(SETTINGS)
    for name in names:
        if name not in SETTINGS:
            raise UserInputError(f"there is no setting {name!r}; choose from {', '.join(SETTINGS)}")
    inputs = {
        "idle_s": idle_s,
        "settle_s": settle_s,
        "decode_replicas": _DECODE_REPLICAS,
        "all": SETTINGS["all"],
    }
    journal = Journal(record, inputs) if record else None
    starts: list[dict[str, Any]] = list(journal.entries.values()) if journal else []
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            parts = run_in_process(_measure, SETTINGS[name], idle_s, settle_s, port)
            starts.append({"setting": name, "parts": parts})
            typer.echo(f"{name}: {sum(parts.values()):.1f} % of a core", err=True)
            if journal:
                journal.put(str(len(starts)), starts[-1])
    if not starts:
        raise UserInputError(
            "there is no start to report: give --rounds 1 or more, or a --record with starts"
        )
    publish(
        "ray_idle",
        summarise(starts),
        inputs=inputs,
        seed=0,
        out=out,
        notes="CPU time of all idle processes but this one, in % of a core. Fake engines, no dashboard.",
    )


if __name__ == "__main__":
    run(ray_idle)
