"""Predictors of the end of running requests: BalanceRoute's two-stage estimate (paper, section C).

Stage 1 is p, the probability that a request which has generated `age` tokens ends within the next H;
stage 2 is mu, its expected remaining tokens in that case.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from eldr_serve.import_path import import_object
from eldr_serve.scheduling.types import PolicyError
from eldr_serve.validation import invalid_value

EndPrediction = tuple[NDArray[np.float64], NDArray[np.float64]]
logger = logging.getLogger(__name__)


class LengthPredictor(Protocol):
    """Interface of predictors; any object that satisfies it may be set as a policy's `length_predictor`.

    With a class attribute `keyed_by_request = True` the keys are request ids instead of prompt keys.
    """

    def predict(
        self, ages: NDArray[np.int64], keys: Sequence[str | None], prompt_tokens: NDArray[np.int64]
    ) -> EndPrediction:
        """Return (p, mu), float[n] each, of n running requests.

        Args:
            ages: int64[n], generated tokens.
            keys: n prompt keys; None if unknown.
            prompt_tokens: int64[n].
        """

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        """Learn the output length of a finished request."""


class Survival:
    """Empirical survival: both stages from the latest output lengths only (section C.2.1).

    Args:
        horizon: H, tokens.
        capacity: number of stored output lengths.
    """

    def __init__(self, horizon: int, *, capacity: int = 4096) -> None:
        self._horizon = horizon
        self._newest: deque[int] = deque()
        self._sorted = np.zeros(capacity, np.int64)  # the first len(_newest) are valid
        self._sums: NDArray[np.int64] | None = None  # [n+1], cumulative; computed on demand

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        n = len(self._newest)
        if n == len(self._sorted):
            n -= 1
            oldest = int(np.searchsorted(self._sorted, self._newest.popleft()))
            self._sorted[oldest:n] = self._sorted[oldest + 1 : n + 1]
        index = int(np.searchsorted(self._sorted[:n], output_tokens))
        self._sorted[index + 1 : n + 1] = self._sorted[index:n]
        self._sorted[index] = output_tokens
        self._newest.append(output_tokens)
        self._sums = None

    def predict(
        self, ages: NDArray[np.int64], keys: Sequence[str | None], prompt_tokens: NDArray[np.int64]
    ) -> EndPrediction:
        lengths = self._sorted[: len(self._newest)]
        if self._sums is None:
            self._sums = np.concatenate([[0], np.cumsum(lengths)])
        first = np.searchsorted(lengths, ages, side="right")  # first length beyond this age
        last = np.searchsorted(lengths, ages + self._horizon, side="right")
        ending = last - first
        p = ending / np.maximum(len(lengths) - first, 1)
        mean = (self._sums[last] - self._sums[first]) / np.maximum(ending, 1)
        return p, np.where(ending > 0, mean - ages, self._horizon)


class PromptKeyed:
    """Empirical survival among requests with an equal prompt, or among all if the prompt is unknown.

    Args:
        horizon: H, tokens.
        capacity: number of stored prompts; the least recently learnt is evicted.
        lengths_each: maximum number of output lengths stored per prompt; the oldest are dropped.
    """

    def __init__(self, horizon: int, *, capacity: int = 4096, lengths_each: int = 16) -> None:
        self._horizon = horizon
        self._overall = Survival(horizon)
        self._rows: OrderedDict[str, int] = OrderedDict()
        self._lengths = np.zeros((capacity, lengths_each), np.int64)  # 0: none
        self._num_observed = np.zeros(capacity, np.int64)

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        self._overall.learn(key, prompt_tokens, output_tokens)
        if key is None:
            return
        row = self._rows.get(key)
        if row is None:
            row = len(self._rows)
            if row == len(self._lengths):
                _, row = self._rows.popitem(last=False)
            self._rows[key] = row
            self._lengths[row] = self._num_observed[row] = 0
        self._rows.move_to_end(key)
        self._lengths[row, self._num_observed[row] % self._lengths.shape[1]] = output_tokens
        self._num_observed[row] += 1

    def predict(
        self, ages: NDArray[np.int64], keys: Sequence[str | None], prompt_tokens: NDArray[np.int64]
    ) -> EndPrediction:
        p, mu = self._overall.predict(ages, keys, prompt_tokens)
        with_key = [
            (n, self._rows[key]) for n, key in enumerate(keys) if key is not None and key in self._rows
        ]
        if not with_key:
            return p, mu
        known, rows = np.array(with_key).T
        remaining = self._lengths[rows] - ages[known, None]
        running = remaining > 0
        ending = running & (remaining <= self._horizon)
        survivors, ended = running.sum(axis=1), ending.sum(axis=1)
        has_survivors = survivors > 0
        p[known[has_survivors]] = ended[has_survivors] / survivors[has_survivors]
        has_ended = ended > 0
        mu[known[has_ended]] = (remaining * ending).sum(axis=1)[has_ended] / ended[has_ended]
        return p, mu


class BoostedTrees:
    """Gradient-boosted trees, a classifier for p and a regressor for mu; Survival until they are fitted.

    Features: prompt tokens, age, and, over requests that had ended by then, the exponentially weighted mean
    output and the mean and standard deviation of the latest outputs and prompts. Each finished request gives
    one example per `age_step` generated tokens (section C.2.2). Needs scikit-learn.

    Args:
        horizon: H, tokens.
        capacity: number of latest requests to fit to.
        refit_every: finished requests between fits.
        age_step: tokens between a request's examples.
        background: fit in a separate thread, without delaying routing; False fits within `learn`, so
            that a simulation is reproducible.
    """

    def __init__(
        self,
        horizon: int,
        *,
        capacity: int = 1024,
        refit_every: int = 256,
        age_step: int = 20,
        background: bool = True,
    ) -> None:
        self._horizon = horizon
        self._survival = Survival(horizon)
        self._history: deque[tuple[int, int, NDArray[np.float64]]] = deque(maxlen=capacity)
        self._refit_every = refit_every
        self._age_step = age_step
        self._num_learnt = 0
        self._mean_output: float | None = None  # exponentially weighted mean
        self._window: deque[tuple[int, int]] = deque(maxlen=64)  # (prompt, output) tokens
        self._recent = np.zeros(5)
        self._trees: tuple[Any, Any] | None = None
        self._fitter = ThreadPoolExecutor(1, "fit-boosted-trees") if background else None
        self._fitting: Future[tuple[Any, Any] | None] | None = None

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        self._survival.learn(key, prompt_tokens, output_tokens)
        self._history.append((prompt_tokens, output_tokens, self._recent))
        before = output_tokens if self._mean_output is None else self._mean_output
        self._mean_output = before + (output_tokens - before) / 16
        self._window.append((prompt_tokens, output_tokens))
        newest = np.array(self._window, np.float64)
        self._recent = np.array([self._mean_output, *newest.mean(axis=0), *newest.std(axis=0)])
        self._num_learnt += 1
        if self._num_learnt % self._refit_every == 0:
            self._refit()

    def predict(
        self, ages: NDArray[np.int64], keys: Sequence[str | None], prompt_tokens: NDArray[np.int64]
    ) -> EndPrediction:
        if self._fitting is not None and self._fitting.done():
            fitted, self._fitting = self._fitting, None
            self._trees = fitted.result() or self._trees
        if self._trees is None:
            return self._survival.predict(ages, keys, prompt_tokens)
        ends_soon, remaining = self._trees
        features = np.column_stack(
            [prompt_tokens, ages, np.broadcast_to(self._recent, (len(ages), len(self._recent)))]
        )
        mu = np.clip(remaining.predict(features), 1, self._horizon)
        return ends_soon.predict_proba(features)[:, 1], mu

    def _refit(self) -> None:
        history = list(self._history)
        if self._fitter is None:
            self._trees = self._fit(history) or self._trees
        elif self._fitting is None:
            self._fitting = self._fitter.submit(self._fit, history)

    def _fit(self, history: Sequence[tuple[int, int, NDArray[np.float64]]]) -> tuple[Any, Any] | None:
        """Return classifier and regressor; None if the history contains only one of the two classes."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        features, remaining = [], []
        for prompt_tokens, output_tokens, recent in history:
            for age in range(0, output_tokens, self._age_step):
                features.append([prompt_tokens, age, *recent])
                remaining.append(output_tokens - age)
        x, y = np.array(features), np.array(remaining)
        soon = y <= self._horizon
        if soon.all() or not soon.any():
            return None
        shape: dict[str, Any] = {"max_iter": 50, "max_depth": 4, "random_state": 0}
        classifier = HistGradientBoostingClassifier(**shape).fit(x, soon)
        return classifier, HistGradientBoostingRegressor(**shape).fit(x[soon], y[soon])


