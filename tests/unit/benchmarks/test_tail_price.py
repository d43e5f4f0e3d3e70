"""Prices of marginal-cost at small size: journal, changes against the best balancer, bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers import tail_price as module
from benchmarks.papers.figures.eldr import BALANCERS
from benchmarks.papers.tail_price import tail_price
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost_file import FittedCost
from tests.support.in_process import command, sentence
from tests.support.traces import synthetic_trace

SHARP = "marginal-cost,tail_power=6,affinity=0.3"


@pytest.fixture
def point(tmp_path: Path) -> str:
    """Provide a point of 2 workers with a mean batch of 6."""
    trace, cost = tmp_path / "routes.safetensors", tmp_path / "cost.json"
    synthetic_trace(n=60, num_layers=4, num_experts=32).save(trace)
    terms = StepCost(fixed_s=1e-3, per_expert_s=1e-4)
    FittedCost(cost=terms, steps=9, rms_relative_error=0, median_relative_error=None, source="x").save(cost)
    return f"{trace},{cost},2,6"


def test_changes_are_against_the_best_balancer_of_each_seed(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"point": [point], "policy": ["marginal-cost", SHARP], "per_worker": 60, "output_tokens": 20}
    record, out = tmp_path / "journal.jsonl", tmp_path / "out.json"
    tail_price(**options, seeds=3, record=record, out=out)
    rows: dict[str, dict[str, Any]] = {row["policy"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [*BALANCERS, "marginal-cost", SHARP]
    runs: dict[str, list[float]] = {}
    for line in record.read_text().splitlines()[1:]:
        key, figures = json.loads(line)
        runs.setdefault(key.split(", ", 4)[4], []).append(figures["tpot_p50_ms"])
    best = np.min([runs[name] for name in BALANCERS], axis=0)
    for name, row in rows.items():
        logs = np.log(np.array(runs[name]) / best)
        assert row["tpot_p50_change_pct"] == pytest.approx(100 * np.expm1(logs.mean()))
        assert row["tpot_p50_change_pct_low"] <= row["tpot_p50_change_pct"] <= row["tpot_p50_change_pct_high"]
        assert (row["workload"], row["workers"], row["batch"]) == ("routes", 2, 6)
        assert 4 < row["batch_size"] < 9
    assert rows["marginal-cost"]["active_experts"] < rows["shortest-queue"]["active_experts"]
    # Runs in the journal are not simulated again.
    monkeypatch.setattr(module, "simulate", None)
    tail_price(**options, seeds=2, record=record, out=out)


def test_unusable_options_are_refused_in_one_sentence(point: str, tmp_path: Path) -> None:
    out = {"out": tmp_path / "out.json"}
    assert "--point or --whole" in sentence(command(tail_price, **out))
    assert "ROUTES,COST,WORKERS,BATCH" in sentence(command(tail_price, point=point + ",9", **out))
    assert "no KEY=VALUE" in sentence(command(tail_price, point=point, policy="random,fast", **out))
    assert "tail_power must be" in sentence(
        command(tail_price, point=point, policy="marginal-cost,tail_power=0", **out)
    )
    assert "ROUTES,ARRIVALS,WORKERS" in sentence(command(tail_price, whole="routes.safetensors,4", **out))
