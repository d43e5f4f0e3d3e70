"""The signature predictor: its predictions, its file and its checks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.experts.signature_predictor import SignaturePredictor, tokenizer_fingerprint
from tests.support.predictors import PREDICTOR, E, K, L, R, V, predictor


def expected_counts(p: SignaturePredictor, ids: list[int]) -> np.ndarray:
    """Compute the prediction token by token and cell by cell."""
    counts = np.zeros((L, E))
    for layer in range(L):
        for expert in range(E):
            added = [
                sum(
                    float(p.token_factors[t, r]) * float(p.expert_factors[r, layer, expert]) for r in range(R)
                )
                for t in ids
                if 0 <= t < V
            ]
            counts[layer, expert] = min(max(p.mean[layer, expert] + sum(added) / len(ids), 0), 1)
        counts[layer] *= K * len(ids) / counts[layer].sum()
    return counts


@given(st.lists(st.integers(-3, V + 3), min_size=1, max_size=20), st.integers(0, 5))
def test_a_prediction_is_the_mean_plus_a_term_for_each_token(ids: list[int], seed: int) -> None:
    p = predictor(seed)
    counts = p.predict(ids)
    assert counts.dtype == np.float32
    np.testing.assert_allclose(counts, expected_counts(p, ids), rtol=2e-4, atol=1e-4)
    # A prompt's counts have the same sum.
    np.testing.assert_allclose(counts.sum(axis=1), K * len(ids), rtol=1e-4)


def test_a_prompt_without_known_tokens_gets_the_mean() -> None:
    for ids in ([V, V + 7, -1], np.array([2**40], np.uint64)):
        np.testing.assert_allclose(PREDICTOR.predict(ids), PREDICTOR.mean * len(ids), rtol=1e-5)
    assert not PREDICTOR.predict([]).any()


@given(arrays(np.float32, (L, E), elements=st.floats(-100, 100, width=32)))
def test_predicted_counts_are_valid_counts(added: np.ndarray) -> None:
    length = np.linalg.norm(added)
    direction = added / length if length > 1e-3 else np.eye(L, E, dtype=np.float32) / np.sqrt(L)
    unit = np.ones(1, np.float32)
    tokens, experts = unit[None] * np.float32(length), direction[None].astype(np.float32)
    predictor = replace(PREDICTOR, token_factors=tokens, expert_factors=experts, variance=unit)
    counts = predictor.predict([0, 0, 0])
    assert np.isfinite(counts).all()
    assert (counts >= 0).all()
    np.testing.assert_allclose(counts.sum(axis=1), 3 * K, rtol=1e-4)


def test_a_loaded_predictor_equals_the_saved_one(tmp_path: Path) -> None:
    PREDICTOR.save(tmp_path / "file")
    loaded = SignaturePredictor.load(tmp_path / "file")
    assert (loaded.model, loaded.tokenizer, loaded.top_k) == ("m", "t", K)
    np.testing.assert_array_equal(loaded.predict([1, 2, 2]), PREDICTOR.predict([1, 2, 2]))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mean": PREDICTOR.mean * 2}, "add up"),
        ({"mean": -PREDICTOR.mean}, "add up"),
        ({"mean": np.array([[2, 0, 0, 0, 0]] * L, np.float32)}, "add up"),
        ({"mean": PREDICTOR.mean[0]}, "shape"),
        ({"token_factors": PREDICTOR.token_factors[:, 0]}, "shape"),
        ({"token_factors": PREDICTOR.token_factors.astype(np.float64)}, "float32"),
        ({"token_factors": np.full((V, R), np.nan, np.float32)}, "finite"),
        ({"variance": PREDICTOR.variance[1:]}, "V entries"),
        ({"variance": -PREDICTOR.variance}, "negative"),
        ({"expert_factors": PREDICTOR.expert_factors[:2]}, "shape"),
        ({"expert_factors": 2 * PREDICTOR.expert_factors}, "orthonormal"),
        ({"expert_factors": PREDICTOR.expert_factors[:, :, :4]}, "shape"),
    ],
)
def test_invalid_arrays_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ArtifactError, match=word):
        replace(PREDICTOR, **changes)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"model": "n"}, "model m, not n"),
        ({"tokenizer": "u"}, "tokenizer t, not u"),
        ({"shape": (L, E + 1)}, "layers and experts"),
    ],
)
def test_another_model_is_refused_with_one_sentence(other: dict[str, Any], word: str) -> None:
    fields: dict[str, Any] = {"model": "m", "tokenizer": "t", "shape": (L, E)}
    PREDICTOR.require_fit(**fields)
    PREDICTOR.require_fit(model="m")  # the rest is not known yet
    with pytest.raises(ArtifactError, match=word) as refused:
        PREDICTOR.require_fit(**(fields | other))
    assert len(str(refused.value).splitlines()) == 1


def test_a_tokenizers_fingerprint_depends_on_tokens_and_ids_but_not_their_order() -> None:
    name = tokenizer_fingerprint({"a": 0, "b": 1})
    assert name == tokenizer_fingerprint({"b": 1, "a": 0})
    others = ({"a": 1, "b": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "\ud800": 1})
    assert len({name, *map(tokenizer_fingerprint, others)}) == 5