class Oracle:
    """True lengths from a simulator, {request id: output tokens}; unknown requests do not end."""

    keyed_by_request: ClassVar[bool] = True

    def __init__(self, output_tokens: Mapping[str, int]) -> None:
        self._output_tokens = output_tokens

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def predict(
        self, ages: NDArray[np.int64], keys: Sequence[str | None], prompt_tokens: NDArray[np.int64]
    ) -> EndPrediction:
        length = np.array([self._output_tokens.get(key or "", -1) for key in keys], np.float64)
        # mu exceeds the horizon if the end is beyond it; the caller clips mu.
        return (length >= 0).astype(np.float64), np.maximum(length - ages, 0.0)


LENGTH_PREDICTORS: dict[str, Callable[[int], LengthPredictor]] = {
    "survival": Survival,
    "prompt-keyed": PromptKeyed,
    "boosted-trees": BoostedTrees,
}


def length_predictor_class(name: str) -> Callable[[int], LengthPredictor]:
    """Return the factory, given H, of a predictor by name or import path `my_package.module:MyPredictor`.

    Raises:
        PolicyError: there is no such predictor.
    """
    if name in LENGTH_PREDICTORS:
        return LENGTH_PREDICTORS[name]
    if ":" not in name:
        names = ", ".join(LENGTH_PREDICTORS)
        problem = f"must be one of {names}, or module:Class of your own"
        raise PolicyError(invalid_value("predictor", repr(name), problem))
    factory: Callable[[int], LengthPredictor] = import_object(name, "predictor", PolicyError)
    if not all(callable(getattr(factory, method, None)) for method in ("__call__", "predict", "learn")):
        raise PolicyError(f"predictor {name!r} is not a class with `predict` and `learn`")
    return factory


