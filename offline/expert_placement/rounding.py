"""Rounding of fractional replicas to whole ones (DIRECTOR, section VI-C)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Floats, Ints


def round_in_polytope(
    replicas: Floats, price: Floats, room: Ints, budget_s: float, rng: np.random.Generator
) -> Ints:
    """Round the fractional replicas in each column with a random walk.

    Each step goes in a random direction that keeps every tight constraint (an expert's replicas, a
    column's slots, the budget) until a variable becomes whole or another constraint becomes tight. The
    direction's sign is drawn so that the expected change of every variable is zero. If the tight constraints
    leave no direction, the walk drops one of them, as iterative relaxation does: the budget of the column
    with the fewest fractional variables.

    Args:
        replicas: [E, N], whole row sums.
        price: [E, N], price of one replica, s.
        room: [N] slots; a column that exceeds them gets no fuller.
        budget_s: budget of each column.

    Returns:
        int[E, N] with the same row sums; column sums within `room`, or rounded if they exceeded it.
    """
    whole = np.floor(replicas + 1e-7)
    part = np.clip(replicas - whole, 0, 1)
    expert, column = np.nonzero(part > 1e-7)
    x = part[expert, column]
    columns = replicas.shape[1]
    expert_members = (expert == np.unique(expert)[:, None]).astype(np.float64)
    column_members = (column == np.arange(columns)[:, None]).astype(np.float64)
    cost = price / max(budget_s, 1e-300)
    limits = np.concatenate([column_members, column_members * cost[expert, column]])
    excess = np.concatenate([replicas.sum(axis=0) - room, (replicas * cost).sum(axis=0) - 1])
    slack = np.maximum(-excess, 0)
    is_active = np.ones(2 * columns, bool)
    free = np.ones(len(x), bool)
    while free.any():
        tight = is_active & (slack < 1e-7) & (limits[:, free] != 0).any(axis=1)
        rows = np.concatenate([expert_members[:, free], limits[tight][:, free]])
        direction = _null_vector(rows, rng)
        if direction is None:
            if not tight.any():  # a row with a single fraction has a rounding error
                break
            budgets = np.flatnonzero(tight[columns:])
            # With constraints of experts and slots alone, vertices are whole. So slots are relaxed last, and
            # only because of rounding errors.
            row = (
                columns + min(budgets, key=lambda n: column_members[n, free].sum())
                if len(budgets)
                else int(tight.argmax())
            )
            is_active[row] = False
            continue
        step = np.zeros(len(x))
        step[free] = direction
        ahead, back = _reach(x, slack, limits, is_active, step), _reach(x, slack, limits, is_active, -step)
        length = ahead if rng.random() * (ahead + back) < back else -back
        x = x + length * step
        slack = slack - limits @ (length * step)
        x = np.where(abs(x - np.round(x)) < 1e-7, np.round(x), x)
        free &= (x > 0) & (x < 1)
    whole[expert, column] += np.round(x)
    return whole.astype(np.int64)


def _null_vector(rows: Floats, rng: np.random.Generator) -> Floats | None:
    """Return a random unit vector orthogonal to all rows, or None if there is none."""
    _, size, basis = np.linalg.svd(rows)
    free = basis[int((size > 1e-9 * max(1.0, size.max(initial=0.0))).sum()) :]
    if not len(free):
        return None
    vector: Floats = rng.standard_normal(len(free)) @ free
    return vector / np.linalg.norm(vector)


def _reach(x: Floats, slack: Floats, limits: Floats, is_active: NDArray[np.bool_], step: Floats) -> float:
    """Return how far x can go along the step within [0, 1] and the kept limits."""
    with np.errstate(divide="ignore", invalid="ignore"):
        to_bound = np.where(step > 1e-12, (1 - x) / step, np.where(step < -1e-12, -x / step, np.inf))
        grows = limits @ step
        to_limit = np.where(is_active & (grows > 1e-9), np.maximum(slack, 0) / grows, np.inf)
    return float(min(to_bound.min(), to_limit.min()))
