"""What routes say about experts: how much each is used, which are used together (GRACE-MoE, section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def expert_load(routes: ArrayLike, num_experts: int) -> Floats:
    """float[L, E]: tokens of each expert, of routes [T, L, k]."""
    return np.stack([_chosen(layer, num_experts).sum(axis=0) for layer in _layers(routes)])


def co_activation(routes: ArrayLike, num_experts: int) -> Floats:
    """float[L, E, E]: tokens that chose both experts, of routes [T, L, k]; 0 on the diagonal."""
    affinity = []
    for layer in _layers(routes):
        chosen = _chosen(layer, num_experts)
        together = chosen.T @ chosen
        np.fill_diagonal(together, 0)
        affinity.append(together)
    return np.stack(affinity)


def _layers(routes: ArrayLike) -> NDArray[np.int64]:
    """int[L, T, k]."""
    array = np.asarray(routes)
    if array.ndim != 3 or not array.size:
        raise ValueError(f"routes have shape {array.shape}, not [tokens, layers, k]")
    return array.transpose(1, 0, 2)


def _chosen(experts: NDArray[np.int64], num_experts: int) -> Floats:
    """float[T, E], 1 where the token chose the expert."""
    chosen = np.zeros((len(experts), num_experts))
    chosen[np.arange(len(experts))[:, None], experts] = 1
    return chosen