class GuardedLengthPredictor:
    """A predictor with two fallbacks: Survival if it fails, and "no end within H" if Survival fails too.

    Attributes:
        failures: number of exceptions and of answers of the wrong shape, not finite or out of range.
    """

    def __init__(self, predictor: LengthPredictor, horizon: int) -> None:
        self.predictor = predictor
        self.failures = 0
        self._horizon = horizon
        self._survival = Survival(horizon)
        self.keyed_by_request = bool(getattr(predictor, "keyed_by_request", False))

    def learn(self, key: str | None, prompt_tokens: int, output_tokens: int) -> None:
        self._survival.learn(key, prompt_tokens, output_tokens)
        try:
            self.predictor.learn(key, prompt_tokens, output_tokens)
        except Exception as error:
            self._record_failure(error)

    def predict(
        self, ages: NDArray[np.int64], keys: Sequence[str | None], prompt_tokens: NDArray[np.int64]
    ) -> EndPrediction:
        for source in (self.predictor, self._survival):
            try:
                return _check(source.predict(ages, keys, prompt_tokens), len(ages))
            except Exception as error:
                self._record_failure(error)
        return np.zeros(len(ages)), np.full(len(ages), float(self._horizon))

    def _record_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning(
                "predictor %s failed (%s); only past output lengths are used", self.predictor, error
            )


def _check(prediction: EndPrediction, n: int) -> EndPrediction:
    p, mu = (np.asarray(part, np.float64) for part in prediction)
    if p.shape != (n,) or mu.shape != (n,):
        raise ValueError(f"p has shape {p.shape} and mu {mu.shape}, not ({n},)")
    if not (np.isfinite(mu).all() and (p >= 0).all() and (p <= 1).all() and (mu >= 0).all()):
        raise ValueError("p must be in [0, 1] and mu finite, 0 or more")
    return p, mu
