"""DIRECTOR's figures at small size: what they must show, whatever the machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eldr_serve.artifacts import CalibrationTrace
from studies.figures import director, shifting
from studies.figures.common import Options
from tools.cli import BadInput

L, E, TOP_K, STEPS, EACH = 2, 16, 2, 8, 12
DOMAINS = ("code", "math", "en", "fr")


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each domain with four favourite experts; prefill like decode."""
    rng = np.random.default_rng(0)
    domains = [d for d in DOMAINS for _ in range(EACH)]
    routes = np.zeros((len(domains), STEPS, L, TOP_K), np.uint8)
    for n in range(len(domains)):
        weight = np.full(E, 0.05)
        weight[4 * (n // EACH) : 4 * (n // EACH) + 4] = 1
        for step, layer in np.ndindex(STEPS, L):
            routes[n, step, layer] = rng.choice(E, TOP_K, replace=False, p=weight / weight.sum())
    counts = (routes[..., None] == np.arange(E)).sum(axis=(1, 3)).astype(np.uint32)
    tokens = np.full(len(domains), STEPS, np.uint32)
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    CalibrationTrace(
        "tiny", TOP_K, counts, counts, tokens, tokens, domains, [f"r{n}" for n in range(len(domains))],
        routes.reshape(-1, L, TOP_K), np.arange(len(domains) + 1) * STEPS,
    ).save(path)  # fmt: skip
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, trace_path: Path) -> Options:
    monkeypatch.setattr(director, "RANKS", 4)
    monkeypatch.setattr(director, "BATCHES", 4)
    return Options(traces=(trace_path,))


def test_knowing_the_batch_beats_a_static_placement(small: Options) -> None:
    rows = director.FIGURES["fig7"].run(small)
    assert {row["cluster"] for row in rows} == set(shifting.CLUSTERS)
    for name in shifting.CLUSTERS:
        took = {row["placement"]: row for row in rows if row["cluster"] == name}
        assert took["offline"]["change_pct"] == 0
        assert took["proactive, oracle"]["change_pct"] < -5
        assert took["proactive, oracle"]["batch_ms"] <= took["proactive, signature"]["batch_ms"] * 1.02
        assert took["proactive, oracle"]["moves_a_batch"] > 0
        assert took["vanilla"]["moves_a_batch"] == 0


def test_rounding_is_above_its_bounds(small: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(director, "_synthetic", lambda seed: synthetic(seed))
    rows = director.FIGURES["fig11"].run(small)
    assert rows
    for row in rows:
        assert 0 <= row["above_bound_pct"] <= row["above_lp_pct"] + 1e-9


def synthetic(seed: int) -> tuple[dict[str, object], shifting.Cluster, list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    cluster = shifting.Cluster.of("H200", 4, E)
    work = [rng.poisson(rng.lognormal(3, 1, (L, 1, E)), (L, 4, E)).astype(float)]
    return {"workload": "random", "layers": L}, cluster, work, np.ones(1)


def test_a_batch_holds_every_token_at_its_home(trace_path: Path) -> None:
    trace = shifting.read_routes(trace_path)
    fit, measure = shifting.split(trace, 0)
    assert not set(fit) & set(measure)
    (batch,) = shifting.shifting_batches(trace, measure, 1, 4, 0)
    assert set(batch.requests) <= set(measure)
    assert batch.tokens.shape == (STEPS, L, 4, E)
    assert (batch.tokens.sum(axis=3) == TOP_K * shifting.PER_RANK).all()
    vanilla = shifting.Cluster.of("H200", 4, E).vanilla(L, E)
    assert vanilla[0].tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11, 11, 12, 13, 14, 15, 15]


def test_bad_input_is_named(trace_path: Path, tmp_path: Path) -> None:
    for figure in ("fig7", "fig9", "fig11"):
        with pytest.raises(BadInput, match="--trace"):
            director.FIGURES[figure].run(Options())
    trace = CalibrationTrace.load(trace_path)
    trace.subset(np.arange(10)).save(tmp_path / "bare.safetensors")
    with pytest.raises(BadInput, match="no routes"):
        director.FIGURES["fig7"].run(Options(traces=(tmp_path / "bare.safetensors",)))
