"""Forecasts of expert use, by hand and for requests whose prompts are biased."""

import numpy as np
import pytest

from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.forecast import decode_correction, expected_workload, workload_by_rank


def workload_error(predicted: np.ndarray, actual: np.ndarray) -> float:
    """Return the share of tokens with the wrong expert, averaged over layers."""
    guess, truth = (counts / counts.sum(axis=-1, keepdims=True) for counts in (predicted, actual))
    return float(abs(guess - truth).sum(axis=-1).mean() / 2)


def test_a_correction_removes_the_common_bias_of_prompts() -> None:
    rng = np.random.default_rng(0)
    use = rng.dirichlet(np.ones(6), (40, 2))
    tokens, steps = rng.integers(20, 60, 40), np.full(40, 50)
    bias = np.array([3, 1, 1, 1, 1, 0.3])
    prefill, decode = use * bias * tokens[:, None, None], use * steps[:, None, None]
    correction = decode_correction(prefill[:20], tokens[:20], decode[:20], steps[:20])
    assert correction.shape == (2, 6)
    assert correction[:, 0].max() < 0.5
    assert correction[:, 5].min() > 1.5
    truth = decode[20:].sum(axis=0)
    plain, corrected = (
        workload_error(expected_workload(counts[20:], tokens[20:], 50), truth)
        for counts in (prefill, prefill * correction)
    )
    assert corrected < plain / 2
    rare = decode_correction([[[0, 9]]], [9], [[[0, 9]]], [9])
    assert rare.tolist() == [[1, 1]]  # an expert that nobody used is left alone


def test_measures_equal_values_computed_by_hand() -> None:
    assert expected_workload([[[4, 0]], [[1, 1]]], [4, 2], 10).tolist() == [[15, 5]]
    assert expected_workload([[[4, 0]], [[1, 1]]], [4, 2], [10, 0]).tolist() == [[10, 0]]


def test_each_rank_gets_its_own_requests_in_equal_blocks() -> None:
    counts, tokens = np.arange(3 * 2 * 4).reshape(3, 2, 4), [1, 2, 4]
    workload = workload_by_rank(counts, tokens, [1, 1, 2], Topology(ranks=2))
    assert workload.shape == (2, 2, 4)
    assert np.array_equal(workload[:, 0], counts[0] + counts[1] / 2)
    assert np.array_equal(workload[:, 1], counts[2] / 2)
    assert np.allclose(workload.sum(axis=1), expected_workload(counts, tokens, [1, 1, 2]))
    alone = workload_by_rank(counts[:1], tokens[:1], 1, Topology(ranks=4))  # idle ranks have no tokens
    assert (alone.sum(axis=(0, 2)) > 0).sum() == 1
    with pytest.raises(ValueError, match="prompt lengths"):
        workload_by_rank(counts, [1, 2], 1, Topology(ranks=2))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: expected_workload([[[1]]], [1, 2], 1), "do not match"),
        (lambda: expected_workload([[[1]]], [0], 1), "prompt 0 of 1 has no tokens"),
    ],
)
def test_bad_input_is_refused(call: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()
