"""A signature predictor that learns online from the true counts of prefills and is evaluated on them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.experts.signature_predictor import Float32s, SignaturePredictor

_TIME_CONSTANT = 64  # prompts over which the recent mean and the accuracy are taken
_MIN_PROMPTS = 16  # number of prompts before the predictor may be switched off
_MIN_GAIN_TO_ENABLE = 0.02  # gain above which it is switched on again
_LEARNING_RATE = 0.1  # learning rate of the directions; 0.03 to 0.3 gave similar results
logger = logging.getLogger(__name__)


class OnlinePredictor:
    """Predicts a prompt's expert counts, and learns from its true counts once they are known.

    The rows of tokens are learnt by recursive least squares with a diagonal covariance, so that the row of a
    frequent token changes little and the row of a new token changes a lot. Each prompt also rotates the
    directions towards its residual (a step of GROUSE, Balzano et al. 2010), which keeps them orthonormal. The
    mean does not change.

    Each prompt is predicted before it is learnt, and the prediction is compared with a baseline, the mean of
    recent prompts. While the baseline is better, the predictor is off but continues to learn. The class is
    not thread-safe.

    Attributes:
        predictor: current predictor; its `token_factors`, `expert_factors` and `variance` change in place.
        is_enabled: whether `predict` returns predictions.
        num_prompts: number of observed prompts.
        cosine: mean cosine of predicted and true deviations from the recent mean, of recent prompts.
    """

    def __init__(self, predictor: SignaturePredictor) -> None:
        state = {
            name: getattr(predictor, name).copy() for name in ("token_factors", "expert_factors", "variance")
        }
        self.predictor = replace(predictor, **state)
        self.is_enabled, self.num_prompts, self.cosine = True, 0, 0.0
        self._recent_mean = predictor.mean.copy()
        self._squared_error = self._squared_error_of_mean = 0.0  # means over recent prompts

    @property
    def gain(self) -> float:
        """Return 1 - squared error / squared error of the recent mean, over recent prompts."""
        return 1 - self._squared_error / self._squared_error_of_mean if self._squared_error_of_mean else 0.0

    @property
    def status(self) -> dict[str, Any]:
        """Return the accuracy as JSON-able values."""
        return {"on": self.is_enabled, "prompts": self.num_prompts, "cosine": self.cosine, "gain": self.gain}

    def predict(self, token_ids: ArrayLike) -> Float32s | None:
        """Return the prediction of SignaturePredictor, float32[L, E]; None while the mean is better."""
        return self.predictor.predict(token_ids) if self.is_enabled else None

    def observe(self, token_ids: ArrayLike, counts: ArrayLike) -> None:
        """Learn the true counts [L, E] of a prompt; an empty prompt is ignored.

        Raises:
            ValueError: the counts have another shape or are not finite.
        """
        ids, true = np.asarray(token_ids, np.int64), np.array(counts, np.float32)
        if true.shape != self.predictor.mean.shape or not np.isfinite(true).all():
            raise ValueError(f"counts must be finite, of shape {self.predictor.mean.shape}, not {true.shape}")
        if not len(ids):
            return
        true /= len(ids)
        mean_factors = self.predictor.mean_factors(ids)
        self._evaluate(true, self.predictor.frequencies(mean_factors))
        self._learn(ids, true, mean_factors)

    def _evaluate(self, true: Float32s, predicted: Float32s) -> None:
        self.num_prompts += 1
        share = 1 / min(self.num_prompts, _TIME_CONSTANT)
        deviation, prediction = true - self._recent_mean, predicted - self._recent_mean
        length = float(np.linalg.norm(deviation) * np.linalg.norm(prediction))
        cosine = float(np.vdot(deviation, prediction)) / length if length else 0.0
        self.cosine += share * (cosine - self.cosine)
        self._squared_error += share * (float(np.square(prediction - deviation).sum()) - self._squared_error)
        self._squared_error_of_mean += share * (
            float(np.square(deviation).sum()) - self._squared_error_of_mean
        )
        self._recent_mean += deviation / np.float32(_TIME_CONSTANT)
        is_enabled = self.num_prompts < _MIN_PROMPTS or self.gain > (
            0 if self.is_enabled else _MIN_GAIN_TO_ENABLE
        )
        if is_enabled != self.is_enabled:
            self.is_enabled = is_enabled
            logger.warning(
                "the signature predictor is %s: over recent prompts its gain over their mean is %.2f",
                "on again" if is_enabled else "off",
                self.gain,
            )

    def _learn(self, ids: NDArray[np.int64], true: Float32s, mean_factors: Float32s) -> None:
        token_factors, variance = self.predictor.token_factors, self.predictor.variance
        directions = self.predictor.expert_factors.reshape(token_factors.shape[1], true.size)  # a view
        deviation: Float32s = (true - self.predictor.mean).reshape(-1)
        target: Float32s = directions @ deviation
        seen, times = np.unique(ids[(ids >= 0) & (ids < len(token_factors))], return_counts=True)
        shares = (times / len(ids)).astype(np.float32)
        covariance = variance[seen] * shares
        gain = covariance / (1 + covariance @ shares)
        token_factors[seen] += np.outer(gain, target - mean_factors)
        variance[seen] -= gain * covariance
        residual = deviation - target @ directions
        _rotate(directions, shares @ token_factors[seen], residual, float(deviation @ deviation))


def _rotate(directions: Float32s, mean_factors: Float32s, residual: Float32s, scale: float) -> None:
    """Rotate the direction along `mean_factors` towards the residual, in place.

    Args:
        residual: part of the deviation that is orthogonal to all directions.
        scale: squared length of the whole deviation.
    """
    length, distance = float(np.linalg.norm(mean_factors)), float(np.linalg.norm(residual))
    if not (length and distance):
        return
    angle = np.arctan(_LEARNING_RATE * length * distance / scale)
    along = mean_factors / np.float32(length)
    step = np.float32(np.cos(angle) - 1) * (along @ directions)
    step += np.float32(np.sin(angle) / distance) * residual
    directions += np.outer(along, step)
