"""Statistics of experts in routes: how often each is used, and which together (GRACE-MoE, section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError


def expert_load(routes: ArrayLike, num_experts: int) -> Floats:
    """Return float[L, E], the tokens of each expert in routes [T, L, k]."""
    return np.stack([_choices(layer, num_experts).sum(axis=0) for layer in _layers(routes)])


def co_activation(routes: ArrayLike, num_experts: int) -> Floats:
    """Return float[L, E, E], the tokens that chose both experts in routes [T, L, k], with a diagonal of 0."""
    affinity = []
    for layer in _layers(routes):
        choices = _choices(layer, num_experts)
        pairs = choices.T @ choices
        np.fill_diagonal(pairs, 0)
        affinity.append(pairs)
    return np.stack(affinity)


def _layers(routes: ArrayLike) -> Ints:
    """Return the routes by layer, int[L, T, k]."""
    array = np.asarray(routes)
    if array.ndim != 3 or not array.size:
        raise UserInputError(
            f"routes have shape {array.shape}: give an array of shape [tokens, layers, k] that is not empty"
        )
    return array.transpose(1, 0, 2)


def _choices(experts: Ints, num_experts: int) -> Floats:
    """Return float[T, E], 1 if the token chose the expert."""
    choices = np.zeros((len(experts), num_experts))
    choices[np.arange(len(experts))[:, None], experts] = 1
    return choices
