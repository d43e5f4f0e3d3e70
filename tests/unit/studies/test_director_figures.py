"""DIRECTOR's figures at small size: what they must show, whatever the machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from traces import favourites_trace

from studies.figures import director, shifting
from studies.figures.common import Options
from tools.cli import BadInput
from tools.trace import CalibrationTrace

L, E, TOP_K, STEPS = 2, 16, 2, 8


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    domains = ("code", "math", "en", "fr")
    favourites_trace(domains, each=12, num_layers=L, num_experts=E, steps=STEPS, others=0.05).save(path)
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, trace: Path) -> Options:
    for name, value in (("RANKS", 4), ("BATCHES", 4)):
        monkeypatch.setattr(director, name, value)
    return Options(traces=(trace,))


def test_knowing_the_batch_beats_a_static_placement(small: Options) -> None:
    rows = director.FIGURES["fig7"].run(small)
    assert {row["cluster"] for row in rows} == set(shifting.CLUSTERS)
    for name in shifting.CLUSTERS:
        took = {row["placement"]: row for row in rows if row["cluster"] == name}
        oracle = took["proactive, oracle"]
        assert took["offline"]["change_pct"] == 0
        assert oracle["change_pct"] < -5
        assert oracle["batch_ms"] <= took["proactive, signature"]["batch_ms"] * 1.02
        assert oracle["moves_a_batch"] > 0 == took["vanilla"]["moves_a_batch"]


def test_rounding_is_above_its_bounds(small: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def synthetic(seed: int) -> tuple[dict[str, object], shifting.Cluster, list[np.ndarray], np.ndarray]:
        rng = np.random.default_rng(seed)
        work = [rng.poisson(rng.lognormal(3, 1, (L, 1, E)), (L, 4, E)).astype(float)]
        return {"workload": "random", "layers": L}, shifting.Cluster.of("H200", 4, E), work, np.ones(1)

    monkeypatch.setattr(director, "_synthetic", synthetic)
    rows = director.FIGURES["fig11"].run(small)
    assert rows
    for row in rows:
        assert 0 <= row["above_bound_pct"] <= row["above_lp_pct"] + 1e-9


def test_a_batch_holds_every_token_at_its_home(trace: Path, tmp_path: Path) -> None:
    routes = shifting.read_routes(trace)
    fit, measure = shifting.split(routes, 0)
    assert not set(fit) & set(measure)
    (batch,) = shifting.shifting_batches(routes, measure, 1, 4, 0)
    assert set(batch.requests) <= set(measure)
    assert batch.tokens.shape == (STEPS, L, 4, E)
    assert (batch.tokens.sum(axis=3) == TOP_K * shifting.PER_RANK).all()
    CalibrationTrace.load(trace).subset(np.arange(10)).save(tmp_path / "bare.safetensors")
    with pytest.raises(BadInput, match="no routes"):
        director.FIGURES["fig7"].run(Options(traces=(tmp_path / "bare.safetensors",)))
