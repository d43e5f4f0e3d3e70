"""Methods to predict a prompt's experts without its prefill; eldr_serve serves one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from benchmarks.papers.token_routes import is_of_the_demo_model, token_embeddings, token_frequencies
from eldr_serve.arrays import Floats, Ints
from eldr_serve.experts.calibration_trace import CalibrationTrace
from offline.predictor import (
    choose_penalty,
    dual_ridge,
    expert_frequencies,
    fit_signature_predictor,
    token_shares,
    token_weights,
)


@dataclass(frozen=True)
class Prompts:
    """Input of the methods for N prompts: tokens, and expert frequencies of prefill, float64[N, L*E]."""

    trace: CalibrationTrace
    shares: csr_array
    frequencies: Floats

    @classmethod
    def from_trace(cls, trace: CalibrationTrace) -> Prompts:
        """Read the prompts of a trace. Raise ValueError if it has no token ids."""
        return cls(trace, token_shares(trace.prompts, trace.vocabulary), expert_frequencies(trace))

    def __getitem__(self, index: Ints) -> Prompts:
        return Prompts(self.trace.subset_without_routes(index), self.shares[index], self.frequencies[index])


Method = Callable[[Prompts, Prompts], Floats]  # fits the first, returns float64[n, L*E] of the second


def served_predictor(rank: int = 64) -> Method:
    """Return the predictor of eldr_serve."""

    def predict(fit: Prompts, test: Prompts) -> Floats:
        predictor, _ = fit_signature_predictor(fit.trace, rank=rank)
        counts = np.array([predictor.predict(prompt) for prompt in test.trace.prompts], np.float64)
        return np.asarray(counts.reshape(len(counts), -1) / test.trace.prompt_tokens[:, None])

    return predict


def ridge(fit: Prompts, test: Prompts, features: Callable[[csr_array], Any]) -> Floats:
    """Predict by ridge regression of full rank from features of the token shares."""
    x, new = features(fit.shares), features(test.shares)
    kernel, across = (_dense(a @ x.T) for a in (x, new))
    mean = fit.frequencies.mean(axis=0)
    penalty = choose_penalty(kernel, fit.frequencies, 0)["penalty"]
    (dual,) = dual_ridge(kernel, fit.frequencies - mean, [penalty])
    return np.asarray(mean + across @ dual)


def histogram_ridge(fit: Prompts, test: Prompts) -> Floats:
    """Predict from the plain histogram, all tokens with equal weight."""
    return ridge(fit, test, lambda shares: shares)


def chi_square_ridge(fit: Prompts, test: Prompts) -> Floats:
    """Predict from the histogram with the served predictor's weights, at full rank."""
    weights = token_weights(fit.shares)
    return ridge(fit, test, lambda shares: shares * weights[None, :])


def decode_ridge(fit: Prompts, test: Prompts) -> Floats:
    """Predict by `chi_square_ridge` fitted to the experts of decode, as deviations from the mean prefill."""
    decode = fit.trace.decode_probability.reshape(fit.frequencies.shape).astype(np.float64)
    predicted = chi_square_ridge(replace(fit, frequencies=decode), test)
    return np.asarray(predicted - decode.mean(axis=0) + fit.frequencies.mean(axis=0))


def presence_ridge(fit: Prompts, test: Prompts) -> Floats:
    """Predict from the set of tokens, ignoring their frequencies."""

    def features(shares: csr_array) -> csr_array:
        occurs = shares.copy()
        occurs.data = np.ones_like(occurs.data)
        return csr_array(occurs * (1 / np.sqrt(occurs.sum(axis=1)))[:, None])

    return ridge(fit, test, features)


def embedding_ridge(fit: Prompts, test: Prompts) -> Floats:
    """Predict from the mean of the tokens' embeddings in the model and the weighted histogram."""
    embeddings, weights = token_embeddings(), token_weights(fit.shares)

    def features(shares: csr_array) -> Floats:
        parts = (np.asarray(shares @ embeddings), (shares * weights[None, :]).toarray())
        return np.hstack([part / scale for part, scale in zip(parts, scales, strict=True)])

    scales = [1.0, 1.0]
    size = embeddings.shape[1]
    unscaled = features(fit.shares)
    scales = [float(np.sqrt((part**2).sum(axis=1).mean())) for part in np.split(unscaled, [size], axis=1)]
    return ridge(fit, test, features)


