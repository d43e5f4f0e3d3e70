"""Pictures of the dashboards: every panel in its place, of what Prometheus says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from matplotlib.figure import Figure
from monitoring_files import expressions
from PIL import Image

from eldr_serve.command_errors import BadInput
from tools.monitoring.dashboards import DASHBOARDS, dashboard
from tools.monitoring.draw import Series, asked, draw, drawn

TIMES = [100.0, 200.0, 300.0]
SPAN = (0.0, 400.0)


def prometheus(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer))


def legends(figure: Figure) -> dict[str, list[str]]:
    """By panel."""
    found = {}
    for axes in figure.axes:
        legend = axes.get_legend()
        found[axes.get_title(loc="left")] = [text.get_text() for text in legend.get_texts()] if legend else []
    return found


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_asks_for_its_curves_and_shows_them(name: str) -> None:
    asked_for: list[str] = []

    def ask(expr: str) -> list[Series]:
        asked_for.append(expr)
        return [Series({"worker": at, "ReplicaId": at}, TIMES, [1.0, 2.0, 3.0]) for at in ("a", "b")]

    figure = drawn(dashboard(name), ask, SPAN)
    of_it = [expr for where, expr in expressions() if where.startswith(f"{name}: ")]
    assert sorted(asked_for) == sorted(of_it)
    panels = [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]
    assert set(legends(figure)) == {panel["title"] for panel in panels}
    for axes, panel in zip(figure.axes, panels, strict=True):
        assert len(axes.lines) == 2 * len(panel["targets"])
        assert axes.get_xlim() == SPAN
        assert axes.get_ylim()[0] == 0
    rows = [panel["title"] for panel in dashboard(name)["panels"] if panel["type"] == "row"]
    assert [text.get_text() for text in figure.texts] == rows


def test_panels_do_not_lie_on_each_other() -> None:
    for name in DASHBOARDS:
        boxes = [axes.get_position() for axes in drawn(dashboard(name), lambda _: [], SPAN).axes]
        for at, box in enumerate(boxes):
            assert 0 <= box.x0 < box.x1 <= 1
            assert 0 <= box.y0 < box.y1 <= 1
            assert not any(box.overlaps(other) for other in boxes[:at])


def test_a_legend_has_the_labels_value_and_a_panel_without_series_says_so() -> None:
    def ask(expr: str) -> list[Series]:
        return [Series({"worker": "w7"}, TIMES, [1, 2, 3])] if "decode_in_flight" in expr else []

    figure = drawn(dashboard("placement"), ask, SPAN)
    assert legends(figure)["Requests of each worker"] == ["w7"]
    empty = [axes for axes in figure.axes if axes.get_title(loc="left") == "Decode queue"]
    assert [text.get_text() for text in empty[0].texts] == ["No data"]


def test_the_range_that_is_asked_for_and_what_comes_of_the_answer() -> None:
    seen: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        seen.update(request.url.params)
        matrix = [{"metric": {"worker": "w"}, "values": [[100, "1.5"], [200, "NaN"]]}]
        return httpx.Response(200, json={"status": "success", "data": {"result": matrix}})

    (series,) = asked(prometheus(answer), "sum(x)", 100.0, 1300.0)
    assert seen == {"query": "sum(x)", "start": "100.0", "end": "1300.0", "step": "10.0"}
    assert series.labels == {"worker": "w"}
    assert series.times == TIMES[:2]
    assert series.values[0] == 1.5
    assert series.values[1] != series.values[1]  # NaN, a gap in the curve


def test_what_prometheus_refuses_and_what_is_none_is_one_sentence() -> None:
    refused = prometheus(lambda _: httpx.Response(400, json={"status": "error", "error": "parse error"}))
    with pytest.raises(BadInput, match=r"Prometheus refuses 'sum\(': parse error"):
        asked(refused, "sum(", 0, 60)
    with pytest.raises(BadInput, match="does not answer like Prometheus"):
        asked(prometheus(lambda _: httpx.Response(200, text="<html>")), "x", 0, 60)


def test_nobody_there_leaves_the_old_pictures(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not answer like Prometheus"):
        draw(out=tmp_path, prometheus="http://127.0.0.1:9", minutes=5)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_picture_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.monitoring.draw.asked", lambda *_: [Series({}, TIMES, [0.0, 0.0, 0.0])])
    draw(out=tmp_path / "new", minutes=5)
    written = list((tmp_path / "new").iterdir())
    assert {path.name for path in written} == {f"dashboard_{name}.png" for name in DASHBOARDS}
    for path in written:
        with Image.open(path) as picture:
            assert picture.width > 1000
