"""The definition of one metric."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "ray_"  # prefix of every metric that Ray exports

APPLICATION = "application"  # label: name of the Ray Serve application
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        kind: COUNTER, GAUGE or HISTOGRAM.
        unit: unit of the values.
        about: description, one phrase.
        labels: labels of the metric. Ray adds more, such as the process (`WorkerId`), and all metrics but
            those of engines also have APPLICATION.
        bounds: upper bounds of a histogram's buckets.
        status: path of the same value in `GET /eldr/status`; its suffix names the unit there, for example
            `_ms` for a value in s, or `_pct` for a ratio.
        only: condition under which there are samples; empty if always.
    """

    name: str
    kind: str
    unit: str
    about: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    status: str = ""
    only: str = ""


def index_by_name(*metrics: Metric) -> dict[str, Metric]:
    """Return the metrics by their names."""
    return {metric.name: metric for metric in metrics}