def count_table(fit: Prompts, test: Prompts) -> Floats:
    """Predict from a token table built from counts: the mean prompt with the token, by the token's share."""
    mean = fit.frequencies.mean(axis=0)
    return _table(fit.shares.T @ (fit.frequencies - mean), fit.shares.sum(axis=0), 0.1, mean, test)


def route_table(fit: Prompts, test: Prompts) -> Floats:
    """Predict from a token table built from per-token routes: the mean of the token's own experts."""
    mean = fit.frequencies.mean(axis=0)
    sums = np.zeros((fit.trace.vocabulary, len(mean)))
    times = np.zeros(len(sums))
    for prompt, frequencies in zip(fit.trace.prompts, token_frequencies(fit.trace.prompts), strict=True):
        np.add.at(sums, prompt, frequencies - mean)
        np.add.at(times, prompt, 1)
    return _table(sums, times, 1.0, mean, test)


def bag_of_embeddings(fit: Prompts, test: Prompts) -> Floats:
    """Predict with one hidden layer on mean embeddings, stopped early by a fifth of the prompts."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    mean = fit.frequencies.mean(axis=0)
    scale = float((fit.frequencies - mean).std())
    x, new = (torch.tensor(p.shares.toarray(), dtype=torch.float32) for p in (fit, test))
    y = torch.tensor((fit.frequencies - mean) / scale, dtype=torch.float32)
    layers = nn.Linear(x.shape[1], 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, y.shape[1])
    network = nn.Sequential(*layers)
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.01)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    validation, training = order[: len(x) // 5], order[len(x) // 5 :]
    best, stale, predicted = float("inf"), 0, torch.zeros(len(new), y.shape[1])
    while stale < 10:  # epochs without improvement
        network.train()
        for batch in training[torch.randperm(len(training))].split(32):
            optimiser.zero_grad()
            nn.functional.mse_loss(network(x[batch]), y[batch]).backward()
            optimiser.step()
        network.eval()
        with torch.inference_mode():
            loss = float(nn.functional.mse_loss(network(x[validation]), y[validation]))
            stale += 1
            if loss < best:
                best, stale, predicted = loss, 0, network(new)
    return np.asarray(mean + scale * predicted.double().numpy())


def prompt_head(parts: int) -> Method:
    """Return the true experts of the first of `parts` equal parts of a prompt, as of a cached prefix."""

    def predict(fit: Prompts, test: Prompts) -> Floats:
        heads = [prompt[: -(-len(prompt) // parts)] for prompt in test.trace.prompts]
        return np.array([frequencies.mean(axis=0) for frequencies in token_frequencies(heads)], np.float64)

    return predict


def previous_turn(fit: Prompts, test: Prompts) -> Floats:
    """Return the prefill of another prompt of the domain: a session's previous turn, without common text.

    A prompt that is alone in its domain gets the mean of the fitted prompts.
    """
    domains = np.array(test.trace.domains)
    frequencies = np.tile(fit.frequencies.mean(axis=0), (len(domains), 1))
    for domain in np.unique(domains):
        members = np.flatnonzero(domains == domain)
        if len(members) > 1:
            frequencies[members] = test.frequencies[np.roll(members, 1)]
    return frequencies


def methods_for(trace: CalibrationTrace) -> dict[str, Method]:
    """Return all methods by name. Some need the demo model's weights, and exist only for its traces."""
    methods: dict[str, Method] = {
        "prefill": lambda fit, test: test.frequencies,
        "served predictor, rank 64": served_predictor(),
        "served predictor, rank 16": served_predictor(16),
        "ridge, weighted histogram": chi_square_ridge,
        "ridge, histogram": histogram_ridge,
        "ridge, fitted to decode": decode_ridge,
        "ridge, presence": presence_ridge,
        "token table, of counts": count_table,
        "bag of embeddings": bag_of_embeddings,
        "session's last turn": previous_turn,
    }
    if is_of_the_demo_model(trace):
        methods |= {
            "token table, of routes": route_table,
            "ridge, model's embeddings": embedding_ridge,
            "first tenth of the prompt": prompt_head(10),
            "cached first half of the prompt": prompt_head(2),
        }
    return methods


def _table(sums: Any, times: Any, prior: float, mean: Floats, test: Prompts) -> Floats:
    rows = np.asarray(sums) / (np.asarray(times) + prior)[:, None]
    return np.asarray(mean + test.shares @ rows)


def _dense(kernel: Any) -> Floats:
    return np.asarray(kernel.toarray() if hasattr(kernel, "toarray") else kernel)
