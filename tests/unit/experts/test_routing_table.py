"""Saved artifacts can be loaded. All other files are refused in one sentence."""

import json
import os
import pickle
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import SignatureSpec
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.files import write_atomically
from tests.support.full_disk import full_disk
from tests.support.predictors import PREDICTOR
from tests.support.tables import unit_table
from tests.support.traces import synthetic_trace

TRACE = synthetic_trace(12)
TABLE = unit_table(3)
KINDS: list[tuple[Any, Any]] = [
    (TRACE, CalibrationTrace),
    (TABLE, RoutingTable),
    (PREDICTOR, SignaturePredictor),
]


@pytest.mark.parametrize(("artifact", "kind"), KINDS)
def test_a_loaded_file_is_saved_byte_for_byte(artifact: Any, kind: Any, tmp_path: Path) -> None:
    artifact.save(tmp_path / "file")
    loaded = kind.load(tmp_path / "file")
    assert loaded.to_bytes() == artifact.to_bytes() == (tmp_path / "file").read_bytes()
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


def test_a_loaded_table_equals_the_saved_one(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table")
    loaded = RoutingTable.load(tmp_path / "table")
    counts = np.random.default_rng(0).integers(0, 9, (2, 8)).astype(np.uint32)
    np.testing.assert_array_equal(loaded.similarity(counts), TABLE.similarity(counts))
    np.testing.assert_allclose(
        loaded.similarity(loaded.spec.encode(counts)), TABLE.similarity(counts), atol=1e-6
    )
    assert (loaded.domains, loaded.band, loaded.model) == (TABLE.domains, TABLE.band, TABLE.model)
    for wrong in (np.zeros(5, np.float32), np.zeros((3, 8), np.uint32)):
        with pytest.raises(ValueError):
            loaded.similarity(wrong)


def refusal_of(kind: Any, data: bytes) -> str:
    with pytest.raises(ArtifactError) as refusal:
        kind.from_bytes(data)
    (sentence,) = str(refusal.value).splitlines()
    return sentence


@pytest.mark.parametrize(("artifact", "kind"), KINDS)
def test_truncated_files_are_refused(artifact: Any, kind: Any) -> None:
    data = artifact.to_bytes()
    for length in (0, 4, 8, 60, len(data) // 2, len(data) - 1):
        refusal_of(kind, data[:length])


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for _, kind in KINDS:
        refusal_of(kind, data)


class Bomb:
    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.mark.parametrize(("artifact", "kind"), KINDS)
def test_foreign_files_are_refused_and_never_unpickled(artifact: Any, kind: Any, tmp_path: Path) -> None:
    refusal_of(kind, pickle.dumps(Bomb()))
    refusal_of(kind, save_tensors({"a": np.zeros(3)}))
    refusal_of(kind, save_tensors({"a": np.zeros(3)}, metadata={"eldr": "{}"}))
    refusal_of(kind, save_tensors({"a": np.zeros(3)}, metadata={"eldr": "not json"}))
    for other, _ in KINDS:
        if other is not artifact:
            assert "schema" in refusal_of(kind, other.to_bytes())
    with pytest.raises(ArtifactError, match="nowhere"):
        kind.load(tmp_path / "nowhere")


def with_array(artifact: Any, name: str, value: Any) -> bytes:
    """Return the artifact's bytes with one array replaced, without the checks of its class."""
    changed = copy(artifact)
    changed.__dict__[name] = value
    return changed.to_bytes()


@pytest.mark.parametrize(
    ("artifact", "name", "value", "word"),
    [
        (TABLE, "centroids", np.full_like(TABLE.centroids, np.nan), "finite"),
        (TABLE, "centroids", 2 * TABLE.centroids, "norm"),
        (TABLE, "centroids", TABLE.centroids[:, :-1].copy(), "columns"),
        (TABLE, "centroids", TABLE.centroids.astype(np.float64), "float32"),
        (TABLE, "centroids", TABLE.centroids[0], "shape"),
        (TABLE, "cluster_sizes", np.ones(4, np.int64), "sizes"),
        (TABLE, "domains", ["a"], "names"),
        (TABLE, "spec", SignatureSpec(np.ones((2, 9), np.float32), np.arange(2)), "columns"),
        (TRACE, "prefill_counts", TRACE.prefill_counts + np.uint32(1), "add up"),
        (TRACE, "decode_counts", TRACE.decode_counts[:, :2].copy(), "shape"),
        (TRACE, "prompt_tokens", TRACE.prompt_tokens[:-1].copy(), "entries"),
        (TRACE, "decode_steps", TRACE.decode_steps.astype(np.int64), "uint32"),
        (TRACE, "ids", ["same"] * 12, "same id"),
        (TRACE, "domains", ["a"], "entries"),
        (TRACE, "top_k", 99, "top_k"),
        (TRACE, "routes", np.full_like(TRACE.routes, 200), "unknown expert"),
        (TRACE, "route_offsets", np.zeros(13, np.int64), "offsets"),
        (TRACE, "token_ids", TRACE.token_ids[1:].copy(), "token ids have shape"),
        (TRACE, "token_ids", TRACE.token_ids.astype(np.int64), "uint32"),
        (TRACE, "token_ids", np.full_like(TRACE.token_ids, 40), "not below 40"),
        (TRACE, "tokenizer", "", "tokenizer"),
    ],
)
def test_a_file_with_impossible_values_is_refused(artifact: Any, name: str, value: Any, word: str) -> None:
    assert word in refusal_of(type(artifact), with_array(artifact, name, value))


def test_a_trace_without_routes_can_be_loaded() -> None:
    assert CalibrationTrace.from_bytes(with_array(TRACE, "routes", None)).routes is None


def test_an_old_trace_without_token_ids_can_be_read() -> None:
    assert TRACE.token_ids is not None
    older = CalibrationTrace.from_bytes(with_array(TRACE, "token_ids", None))
    assert older.token_ids is None
    with pytest.raises(ValueError, match="no token ids"):
        _ = older.prompts
    data = older.to_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    record = json.loads(header["__metadata__"]["eldr"])
    for added in ("tokenizer", "vocabulary"):
        del record[added]
    header["__metadata__"]["eldr"] = json.dumps(record)
    text = json.dumps(header).encode()
    older_file = len(text).to_bytes(8, "little") + text + data[8 + length :]
    assert CalibrationTrace.from_bytes(older_file).ids == TRACE.ids


def test_a_traces_prompts_are_its_token_ids_split_by_length() -> None:
    assert [len(prompt) for prompt in TRACE.prompts] == TRACE.prompt_tokens.tolist()
    np.testing.assert_array_equal(np.concatenate(TRACE.prompts), TRACE.token_ids)
    (third,) = TRACE.subset_without_routes(np.array([3])).prompts
    np.testing.assert_array_equal(third, TRACE.prompts[3])


def test_a_band_outside_its_range_is_refused() -> None:
    for band in (-0.5, 2.5):
        with pytest.raises(ArtifactError, match="band"):
            replace(TABLE, band=band)


def test_decode_probability_is_a_share_of_steps() -> None:
    probability = TRACE.decode_probability
    assert probability.max() <= 1
    np.testing.assert_allclose(probability.sum(axis=2), TRACE.top_k, rtol=1e-5)
    nothing: dict[str, Any] = {name: 0 * getattr(TRACE, name) for name in ("decode_counts", "decode_steps")}
    still = replace(TRACE, routes=None, route_offsets=None, **nothing)
    assert not still.decode_probability.any()


def test_a_subset_of_a_trace_is_a_trace() -> None:
    subset = TRACE.subset_without_routes(np.array([3, 1]))
    assert subset.ids == ["3", "1"]
    loaded = CalibrationTrace.from_bytes(subset.to_bytes())
    assert loaded.fingerprint == subset.fingerprint != TRACE.fingerprint


def test_a_full_disk_leaves_only_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
