"""Times of the hand-over's stages."""

from __future__ import annotations

import pytest

from eldr_serve.serving.stages import WINDOW, Stages


def test_percentiles_are_of_the_newest_requests_and_counts_of_all() -> None:
    stages = Stages()
    assert stages.summary() == {}
    for _ in range(10):
        stages.record(place=9.0)
    for _ in range(WINDOW):
        stages.record(place=0.002, handover=0.01)
    found = stages.summary()
    assert found["place"]["count"] == WINDOW + 10
    assert found["place"]["p99_ms"] == pytest.approx(2.0)
    assert found["handover"]["mean_ms"] == pytest.approx(10.0)
