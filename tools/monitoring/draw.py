"""Draw the shipped dashboards from a Prometheus, without Grafana.

python -m tools.monitoring.draw --help
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter

from eldr_serve.command_errors import BadInput, run
from eldr_serve.files import write_whole
from loadgen.plots import rendered
from tools.monitoring.dashboards import DASHBOARDS, dashboard
from tools.small_png import small_png

_POINTS = 120  # of a curve
_WIDTH_IN, _UNIT_IN = 15.0, 0.36  # width of a picture; height of a line of Grafana's grid
_CURVES = 8  # maximum curves in a legend
_NAMED = {"reqps": " req/s", "ops": "/s"}


class Series(NamedTuple):
    """A curve: its labels, the times (s since 1970) and the values of its points."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


Ask = Callable[[str], list[Series]]  # a PromQL expression -> its series over the time shown


def draw(
    out: Annotated[Path, typer.Option(help="Folder for the PNGs.")],
    prometheus: Annotated[str, typer.Option(help="URL of Prometheus.")] = "http://127.0.0.1:9090",
    minutes: Annotated[float, typer.Option(min=1, help="Time to show, up to now, min.")] = 15,
) -> None:
    """Write dashboard_NAME.png of each dashboard in deployments/monitoring."""
    span = time.time() - 60 * minutes, time.time()
    out.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=prometheus, timeout=30) as http:
        for name in DASHBOARDS:
            figure = drawn(dashboard(name), lambda expr: asked(http, expr, *span), span)
            write_whole(out / f"dashboard_{name}.png", small_png(rendered(figure)))


def asked(http: httpx.Client, expr: str, start_s: float, end_s: float) -> list[Series]:
    """Query an expression's series between two times (s since 1970); BadInput if there is no answer."""
    step_s = (end_s - start_s) / _POINTS
    query: dict[str, str | float] = {"query": expr, "start": start_s, "end": end_s, "step": step_s}
    try:
        answer = http.get("/api/v1/query_range", params=query)
        said = answer.json()
    except (httpx.TransportError, ValueError) as error:
        raise BadInput(f"{http.base_url} does not answer like Prometheus: {error}") from None
    if answer.status_code != 200:
        raise BadInput(f"Prometheus refuses {expr!r}: {said.get('error', answer.status_code)}")
    return [_series(found) for found in said["data"]["result"]]


def _series(found: dict[str, Any]) -> Series:
    points = [(float(at), float(value)) for at, value in found["values"]]
    return Series(found["metric"], [at for at, _ in points], [value for _, value in points])


def drawn(document: dict[str, Any], ask: Ask, span: tuple[float, float]) -> Figure:
    """Draw a dashboard of Grafana's JSON from `span[0]` to `span[1]` (s since 1970)."""
    grids = [panel["gridPos"] for panel in document["panels"]]
    width = max(grid["x"] + grid["w"] for grid in grids)
    height = max(grid["y"] + grid["h"] for grid in grids)
    figure = Figure(figsize=(_WIDTH_IN, _UNIT_IN * height))
    for panel, grid in zip(document["panels"], grids, strict=True):
        left, top = grid["x"] / width, 1 - grid["y"] / height
        wide, high = grid["w"] / width, grid["h"] / height
        if panel["type"] == "row":
            figure.text(0.01, top - high / 2, panel["title"], size=12, weight="bold", va="center")
            continue
        axes = figure.add_axes((left + 0.16 * wide, top - 0.76 * high, 0.8 * wide, 0.6 * high))
        axes.set_title(panel["title"], size=9, loc="left")
        axes.set_xlim(*span)
        _curves(axes, [(curve, target) for target in panel["targets"] for curve in ask(target["expr"])])
        _axes(axes, panel["fieldConfig"]["defaults"]["unit"])
    return figure


def _curves(axes: Axes, curves: list[tuple[Series, dict[str, str]]]) -> None:
    for curve, target in curves:
        axes.plot(
            curve.times, curve.values, linewidth=1.2, label=_legend(target["legendFormat"], curve.labels)
        )
    if not curves:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center", color="gray")
        return
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[:_CURVES], labels[:_CURVES], loc="upper left", bbox_to_anchor=(-0.14, -0.14), ncols=4,
        fontsize=6.5, frameon=False, handlelength=1, columnspacing=1,
    )  # fmt: skip


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def _axes(axes: Axes, unit: str) -> None:
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{datetime.fromtimestamp(at):%H:%M}"))
    axes.yaxis.set_major_formatter(_formatter(unit))
    values = [value for line in axes.lines for value in np.asarray(line.get_ydata(), float)]
    values = [0.0, *filter(np.isfinite, values)]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - room * (low < 0), high + room * (high > 0 or low == high))


def _formatter(unit: str) -> Any:
    if unit == "percentunit":
        return PercentFormatter(1, decimals=None)
    if unit == "s":
        return EngFormatter("s")
    return FuncFormatter(lambda value, _: f"{value:g}{_NAMED.get(unit, '')}")


if __name__ == "__main__":
    run(draw)
