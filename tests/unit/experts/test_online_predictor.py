"""Online learning of the predictor, which is disabled while the mean of recent prompts is better."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.experts import online_predictor
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature_predictor import SignaturePredictor
from tests.support.predictors import PREDICTOR, E, L, R, V, predictor

TRUTH = predictor(1, scale=0.2)


def prompts(number: int, seed: int, low: int = 0, high: int = V) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, rng.integers(3, 30)) for _ in range(number)]


def linear(p: SignaturePredictor, ids: np.ndarray) -> np.ndarray:
    """Return counts without clipping, which least squares can recover."""
    return (p.mean + np.tensordot(p.mean_factors(ids), p.expert_factors, axes=1)) * len(ids)


def test_the_predictor_learns_from_prefills() -> None:
    untaught = replace(
        TRUTH, token_factors=np.zeros_like(TRUTH.token_factors), variance=np.full(V, 1e3, np.float32)
    )
    online = OnlinePredictor(untaught)
    for ids in prompts(600, 2):
        online.observe(ids, linear(TRUTH, ids))
    np.testing.assert_allclose(
        linear(online.predictor, np.arange(V)), linear(TRUTH, np.arange(V)), atol=0.01 * V
    )
    assert online.is_enabled
    assert online.gain > 0.9
    assert online.cosine > 0.9
    assert online.status == {"on": True, "prompts": 600, "cosine": online.cosine, "gain": online.gain}
    assert not untaught.token_factors.any()  # the fitted predictor is unchanged


def test_directions_turn_towards_the_error_and_stay_orthonormal(monkeypatch: pytest.MonkeyPatch) -> None:
    start = replace(predictor(4, scale=0.2), variance=np.full(V, 1e3, np.float32))
    gains = []
    for rate in (online_predictor._LEARNING_RATE, 0):
        monkeypatch.setattr(online_predictor, "_LEARNING_RATE", rate)
        online = OnlinePredictor(start)
        for ids in prompts(1000, 5):
            online.observe(ids, linear(TRUTH, ids))
        directions = online.predictor.expert_factors.reshape(R, -1).astype(float)
        np.testing.assert_allclose(directions @ directions.T, np.eye(R), atol=1e-3)
        gains.append(online.gain)
    assert gains[0] > gains[1] + 0.2


@given(st.integers(0, 50), st.integers(1, 12))
def test_prompts_of_one_token_are_learnt_like_least_squares(seed: int, times: int) -> None:
    """With one token in each prompt there is no covariance between tokens, and the diagonal is exact."""
    rng = np.random.default_rng(seed)
    start = replace(predictor(seed), variance=rng.uniform(0.1, 5, V).astype(np.float32))
    online = OnlinePredictor(start)
    ids = np.zeros(3, np.int64)
    within = rng.normal(size=(times, R)).astype(np.float32)  # the directions then do not turn
    seen = start.mean + np.tensordot(within, start.expert_factors, axes=1)
    for frequencies in seen:
        online.observe(ids, frequencies * len(ids))
    prior = 1 / start.variance[0]
    np.testing.assert_allclose(
        online.predictor.token_factors[0],
        (prior * start.token_factors[0] + within.sum(axis=0)) / (prior + times),
        rtol=2e-3,
        atol=2e-4,
    )
    np.testing.assert_allclose(online.predictor.variance[0], 1 / (prior + times), rtol=1e-3)
    np.testing.assert_array_equal(online.predictor.token_factors[1:], start.token_factors[1:])


def test_a_predictor_worse_than_the_mean_is_disabled_until_it_improves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    misled = replace(TRUTH, token_factors=-TRUTH.token_factors, variance=np.full(V, 0.5, np.float32))
    online = OnlinePredictor(misled)
    states = []
    with caplog.at_level(logging.WARNING):
        for ids in prompts(1000, 3):
            online.observe(ids, TRUTH.predict(ids))
            states.append(online.is_enabled)
            assert (online.predict(ids) is None) == (not online.is_enabled)
    assert states[0]
    assert False in states
    assert states[-1]
    changes = [a != b for a, b in itertools.pairwise(states)]
    assert sum(changes) == len(caplog.records) == 2
    assert "off" in caplog.records[0].message
    assert "on again" in caplog.records[1].message


def test_a_prompt_is_scored_before_it_is_learnt() -> None:
    untaught = replace(
        TRUTH, token_factors=np.zeros_like(TRUTH.token_factors), variance=np.full(V, 1e6, np.float32)
    )
    online = OnlinePredictor(untaught)
    online.observe([1, 2, 3], TRUTH.predict([1, 2, 3]))
    assert online.gain == pytest.approx(0, abs=1e-3)
    np.testing.assert_allclose(online.predictor.predict([1, 2, 3]), TRUTH.predict([1, 2, 3]), atol=0.05)


def test_tokens_outside_the_vocabulary_and_empty_prompts_teach_nothing() -> None:
    online = OnlinePredictor(PREDICTOR)
    online.observe([], np.zeros((L, E)))
    assert online.num_prompts == 0
    online.observe([V, -1, V + 9], TRUTH.predict([0, 1, 2]))
    assert online.num_prompts == 1
    np.testing.assert_array_equal(online.predictor.token_factors, PREDICTOR.token_factors)


@pytest.mark.parametrize("counts", [np.zeros((L, E + 1)), np.full((L, E), np.nan), np.zeros(E)])
def test_invalid_counts_are_refused_and_change_nothing(counts: np.ndarray) -> None:
    online = OnlinePredictor(PREDICTOR)
    with pytest.raises(ValueError, match="counts must be finite"):
        online.observe([1, 2], counts)
    assert online.num_prompts == 0
    np.testing.assert_array_equal(online.predictor.token_factors, PREDICTOR.token_factors)
