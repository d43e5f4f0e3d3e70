"""ELDR's Figures 7 and 14 with the gates' outputs, which a test replaces by counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.figures import eldr_gates
from benchmarks.papers.figures.common import Options
from eldr_serve.errors import UserInputError
from tests.support.traces import save_trace, synthetic_trace

TRACE = synthetic_trace(n=160, num_layers=3)


def test_gates_that_equal_the_counts_have_the_results_of_counts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.zeros(int(TRACE.prompt_tokens.sum()), np.uint32)
    path = save_trace(replace(TRACE, token_ids=tokens, vocabulary=1), tmp_path_factory)
    counts = TRACE.prefill_counts.astype(np.float32)
    monkeypatch.setattr(eldr_gates, "gate_sums", lambda _: zip(counts / TRACE.top_k, -counts, strict=True))
    monkeypatch.setattr(eldr_gates, "is_of_the_demo_model", lambda _: True)
    count, idf, probability, logit = eldr_gates.gates(Options((path,), requests=64))
    names = [row["transform"] for row in (count, idf, probability, logit)]
    assert names == ["count", "count-idf", "gate-prob", "gate-logit"]
    assert idf["rho_all_layers"] != pytest.approx(count["rho_all_layers"], abs=1e-5)
    assert idf.keys() == count.keys()
    assert {**count, "transform": ""} == pytest.approx({**probability, "transform": ""}, abs=1e-5)
    assert logit["rho_all_layers"] == pytest.approx(count["rho_all_layers"], abs=1e-5)
    assert "p50_change_pct" not in logit


def test_the_papers_transform_has_idf_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    transforms = []
    original = eldr_gates.fit_table

    def fit(*arguments: Any, transform: str, **options: Any) -> Any:
        transforms.append(transform)
        return original(*arguments, transform=transform, **options)

    monkeypatch.setattr(eldr_gates, "fit_table", fit)
    sums = TRACE.prefill_counts.astype(np.float32)
    halves = np.arange(0, 160, 2), np.arange(1, 160, 2)
    changes = eldr_gates._tpot_changes(Options(requests=64), TRACE, sums, *halves, 0)
    assert list(changes) == ["count", "count-idf", "gate-prob"]
    assert transforms == ["count", "count-idf", "count"]
    assert changes["count"] == changes["gate-prob"]


def test_probabilities_become_counts_that_add_up() -> None:
    rng = np.random.default_rng(0)
    shape = TRACE.prefill_counts.shape
    probabilities = rng.dirichlet(np.ones(shape[2]), shape[:2]).astype(np.float32)
    probabilities *= TRACE.prompt_tokens[:, None, None]
    counts = eldr_gates._as_counts(probabilities, TRACE)
    assert (counts.sum(axis=2) == (TRACE.prompt_tokens * TRACE.top_k)[:, None]).all()
    assert (np.abs(counts - probabilities * TRACE.top_k) <= 1 + 1e-3).all()


def test_the_gates_of_another_model_are_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_trace(TRACE, tmp_path_factory)
    monkeypatch.setattr(eldr_gates, "is_of_the_demo_model", lambda _: False)
    with pytest.raises(UserInputError, match="the gates of m are not here: give --trace"):
        eldr_gates.gates(Options((path,)))
