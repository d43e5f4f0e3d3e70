"""Signatures against slow, plain references."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from eldr_serve.experts.fitting.quality import inverse_document_frequency, select_layers, signature_quality
from eldr_serve.experts.fitting.table import fit_signature
from eldr_serve.experts.signature import TRANSFORMS, SignatureSpec, pack_counts, unpack_counts
from tests.support.traces import synthetic_trace

COUNTS = arrays(np.uint32, (3, 4, 5), elements=st.integers(0, 50_000))


def spec(element: str = "count", seed: int = 0) -> SignatureSpec:
    idf = np.random.default_rng(seed).uniform(0, 2, (4, 5)).astype(np.float32)
    return SignatureSpec(idf, np.array([0, 2, 3]), element)


@given(COUNTS, st.sampled_from(["count", "sqrt", "binary"]))
def test_encode_equals_a_loop(counts: np.ndarray, element: str) -> None:
    s = spec(element)
    cell = {"count": float, "sqrt": math.sqrt, "binary": lambda c: float(c > 0)}[element]
    for row, request in zip(s.encode(counts), counts, strict=True):
        vector = [
            cell(int(request[layer, e])) * float(s.weights[layer, e]) for layer in (0, 2, 3) for e in range(5)
        ]
        norm = math.sqrt(sum(v * v for v in vector))
        expected = [v / norm if norm else 0.0 for v in vector]
        np.testing.assert_allclose(row, expected, atol=1e-6)
        assert np.linalg.norm(row) == pytest.approx(1.0 if norm else 0.0, abs=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (5,), (2, 3, 5), ()])
def test_counts_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        spec().encode(np.zeros(shape, np.uint32))


@pytest.mark.parametrize(
    ("idf", "layers"),
    [
        (np.ones(5), [0]),
        (np.full((2, 3), np.nan), [0]),
        (-np.ones((2, 3)), [0]),
        (np.ones((2, 3)), []),
        (np.ones((2, 3)), [2]),
        (np.ones((2, 3)), [-1]),
    ],
)
def test_an_impossible_spec_is_refused(idf: np.ndarray, layers: list[int]) -> None:
    with pytest.raises(ValueError):
        SignatureSpec(idf, np.array(layers, np.int64))


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        spec().weights[0, 0] = 1


@given(arrays(np.uint32, st.tuples(st.integers(1, 6), st.just(2), st.just(3)), elements=st.integers(0, 3)))
def test_idf_equals_its_formula(counts: np.ndarray) -> None:
    idf = inverse_document_frequency(counts)
    for layer in range(2):
        for expert in range(3):
            df = sum(int(request[layer, expert] > 0) for request in counts)
            assert idf[layer, expert] == pytest.approx(math.log((len(counts) + 1) / (df + 1)), abs=1e-6)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return 1 - float(a @ b) / norm if norm else 1.0


def test_quality_equals_spearman_over_all_pairs() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((12, 7)), rng.random((12, 9))
    b[:, :7] += 2 * a
    pairs = [(i, j) for i in range(12) for j in range(12) if i != j]
    exact = stats.spearmanr(
        [_distance(a[i], a[j]) for i, j in pairs], [_distance(b[i], b[j]) for i, j in pairs]
    )
    assert signature_quality(a, b, pairs=60_000) == pytest.approx(exact.statistic, abs=0.01)
    assert signature_quality(a, a) == pytest.approx(1.0)
    assert signature_quality(a, b, seed=3) == signature_quality(a, b, seed=3)


def test_quality_needs_the_same_requests() -> None:
    for a, b in ((np.ones((3, 2)), np.ones((4, 2))), (np.ones((2, 2)), np.ones((2, 2)))):
        with pytest.raises(ValueError):
            signature_quality(a, b)


def test_layer_selection_equals_a_greedy_search_from_scratch() -> None:
    trace = synthetic_trace()
    pairs = 400
    selection = select_layers(trace.prefill_counts, trace.decode_probability, pairs=pairs, seed=5)
    rng = np.random.default_rng(5)
    i = rng.integers(60, size=pairs)
    j = (i + rng.integers(1, 60, size=pairs)) % 60

    def rho(layers: list[int]) -> float:
        a = trace.prefill_counts[:, layers].reshape(60, -1).astype(float)
        b = trace.decode_probability.reshape(60, -1)
        left, right = ([_distance(x[p], x[q]) for p, q in zip(i, j, strict=True)] for x in (a, b))
        return float(stats.spearmanr(left, right).statistic)

    chosen: list[int] = []
    for step in range(4):
        scores = {layer: rho([*chosen, layer]) for layer in range(4) if layer not in chosen}
        best = max(scores, key=lambda layer: scores[layer])
        chosen.append(best)
        assert selection.order[step] == best
        assert selection.rho[step] == pytest.approx(scores[best], abs=1e-3)
    assert set(selection.best_layers) == set(selection.order[: int(np.argmax(selection.rho)) + 1])
    assert 0 not in selection.best_layers  # the layer of noise


def test_every_transform_can_be_fitted_and_predicts() -> None:
    trace = synthetic_trace()
    for name in TRANSFORMS:
        fitted = fit_signature(trace, name)
        assert signature_quality(fitted.encode(trace.prefill_counts), trace.decode_probability) > 0.4
    with pytest.raises(ValueError, match="count-idf"):
        fit_signature(trace, "gate-logit")


@given(arrays(np.uint32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.integers(0, 2**32 - 1)))
def test_unpacked_counts_equal_the_packed_ones(counts: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack_counts(pack_counts(counts)), counts)


@given(st.text(max_size=80) | st.binary(max_size=80).map(lambda b: b.hex()))
def test_malformed_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        unpack_counts(text)


@given(st.integers(0, 200), st.integers(0, 255))
def test_damaged_counts_give_counts_or_an_error(position: int, byte: int) -> None:
    good = pack_counts(np.arange(60, dtype=np.uint32).reshape(6, 10))
    damaged = good[:position] + chr(byte) + good[position + 1 :]
    with contextlib.suppress(ValueError):
        assert unpack_counts(damaged).shape[0] > 0
    with pytest.raises(ValueError):
        unpack_counts(good[: max(0, len(good) - 1 - position)])


def test_only_counts_can_be_packed() -> None:
    for bad in (np.ones((2, 2)), np.array([[-1]]), np.zeros(3, np.uint32), np.zeros((0, 4), np.uint32)):
        with pytest.raises(ValueError):
            pack_counts(bad)
