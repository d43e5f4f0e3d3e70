"""Requests are placed as they were before policies, placer and client were built anew."""

from __future__ import annotations

import json

import decisions
import pytest


@pytest.mark.parametrize("name", decisions.POLICIES)
def test_the_same_requests_go_to_the_same_workers(name: str) -> None:
    recorded = json.loads(decisions.RECORD.read_text())[name]
    found = decisions.decisions(name)
    assert found["placed"] == recorded["placed"]
    assert found["simulated"]["workers"] == recorded["simulated"]["workers"]
    assert found["simulated"]["sum of ends, s"] == pytest.approx(recorded["simulated"]["sum of ends, s"])
