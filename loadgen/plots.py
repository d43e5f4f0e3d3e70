"""Plots: bars and curves of rows, changes with their intervals, and the signature space."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.files import write_atomically

Rows = Sequence[dict[str, Any]]
POLICY_COLOURS = {"marginal-cost": "C0", "locality-band": "C1", "balance-band": "C2"}
_GREY = "0.65"


class MetricChange(NamedTuple):
    """The change of a metric under a policy, %: mean with interval, and each round."""

    policy: str
    value: float
    low: float
    high: float
    rounds: Sequence[float] = ()


def policy_colour(policy: str) -> str:
    """Return the colour of a policy in all plots. Load balancers are grey."""
    return POLICY_COLOURS.get(policy.partition(":")[0], _GREY)


def save(figure: Figure, path: Path) -> None:
    """Write the figure atomically, in the format of the path's suffix (PNG, SVG, PDF)."""
    write_atomically(path, render(figure, path.suffix.lstrip(".") or "png"))


def render(figure: Figure, kind: str = "png", dpi: int = 90) -> bytes:
    """Return the figure in that format (png, svg, pdf)."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=dpi)
    return content.getvalue()


def _panels(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each workload (and number of workers, if there are several)."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = ", ".join(
            str(row[key]) if key == "workload" else f"{row[key]} {key}"
            for key in ("workload", "workers")
            if key in row
        )
        series.setdefault(name, []).append(row)
    return series


def _iterate_panels(rows: Rows, path: Path, width: float, height: float) -> Iterator[tuple[Any, Rows]]:
    """Yield axes and rows of each panel of this size in inches. Save the figure at the end."""
    groups = _panels(rows)
    columns = min(3, len(groups))
    num_rows = -(-len(groups) // columns)
    figure = Figure(figsize=(width * columns, height * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, columns, squeeze=False).flat
    for axes, (name, members) in zip(grid, groups.items(), strict=False):
        axes.set_title(name)
        yield axes, members
    save(figure, path)


def bars(rows: Rows, label: str, value: str, path: Path, *, interval: tuple[str, str] | None = None) -> None:
    """Plot horizontal bars of `value` by `label`, with intervals given as columns (low, high)."""
    longest = max(map(len, _panels(rows).values()))
    for axes, members in _iterate_panels(rows, path, 5, 1 + 0.3 * longest):
        values = [row[value] for row in members]
        error = interval and [
            [max(0.0, sign * (row[end] - row[value])) for row in members]
            for sign, end in zip((-1, 1), interval, strict=True)
        ]
        axes.barh([str(row[label]) for row in members], values, xerr=error, color="C0", alpha=0.8)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=value.replace("_", " "))


def lines(
    rows: Rows, x: str, values: Sequence[str], path: Path, *, by: str | None = None, xlabel: str | None = None
) -> None:
    """Plot curves of `values` (columns) over `x`. With `by`, plot one curve for each of its values."""
    for axes, members in _iterate_panels(rows, path, 5, 3.4):
        for value in values:
            for kind in dict.fromkeys(row[by] for row in members) if by else [None]:
                points = [
                    (row[x], row[value])
                    for row in members
                    if row[value] is not None and (by is None or row[by] == kind)
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=str(kind or value))
        axes.set(xlabel=xlabel or x.replace("_", " "))
        if len(values) == 1:
            axes.set_ylabel(values[0].replace("_", " "))
        axes.legend(fontsize=7)


def changes(panels: Sequence[tuple[str, str, Sequence[MetricChange]]]) -> Figure:
    """Return a plot with one panel per metric: a dot and interval per policy, a tick per round, a line at 0.

    Args:
        panels: title, axis label and changes of each panel.
    """
    max_rows = max((len(panel_changes) for _, _, panel_changes in panels), default=1)
    figure = Figure(figsize=(11, 1.4 + 0.6 * max_rows), layout="constrained")
    for axes, (title, label, panel_changes) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for row_index, change in enumerate(panel_changes):
            colour = policy_colour(change.policy)
            heights = [row_index] * len(change.rounds)
            axes.plot(change.rounds, heights, "|", color="black", alpha=0.6, markersize=9, zorder=3)
            if math.isfinite(change.low) and math.isfinite(change.high):
                axes.plot([change.low, change.high], [row_index, row_index], color=colour, linewidth=3)
            axes.plot(change.value, row_index, "o", color=colour, markersize=9)
            axes.annotate(
                f"{change.value:+.1f} %",
                (change.value, row_index),
                (0, 9),
                textcoords="offset points",
                ha="center",
            )
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(title=title, xlabel=label, ylim=(len(panel_changes) - 0.5, -0.7))
        axes.set_yticks(range(len(panel_changes)), [change.policy for change in panel_changes])
        axes.margins(x=0.12)
    return figure


def signature_space(trace: CalibrationTrace, table: RoutingTable) -> Figure:
    """Plot signatures on their first two principal components by domain, with the centroids (Fig. 9)."""
    points = table.spec.encode(trace.prefill_counts)
    mean = points.mean(axis=0)
    components = np.linalg.svd(points - mean, full_matrices=False)[2][:2]
    flat, centres = (points - mean) @ components.T, (table.centroids - mean) @ components.T
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    domains = np.array(trace.domains)
    for number, domain in enumerate(sorted(set(trace.domains))):
        x, y = flat[domains == domain].T
        axes.scatter(x, y, s=9, color=f"C{number % 10}", alpha=0.7, label=domain or "(no domain)")
    x, y = centres.T
    axes.scatter(x, y, marker="*", s=170, color="black", label="centroid")
    for worker, centre in enumerate(centres):
        axes.annotate(f" {worker}", centre)
    axes.set(xlabel="first principal component", ylabel="second principal component")
    axes.set_title(f"{len(points)} prefill signatures, {len(centres)} balanced clusters")
    axes.legend(fontsize=8, ncols=2)
    return figure
