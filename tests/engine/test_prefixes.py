"""Prefix hits that the router predicts from an engine's reports are those that the engine has."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.scripts import run_script


def test_predicted_hits_are_the_engines_own(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "hits.json"
    run_script("prefix_script.py", model, out)
    hits = json.loads(out.read_text())["hits"]
    predicted, measured = zip(*hits, strict=True)
    assert predicted == measured
    assert max(measured) > 120  # the hits include blocks of answers
    assert 0 in measured[4:]  # others were evicted, or have a salt
