"""Output-length predictors against the empirical distribution, and invalid predictions."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.scheduling import Loads, make_policy
from eldr_serve.scheduling.policies.balance_route.forecast import Forecast
from eldr_serve.scheduling.policies.length_predictors import (
    LENGTH_PREDICTORS,
    BoostedTrees,
    Oracle,
    PromptKeyed,
    Survival,
)
from tests.support.tables import request

H = 10
RNG = np.random.default_rng(0)


def predict(predictor: Any, ages: list[int], keys: list[str | None] | None = None) -> tuple[list, list]:
    n = len(ages)
    p, mu = predictor.predict(np.array(ages), keys or [None] * n, np.full(n, 100))
    return p.tolist(), mu.tolist()


def empirical(lengths: list[int], age: int) -> tuple[float, float]:
    beyond = [n for n in lengths if n > age]
    soon = [n - age for n in beyond if n <= age + H]
    return (len(soon) / len(beyond) if beyond else 0.0, float(np.mean(soon)) if soon else float(H))


@given(st.lists(st.integers(1, 60), max_size=60), st.lists(st.integers(0, 70), min_size=1, max_size=9))
def test_survival_is_the_empirical_distribution_of_the_newest_lengths(
    lengths: list[int], ages: list[int]
) -> None:
    survival = Survival(H, capacity=24)
    for length in lengths:
        survival.learn(None, 5, length)
    expected = [empirical(lengths[-24:], age) for age in ages]
    p, mu = predict(survival, ages)
    assert p == pytest.approx([e[0] for e in expected])
    assert mu == pytest.approx([e[1] for e in expected])


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(1, 40)), max_size=60),
    st.lists(st.tuples(st.sampled_from(["a", "b", "z", None]), st.integers(0, 45)), min_size=1, max_size=9),
)
def test_equal_prompts_predict_better_than_all_prompts(
    lengths_by_key: list[tuple[str | None, int]], queries: list[tuple[str | None, int]]
) -> None:
    keyed, overall = PromptKeyed(H, lengths_each=5), Survival(H)
    for key, length in lengths_by_key:
        keyed.learn(key, 5, length)
        overall.learn(key, 5, length)
    p, mu = predict(keyed, [age for _, age in queries], [key for key, _ in queries])
    for n, (key, age) in enumerate(queries):
        own = [length for k, length in lengths_by_key if key is not None and k == key][-5:]
        all_p, all_mu = predict(overall, [age])
        if max(own, default=0) > age:
            assert p[n] == pytest.approx(empirical(own, age)[0])
            if p[n]:
                assert mu[n] == pytest.approx(empirical(own, age)[1])
        else:
            assert (p[n], mu[n]) == (all_p[0], all_mu[0])


def test_the_least_recently_seen_prompt_is_forgotten() -> None:
    keyed = PromptKeyed(H, capacity=2)
    for key, length in (("a", 3), ("b", 50), ("a", 3), ("c", 50)):
        keyed.learn(key, 5, length)
    assert predict(keyed, [0, 0], ["a", "c"])[0] == [1.0, 0.0]
    assert predict(keyed, [0], ["b"])[0] == [0.5]  # an unknown one gets the same


def test_boosted_trees_learn_from_prompts() -> None:
    trees = BoostedTrees(H, refit_every=300, age_step=2, background=False)
    for _ in range(300):
        prompt = int(RNG.integers(1, 200))
        trees.learn(None, prompt, 6 if prompt < 100 else 60)
    p, mu = trees.predict(np.array([0, 0, 52]), [None] * 3, np.array([20, 180, 180]))
    assert np.abs(p - [1, 0, 1]).max() < 0.1
    assert mu[[0, 2]] == pytest.approx([6, 8], abs=1)
    alone = BoostedTrees(H, refit_every=4, background=False)
    for _ in range(8):
        alone.learn(None, 5, 3)  # all end soon, so no feature separates them
    assert predict(alone, [0]) == ([1.0], [3.0])


def test_boosted_trees_are_fitted_in_the_background() -> None:
    trees = BoostedTrees(H, refit_every=64)
    for n in range(64):
        trees.learn(None, n, 5 if n % 2 else 50)
    assert trees._fitting.result(60) is not None
    p, mu = predict(trees, [0, 3, 44])
    assert trees._trees is not None
    assert np.all((np.array(p) >= 0) & (np.array(p) <= 1))
    assert np.all((np.array(mu) >= 1) & (np.array(mu) <= H))


def remaining_steps(forecast: Forecast, age: int) -> int:
    """Return for how many steps the projected load of worker 0 contains request r, of 50 prompt tokens."""
    forecast.on_progress({"r": age})
    return np.count_nonzero(forecast.project(Loads.from_counts([1], [50 + age]))[0]) - 1


def forecast_with(predictor: Any, *, gate: float = 0.5, limit: int = 10_000) -> Forecast:
    forecast = Forecast(H, "survival", 4, gate)
    forecast.length_predictor = predictor
    forecast.on_assigned(request("r", 50, limit), 0)
    return forecast


class Constant:
    """A predictor of a given p and mu, which counts its calls."""

    def __init__(self, p: float, mu: float) -> None:
        self.p, self.mu, self.calls = p, mu, 0

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def predict(self, ages: np.ndarray, keys: Any, prompt_tokens: np.ndarray) -> Any:
        self.calls += 1
        return np.full(len(ages), self.p), np.full(len(ages), self.mu)


@pytest.mark.parametrize(
    ("predictor", "calls", "expected", "ages", "options"),
    [
        # A prediction holds until the next and falls by one per token.
        (Constant(0.5, 4.0), 2, [7, 6, 5, 4, 7], range(5), {}),
        # A prediction that runs out is renewed at once and never becomes zero.
        (Constant(1.0, 2.0), 3, [2, 1, 2, 1, 2], range(5), {}),
        # A request that outlasts the horizon stays until the next prediction.
        (Oracle({"r": 15}), 0, [H] * 8 + [7, 6], range(10), {}),
        (Oracle({"r": 15}), 0, [H], [4], {}),
        (Constant(0.0, 1.0), 1, [H], [3], {}),
        # Below the gate a request stays for the horizon.
        (Constant(0.49, 1.0), 1, [H], [0], {}),
        (Constant(0.49, 1.0), 1, [round(0.49 + 0.51 * H)], [0], {"gate": 0.4}),
        # The limit of new tokens is known whatever the predictor says.
        (Constant(0.0, 0.0), 4, [H, 7, 1, 1], [0, 5, 11, 12], {"limit": 12}),
        (Oracle({"r": 30}), 0, [H, H, H, 7, 4, 1], [0, 19, 22, 23, 26, 29], {}),
    ],
)
def test_the_remaining_steps_of_a_request_follow_the_prediction(
    predictor: Any, calls: int, expected: list[int], ages: Any, options: dict[str, Any]
) -> None:
    forecast = forecast_with(predictor, **options)
    assert [remaining_steps(forecast, age) for age in ages] == expected
    assert getattr(predictor, "calls", 0) == calls


class Scripted(Constant):
    """A predictor of given p and mu by age."""

    def __init__(self, predictions: list[tuple[float, float]]) -> None:
        self.predictions = np.array(predictions)

    def predict(self, ages: np.ndarray, keys: Any, prompt_tokens: np.ndarray) -> Any:
        return self.predictions[ages, 0], self.predictions[ages, 1]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, H)), min_size=1, max_size=40),
    st.integers(1, 2 * H),
    st.floats(0, 1),
)
def test_the_countdown_is_that_of_the_paper(
    predictions: list[tuple[float, float]], refresh: int, gate: float
) -> None:
    """Section C.2.3, one token after the other; the prediction is rounded to whole steps."""
    forecast = Forecast(H, "survival", refresh, gate, count_down=True)
    forecast.length_predictor = Scripted(predictions)
    forecast.on_assigned(request("r", 50, 10_000), 0)
    remaining, refreshed_at = 0, 0
    for age, (p, mu) in enumerate(predictions):
        remaining -= 1
        if age == 0 or age - refreshed_at >= refresh or remaining < 1:
            remaining = max(1, round(p * mu + (1 - p) * H if p >= gate else H))
            refreshed_at = age
        assert remaining_steps(forecast, age) == remaining


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("no"),
        None,
        7,
        (np.ones(1), np.array([np.nan])),
        (np.array([np.nan]), np.ones(1)),
        (np.array([1.5]), np.ones(1)),
        (np.array([0.9]), np.array([-3.0])),
        (np.array([0.9]), np.array([np.inf])),
        (np.ones(3), np.ones(3)),
        (np.ones(1), "soon"),
        ([], []),
    ],
    ids=repr,
)
def test_invalid_predictions_do_not_stop_routing(answer: Any) -> None:
    policy: Any = make_policy("balance-route-horizon", horizon=H)
    policy.length_predictor = Mock(spec=["learn", "predict"])
    policy.length_predictor.learn.side_effect = RuntimeError("never")
    how = "side_effect" if isinstance(answer, Exception) else "return_value"
    policy.length_predictor.predict.configure_mock(**{how: answer})
    for n in range(30):  # survival learns that all requests end after three tokens
        policy.on_assigned(request(f"old{n}", 10, 999), 0)
        policy.on_progress({f"old{n}": 3})
        policy.on_finished(f"old{n}")
    policy.on_assigned(request("r", 10, 999), 0)
    loads = Loads.from_counts([1, 0], [10, 0])
    assert policy.dispatch([request("s", 5, 9)], loads, RNG)[0][1].position == 1
    assert policy._forecast._running.remaining.tolist() == [3]
    assert policy.predictor_failures > 0


@pytest.mark.parametrize(("count_down", "steps"), [(False, H), (True, H - 3)])
def test_the_policy_counts_down_from_the_horizon_if_its_parameter_is_true(
    count_down: bool, steps: int
) -> None:
    policy: Any = make_policy(
        "balance-route-horizon", horizon=H, refresh=4, count_down_from_horizon=count_down
    )
    policy.on_assigned(request("r", 50, 999), 0)
    assert remaining_steps(policy._forecast, 0) == H
    assert remaining_steps(policy._forecast, 3) == steps


@pytest.mark.parametrize("name", ["balance-route-horizon", "balance-band"])
def test_the_lengths_of_incomplete_answers_are_not_learnt(name: str) -> None:
    policy: Any = make_policy(name)
    policy.length_predictor = predictor = Mock(wraps=Constant(0.0, 1.0), spec=["learn", "predict"])
    for request_id, tokens, end in (("cut", 2, policy.on_aborted), ("whole", 3, policy.on_finished)):
        policy.on_assigned(request(request_id, 10, 999), 0)
        policy.on_progress({request_id: tokens})
        end(request_id)
    policy.on_progress({})
    predictor.learn.assert_called_once_with(None, 10, 3)


def test_the_oracle_knows_only_its_own_requests() -> None:
    assert predict(Oracle({"r": 3}), [1], ["nobody"])[0] == [0.0]


@pytest.mark.parametrize("name", sorted(LENGTH_PREDICTORS))
def test_a_predictor_without_data_expects_requests_to_stay_for_the_horizon(name: str) -> None:
    forecast = Forecast(H, name, 4, 0.5)
    forecast.on_assigned(request("r", 50, 999, prompt_key="k"), 0)
    assert remaining_steps(forecast, 0) == H
    for bad in (-1, 2):
        p, mu = forecast.length_predictor.predict(np.array([bad + 1]), ["k"], np.array([5]))
        assert p.shape == mu.shape == (1,)
    assert forecast.predictor_failures == 0
