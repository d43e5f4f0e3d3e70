"""Fit of a signature predictor to a calibration trace: ridge regression from prompts' tokens to experts.

A prompt is represented by the share of each token id; the fit predicts how its expert frequencies
deviate from the mean. With N prompts, far fewer than V tokens, the regression is solved in its dual form,
[N, N], and only the r directions in which its predictions vary most are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from eldr_serve.arrays import Floats
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.signature_predictor import SignaturePredictor

PENALTIES = np.geomspace(1e-4, 3, 10)  # ridge penalties, relative to the kernel's mean diagonal
FOLDS = 5
# Noise of a prompt in online learning, in the unit of PENALTIES. Of the values from 1e-4 to 3 this was the
# best or nearly the best on all traces, even where the fit's own penalty was far lower, because a diagonal
# covariance overestimates the information in a prompt.
_NOISE = 0.3
_RARE = 1e-4  # share of a token below which its weight is constant


def token_shares(prompts: Sequence[NDArray[Any]], vocabulary: int) -> csr_array:
    """Return float64[N, V], the share of each token id in each prompt."""
    lengths = np.array([len(prompt) for prompt in prompts])
    rows = np.repeat(np.arange(len(prompts)), lengths)
    shares = np.repeat(1 / np.maximum(lengths, 1), lengths)
    ids = np.concatenate([np.zeros(0, np.int64), *prompts])
    return csr_array((shares, (rows, ids)), shape=(len(prompts), vocabulary))


def expert_frequencies(trace: CalibrationTrace) -> Floats:
    """Return float64[N, L*E], the share of a prompt's tokens that each expert got; a layer adds up to k."""
    counts = trace.prefill_counts.reshape(len(trace.ids), -1)
    frequencies: Floats = counts / np.maximum(trace.prompt_tokens, 1)[:, None]
    return frequencies


def token_weights(shares: csr_array) -> Floats:
    """Return float64[V], the inverse root of each token's mean share (chi-square distance)."""
    weights: Floats = (np.asarray(shares.mean(axis=0)) + _RARE) ** -0.5
    return weights


def fit_signature_predictor(
    trace: CalibrationTrace, *, rank: int = 64, seed: int = 0, on_step: Callable[[], None] = lambda: None
) -> tuple[SignaturePredictor, dict[str, Any]]:
    """Fit to the prefill counts of a trace with token ids; the penalty is chosen on held-out prompts.

    Args:
        rank: maximum number of directions kept; fewer if there are fewer prompts.
        seed: seed of the folds.
        on_step: callback after each step of the fit, called FOLDS + 1 times.

    Returns:
        The predictor, and a JSON-able report: prompts, rank, penalty, token ids seen, MiB, seconds,
        and the `agreement` of held-out prompts with their predictions at full rank.

    Raises:
        UserInputError: the trace has no token ids, or too few prompts.
    """
    if len(trace.ids) < 2 * FOLDS:
        raise UserInputError(
            f"{len(trace.ids)} prompts are too few to fit a predictor; give {2 * FOLDS} or more"
        )
    start = time.perf_counter()
    shares = token_shares(trace.prompts, trace.vocabulary)
    weights = token_weights(shares)
    features = shares * weights[None, :]
    kernel = (features @ features.T).toarray()
    y = expert_frequencies(trace)
    scores = choose_penalty(kernel, y, seed, on_step)
    mean = y.mean(axis=0)
    (dual,) = dual_ridge(kernel, y - mean, [scores["penalty"]])
    directions = _directions(kernel @ dual, rank)
    tokens = (features.T @ (dual @ directions.T)) * weights[:, None]
    noise = _NOISE * kernel.trace() / len(kernel)
    squares = np.asarray((shares * shares).sum(axis=0))
    shape = trace.prefill_counts.shape[1:]
    predictor = SignaturePredictor(
        model=trace.model,
        tokenizer=trace.tokenizer,
        top_k=trace.top_k,
        mean=mean.reshape(shape).astype(np.float32),
        token_factors=tokens.astype(np.float32),
        expert_factors=directions.reshape(-1, *shape).astype(np.float32),
        variance=_variance(noise, weights, squares).astype(np.float32),
        fingerprint=trace.fingerprint,
    )
    on_step()
    report = {
        "prompts": len(y),
        "token_ids_seen": int((squares > 0).sum()),
        "vocabulary": trace.vocabulary,
        "rank": len(directions),
        **scores,
        "mib": len(predictor.to_bytes()) / 2**20,
        "seconds": time.perf_counter() - start,
    }
    return predictor, report


