"""The F-score against the imbalance that it measures, and the best set against all sets."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.scheduling.policies.balance_route.fscore import FScore, best_subset

TOKENS = st.integers(0, 500)
LOADS = st.lists(TOKENS, min_size=1, max_size=6)


def slow_score(score: FScore, added: np.ndarray, margins: np.ndarray) -> float:
    gain = sum(score.beta * w * x for w, x in zip(score.weights, added, strict=True))
    return gain - sum(
        score.alpha * w * max(0.0, x - m) for w, x, m in zip(score.weights, added, margins, strict=True)
    )


@st.composite
def scores(draw: st.DrawFn) -> tuple[FScore, np.ndarray]:
    """Draw a score, and margins[H+1] in whole tokens."""
    horizon = draw(st.integers(0, 5))
    score = FScore.build_horizon(
        horizon,
        draw(st.sampled_from([0.5, 0.9, 1.0])),
        draw(st.sampled_from([0.0, 0.5, 1.0, 8.0, 48.0])),
        draw(st.sampled_from([0.5, 1.0, 2.0])),
    )
    margins = draw(st.lists(TOKENS, min_size=horizon + 1, max_size=horizon + 1))
    return score, np.array(margins, np.float64)


@st.composite
def requests(draw: st.DrawFn, steps: int) -> np.ndarray:
    """Draw the tokens that a request adds at each step. It may end before the last one."""
    tokens, stays = draw(TOKENS), draw(st.integers(0, steps - 1))
    return np.array([tokens * (h <= stays) for h in range(steps)], np.float64)


@given(LOADS, st.integers(0, 5), TOKENS)
def test_the_current_score_is_the_decrease_of_the_imbalance(
    loads: list[int], worker: int, tokens: int
) -> None:
    worker %= len(loads)
    after = [load + tokens * (w == worker) for w, load in enumerate(loads)]
    before, now = (len(loads) * max(ls) - sum(ls) for ls in (loads, after))
    margin = np.array([max(loads) - loads[worker]], np.float64)
    assert float(FScore.build_current(len(loads))([tokens], margin)) == before - now


@given(scores(), st.data())
def test_scores_equal_the_definition(case: tuple[FScore, np.ndarray], data: st.DataObject) -> None:
    score, margins = case
    added = np.array(data.draw(st.lists(requests(len(margins)), min_size=1, max_size=8)))
    assert score(added, margins) == pytest.approx([slow_score(score, x, margins) for x in added])
    rows_of_margins = np.stack([margins, margins + 7])
    assert score(added[0], rows_of_margins) == pytest.approx(
        [slow_score(score, added[0], m) for m in rows_of_margins]
    )


@given(scores(), st.integers(1, 8), st.data())
def test_the_best_set_is_the_best_of_all_sets(
    case: tuple[FScore, np.ndarray], limit: int, data: st.DataObject
) -> None:
    score, margins = case
    added = np.array(data.draw(st.lists(requests(len(margins)), min_size=1, max_size=7)))
    chosen, value = best_subset(added, limit, score, margins)
    best = max(
        slow_score(score, added[list(members)].sum(axis=0), margins)
        for size in range(1, min(limit, len(added)) + 1)
        for members in combinations(range(len(added)), size)
    )
    assert value == pytest.approx(best, abs=1e-6)
    assert 1 <= len(set(chosen)) == len(chosen) <= limit
    assert slow_score(score, added[chosen].sum(axis=0), margins) == pytest.approx(value, abs=1e-6)
