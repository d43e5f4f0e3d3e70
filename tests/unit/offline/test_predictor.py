"""Fits of a signature predictor: ridge regression by brute force, unseen prompts, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature_predictor import SignaturePredictor
from offline.predictor import (
    agreement,
    dual_ridge,
    expert_frequencies,
    fit_signature_predictor,
    token_shares,
    token_weights,
)
from tests.support.in_process import command, sentence
from tests.support.traces import synthetic_trace

TRACE = synthetic_trace(150)
FIT, TEST = np.arange(90), np.arange(90, 150)


def test_shares_equal_a_count_by_hand() -> None:
    shares = token_shares([np.array([2, 2, 0]), np.array([1])], 4)
    np.testing.assert_allclose(shares.toarray(), [[1 / 3, 0, 2 / 3, 0], [0, 1, 0, 0]])
    weights = token_weights(shares)
    assert weights[3] == weights.max() > weights[0] > weights[1]


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 12), st.integers(1, 20), st.floats(1e-3, 10))
def test_the_dual_solution_equals_ridge_regression(seed: int, n: int, width: int, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    x, y, new = rng.normal(size=(n, width)), rng.normal(size=(n, 3)), rng.normal(size=(4, width))
    strength = penalty * np.trace(x @ x.T) / n
    rows = np.linalg.solve(x.T @ x + strength * np.eye(width), x.T @ y)
    (dual,) = dual_ridge(x @ x.T, y, [penalty])
    np.testing.assert_allclose(new @ x.T @ dual, new @ rows, rtol=1e-6, atol=1e-8)


def test_a_predictor_of_full_rank_equals_ridge_regression() -> None:
    fit = TRACE.subset_without_routes(FIT)
    predictor, report = fit_signature_predictor(fit, rank=10_000)
    shares, y = token_shares(fit.prompts, fit.vocabulary), expert_frequencies(fit)
    features = (shares * token_weights(shares)[None, :]).toarray()
    kernel = features @ features.T
    (dual,) = dual_ridge(kernel, y - y.mean(axis=0), [report["penalty"]])
    new = (
        token_shares(TRACE.subset_without_routes(TEST).prompts, TRACE.vocabulary)
        * token_weights(shares)[None, :]
    )
    expected = y.mean(axis=0) + csr_array(new).toarray() @ features.T @ dual
    mean_factors = np.array(
        [
            predictor.mean_factors(prompt.astype(np.int64))
            for prompt in TRACE.subset_without_routes(TEST).prompts
        ]
    )
    computed = predictor.mean.reshape(-1) + mean_factors @ predictor.expert_factors.reshape(
        report["rank"], -1
    )
    np.testing.assert_allclose(computed, expected, atol=1e-4)
    # The remaining variance of each token's row if it were learnt alone.
    noise = 0.3 * np.trace(kernel) / len(kernel)
    alone = [
        1 / (noise / w**2 + (x**2).sum())
        for w, x in zip(token_weights(shares), shares.toarray().T, strict=True)
    ]
    np.testing.assert_allclose(predictor.variance, alone, rtol=1e-5)


def test_unseen_prompts_are_predicted_better_with_higher_rank() -> None:
    def gain(rank: int) -> float:
        predictor, report = fit_signature_predictor(TRACE.subset_without_routes(FIT), rank=rank)
        test = TRACE.subset_without_routes(TEST)
        predicted = np.array([predictor.predict(prompt) for prompt in test.prompts]).reshape(len(TEST), -1)
        frequencies = predicted / test.prompt_tokens[:, None]
        agreements = agreement(frequencies, expert_frequencies(test), predictor.mean.reshape(1, -1))
        assert report["rank"] == rank
        assert agreements["gain"] == pytest.approx(report["gain"], abs=0.3)
        return agreements["gain"]

    one, two = gain(1), gain(2)  # three domains differ in two directions
    assert two > one + 0.1
    assert two > 0.4


def test_online_learning_improves_the_fit() -> None:
    few, rest = TRACE.subset_without_routes(np.arange(12)), TRACE.subset_without_routes(np.arange(12, 150))
    predictor, _ = fit_signature_predictor(few)
    online = OnlinePredictor(predictor)
    errors = []
    for prompt, counts in zip(rest.prompts, rest.prefill_counts, strict=True):
        both = [p.predict(prompt) for p in (predictor, online.predictor)]
        errors.append([np.square(p - counts).sum() / len(prompt) ** 2 for p in both])
        online.observe(prompt, counts)
    frozen_error, online_error = np.mean(errors[70:], axis=0)
    assert online_error < frozen_error
    assert online.is_enabled


def test_a_token_without_a_prompt_adds_nothing() -> None:
    fit = TRACE.subset_without_routes(FIT)
    predictor, report = fit_signature_predictor(replace(fit, vocabulary=fit.vocabulary + 5))
    assert not predictor.token_factors[fit.vocabulary :].any()
    assert report["token_ids_seen"] == len(np.unique(fit.token_ids))
    assert predictor.variance[fit.vocabulary :].min() >= predictor.variance.max()


def test_the_command_writes_predictor_and_report(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace")
    out, report = tmp_path / "predictor", tmp_path / "report.json"
    done = command("offline.fit_predictor", trace=tmp_path / "trace", out=out, report=report, rank=4)
    assert done.exit_code == 0, done.stderr
    predictor, figures = SignaturePredictor.load(out), json.loads(report.read_text())
    predictor.require_fit(model="m", tokenizer="t", shape=TRACE.prefill_counts.shape[1:])
    assert predictor.token_factors.shape == (TRACE.vocabulary, figures["rank"])
    assert predictor.fingerprint == TRACE.fingerprint
    assert figures["prompts"] == 150
    assert "gain over the mean" in done.stdout


@pytest.mark.parametrize(
    ("kind", "words"), [("old", "no token ids"), ("few", "too few"), ("none", "nowhere")]
)
def test_input_that_cannot_be_fitted_is_refused_in_one_sentence(
    kind: str, words: str, tmp_path: Path
) -> None:
    trace = tmp_path / ("nowhere" if kind == "none" else "trace")
    if kind == "old":
        replace(TRACE, token_ids=None).save(trace)
    if kind == "few":
        TRACE.subset_without_routes(np.arange(9)).save(trace)
    assert words in sentence(command("offline.fit_predictor", trace=trace, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