def _variance(noise: float, weights: Floats, squares: Floats) -> Floats:
    """Return the variance of each token's effect: the ridge as a Bayesian regression without covariances.

    Args:
        noise: variance of a prompt's noise.
        weights: from `token_weights`.
        squares: float64[V], sum of the squared shares of each token.
    """
    variance: Floats = 1 / (noise / weights**2 + squares)
    return variance


def agreement(predicted: Floats, true: Floats, mean: Floats) -> dict[str, float]:
    """Return how close predictions [N, *] are to the truth, compared with the mean.

    Returns:
        `cosine`: cosine of the predicted and the true deviation from the mean, averaged over prompts.
        `gain`: 1 - the squared error over that of predicting the mean.
    """
    prediction, deviation = predicted - mean, true - mean
    lengths = np.linalg.norm(prediction, axis=1) * np.linalg.norm(deviation, axis=1)
    products = (prediction * deviation).sum(axis=1)
    cosines = np.divide(products, lengths, out=np.zeros(len(products)), where=lengths > 0)
    return {
        "cosine": float(cosines.mean()),
        "gain": 1 - float(((prediction - deviation) ** 2).sum() / (deviation**2).sum()),
    }


def choose_penalty(
    kernel: Floats, y: Floats, seed: int, on_fold: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the penalty with the largest gain on held-out prompts, and their `agreement`.

    Args:
        kernel: float64[N, N] of the prompts' features.
        y: float64[N, *], the targets.
        on_fold: callback after each fold, called FOLDS times.
    """
    predicted = np.zeros((len(PENALTIES), *y.shape))
    means = np.zeros_like(y)
    for held_out in np.array_split(np.random.default_rng(seed).permutation(len(y)), FOLDS):
        fitted = np.setdiff1d(np.arange(len(y)), held_out)
        mean = y[fitted].mean(axis=0)
        means[held_out] = mean
        duals = dual_ridge(kernel[np.ix_(fitted, fitted)], y[fitted] - mean, PENALTIES)
        for prediction, dual in zip(predicted, duals, strict=True):
            prediction[held_out] = mean + kernel[np.ix_(held_out, fitted)] @ dual
        on_fold()
    scores_by_penalty = [
        {"penalty": float(penalty)} | agreement(prediction, y, means)
        for penalty, prediction in zip(PENALTIES, predicted, strict=True)
    ]
    return max(scores_by_penalty, key=lambda scores: scores["gain"])


def dual_ridge(kernel: Floats, y: Floats, penalties: Sequence[float] | Floats) -> list[Floats]:
    """Return weights float64[N, *] for each penalty. A prompt's kernel row times these is its prediction."""
    values, vectors = np.linalg.eigh(kernel)
    projections = vectors.T @ y
    scale = max(float(np.trace(kernel)) / len(kernel), 1e-300)
    return [
        vectors @ (projections / (np.maximum(values, 0) + penalty * scale)[:, None]) for penalty in penalties
    ]


def _directions(fitted: Floats, rank: int) -> Floats:
    """Return float64[r, L*E], orthonormal directions in which the rows vary most about zero."""
    values, vectors = np.linalg.eigh(fitted @ fitted.T)
    largest = np.argsort(-values)[:rank]
    largest = largest[values[largest] > 1e-12 * max(values.max(), 1e-300)]
    directions: Floats = (vectors[:, largest].T @ fitted) / np.sqrt(values[largest])[:, None]
    return directions
