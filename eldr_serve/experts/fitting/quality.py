"""Quality of signatures: IDF weights, correlation of prefill with decode, and layer selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from eldr_serve.errors import UserInputError
from eldr_serve.experts.signature import Element, cells_of


def inverse_document_frequency(prefill_counts: ArrayLike) -> NDArray[np.float32]:
    """Return log((N+1)/(df+1)), float32[L,E]; df is the number of requests that use the expert (ELDR, 4.2.2).

    Raises:
        UserInputError: the counts are not [N, L, E] with N > 0.
    """
    counts = np.asarray(prefill_counts)
    if counts.ndim != 3 or not len(counts):
        raise UserInputError(f"the shape of prefill counts must be [N, L, E] with N > 0, got {counts.shape}")
    document_frequency = (counts > 0).sum(axis=0)
    idf: NDArray[np.float32] = np.log((len(counts) + 1) / (document_frequency + 1)).astype(np.float32)
    return idf


def signature_quality(a: ArrayLike, b: ArrayLike, pairs: int = 20000, seed: int = 0) -> float:
    """Return rho (Eq. 1): Spearman correlation of cosine distances in `a` and in `b`, over random pairs.

    Args:
        a, b: [N, *], two representations of the same N >= 3 requests.
        pairs: number of random pairs of different requests.

    Raises:
        UserInputError: there are fewer than three requests, or their numbers differ.
    """
    left, right = (np.asarray(x, np.float32).reshape(len(np.asarray(x)), -1) for x in (a, b))
    if len(left) != len(right) or len(left) < 3:
        raise UserInputError(
            f"both representations must cover the same requests, at least 3; got {len(left)} and {len(right)}"
        )
    i, j = _pairs(len(left), pairs, seed)
    result = stats.spearmanr(_cosine_distance(left, i, j), _cosine_distance(right, i, j))
    return float(result.statistic)


@dataclass(frozen=True)
class LayerSelection:
    """Result of the greedy layer search.

    Attributes:
        order: int64[L], layers in the order of selection.
        rho: float64[L], rho[n-1] is rho with the first n layers of `order`.
    """

    order: NDArray[np.int64]
    rho: NDArray[np.float64]

    @property
    def best_layers(self) -> NDArray[np.int64]:
        """Return the layers up to the maximum of rho, ascending."""
        return np.sort(self.order[: int(np.argmax(self.rho)) + 1])


def select_layers(
    prefill_counts: ArrayLike,
    decode_probability: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    element: Element = "count",
    pairs: int = 5000,
    seed: int = 0,
) -> LayerSelection:
    """Select layers greedily (section 4.2.2, step 3): always the layer that raises rho most.

    Args:
        prefill_counts: unsigned[N,L,E].
        decode_probability: float[N,L,E], share of decode steps in which the expert was chosen.
        weights: float[L,E], weight of each cell; None: no weights.
        pairs: number of random pairs of requests for rho.

    Raises:
        UserInputError: there are fewer than three requests.
    """
    cells = cells_of(np.asarray(prefill_counts), element)
    if weights is not None:
        cells = cells * np.asarray(weights, np.float32)
    decode = np.asarray(decode_probability, np.float32)
    i, j = _pairs(len(cells), pairs, seed)
    target = _centred_ranks(_cosine_distance(decode.reshape(len(decode), -1), i, j)[None])[0]
    # Dot products and norms of a set of layers are sums over its layers, so compute them once per layer.
    dots = np.stack(
        [np.einsum("pe,pe->p", cells[i, layer], cells[j, layer]) for layer in range(cells.shape[1])]
    )
    squares = np.einsum("nle,nle->ln", cells, cells)
    norms_i, norms_j = squares[:, i], squares[:, j]
    order: list[int] = []
    rhos: list[float] = []
    remaining = list(range(cells.shape[1]))
    dot, norm_i, norm_j = (np.zeros(len(i), np.float32) for _ in range(3))
    while remaining:
        norm = np.sqrt((norm_i + norms_i[remaining]) * (norm_j + norms_j[remaining]))
        cosine = np.divide(dot + dots[remaining], norm, out=np.zeros_like(norm), where=norm > 0)
        scores = _centred_ranks(1 - cosine) @ target
        best = int(np.argmax(scores))
        layer = remaining.pop(best)
        order.append(layer)
        rhos.append(float(scores[best]))
        dot, norm_i, norm_j = dot + dots[layer], norm_i + norms_i[layer], norm_j + norms_j[layer]
    return LayerSelection(np.array(order), np.array(rhos))


def _pairs(num_requests: int, pairs: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if num_requests < 3:
        raise UserInputError(f"rho needs 3 or more requests, got {num_requests}")
    rng = np.random.default_rng(seed)
    i = rng.integers(num_requests, size=pairs)
    return i, (i + rng.integers(1, num_requests, size=pairs)) % num_requests


def _cosine_distance(
    x: NDArray[np.float32], i: NDArray[np.int64], j: NDArray[np.int64]
) -> NDArray[np.float32]:
    norm = np.sqrt(np.einsum("nd,nd->n", x, x))
    unit = np.divide(x, norm[:, None], out=np.zeros_like(x), where=norm[:, None] > 0)
    distance: NDArray[np.float32] = 1 - np.einsum("pd,pd->p", unit[i], unit[j])
    return distance


def _centred_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return rows of unit norm whose products are Spearman correlations; a constant row becomes zeros."""
    ranks = stats.rankdata(values, axis=-1)
    ranks -= ranks.mean(axis=-1, keepdims=True)
    norm = np.sqrt((ranks**2).sum(axis=-1, keepdims=True))
    unit: NDArray[np.float64] = np.divide(ranks, norm, out=np.zeros_like(ranks), where=norm > 0)
    return unit
