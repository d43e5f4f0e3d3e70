"""Placement files: round trips, the formats of engines, and refusals."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.experts.expert_placement import ExpertPlacement
from offline.expert_placement.packed_placements import eplb_placement

MAP = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]]


def placement(slots: Any = MAP, **changes: Any) -> ExpertPlacement:
    defaults = {"ranks": 2, "num_experts": 4, "model": "m", "method": "eplb", "fingerprint": "f"}
    return ExpertPlacement(np.array(slots), **{**defaults, **changes})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(seed=st.integers(0, 999), ranks=st.sampled_from([1, 2, 4]), spare=st.integers(0, 2))
def test_a_saved_placement_can_be_loaded(seed: int, ranks: int, spare: int, tmp_path: Path) -> None:
    load = np.random.default_rng(seed).exponential(size=(3, 8))
    slots = eplb_placement(load, 8 + spare * ranks, groups=1, nodes=1, ranks=ranks)
    saved = ExpertPlacement(slots, ranks, 8, "model", "eplb", ranks, "fingerprint", {"x": [1.5, None]})
    saved.save(tmp_path / "p.json")
    loaded = ExpertPlacement.load(tmp_path / "p.json")
    assert np.array_equal(loaded.physical_to_logical, slots)
    assert loaded.to_json() == saved.to_json()
    for name in ("ranks", "num_experts", "model", "method", "nodes", "fingerprint", "report"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert loaded.num_redundant == spare * ranks
    assert loaded.expected_tokens is None
    replace(saved, expected_tokens=load).save(tmp_path / "p.json")
    assert np.array_equal(ExpertPlacement.load(tmp_path / "p.json").expected_tokens, load)


def test_sglang_reads_the_file_by_its_rules(tmp_path: Path) -> None:
    placement().save(tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    assert list(content) == ["physical_to_logical_map"]  # SGLang refuses any other key
    physical = np.array(content["physical_to_logical_map"])
    num_layers, num_physical = physical.shape
    assert (num_layers, num_physical) == (2, 4 + placement().num_redundant)
    per_rank = num_physical // 2
    for layer in range(num_layers):
        for slot in range(num_physical):
            assert placement().hosts[layer, physical[layer, slot], slot // per_rank]


def test_vllm_reads_one_record_with_a_list_for_each_layer() -> None:
    lines = placement().to_vllm().decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "record_type": "eplb_initial_mapping",
            "version": 1,
            "num_redundant_experts": 2,
            "num_slots": 6,
            "initial_global_assignments": {"0": MAP[0], "1": MAP[1]},
        }
    ]


@pytest.mark.parametrize(
    ("slots", "changes", "sentence"),
    [
        ([[0, 1, 2, 2]], {}, "expert 3 of layer 0 has no slot"),
        ([[0, 1, 2, 3], [0, 1, 1, 3]], {}, "expert 2 of layer 1 has no slot"),
        ([[0, 1, 2, 4]], {}, "outside 0 to 3"),
        ([[0, 1, 2, -1]], {}, "outside 0 to 3"),
        ([[0.0, 1.0, 2.0, 3.0]], {}, "not the numbers of experts"),
        ([[0, 1, 2, 3]], {"ranks": 3}, "does not divide by 3 ranks"),
        ([[0, 1, 2, 3]], {"ranks": 0}, "does not divide by 0 ranks"),
        ([[0, 1, 2, 3]], {"nodes": 3}, "2 ranks cannot be split evenly over 3 nodes"),
        ([0, 1, 2, 3], {}, "shape"),
    ],
)
def test_an_impossible_placement_is_refused(slots: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        placement(slots, **changes)


@pytest.mark.parametrize(
    ("content", "sidecar", "sentence"),
    [
        ("{", {}, "not JSON"),
        ('{"physical_to_logical_map": [[0, 1]], "more": 1}', {}, "single key"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]]}', {}, "does not have 2 layers"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3]]}', {}, "layer 1 has 4 slots, not 6"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 0, "x"], 7]}', {}, "layer 0 is not a list of experts"),
        (
            '{"physical_to_logical_map": [[0,1,2,3,0,1],[3,2,1,0,3,2]]}',
            {},
            "p.json.* not the placement that p.meta.json",
        ),
        (None, {"ranks": 4}, "does not divide by 4 ranks"),
        (None, {"num_experts": 3}, "outside 0 to 2"),
        (None, {"nodes": 0}, "nodes: "),
        (None, {"schema": "eldr.routing-table/1"}, "schema: "),
        (None, {"colour": 1}, "colour: "),
        (None, {"expected_tokens": [[1.0]]}, "expected_tokens have shape"),
        (None, {"expected_tokens": [[1.0], []]}, "layers of different lengths"),
        (None, {"expected_tokens": [[-1.0] * 4] * 2}, "expected_tokens.0.0: "),
    ],
)
def test_a_file_or_sidecar_that_does_not_fit_is_refused(
    tmp_path: Path, content: str | None, sidecar: dict[str, Any], sentence: str
) -> None:
    placement().save(tmp_path / "p.json")
    if content is not None:
        (tmp_path / "p.json").write_text(content)
    meta = tmp_path / "p.meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | sidecar))
    with pytest.raises(ArtifactError, match=sentence):
        ExpertPlacement.load(tmp_path / "p.json")


def test_missing_files_and_names_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"p\.json cannot be read"):
        ExpertPlacement.load(tmp_path / "p.json")
    placement().save(tmp_path / "p.json")
    (tmp_path / "p.meta.json").unlink()
    with pytest.raises(ArtifactError, match=r"p\.meta\.json cannot be read"):
        ExpertPlacement.load(tmp_path / "p.json")
    with pytest.raises(ValueError, match=r"must end in \.json"):
        placement().save(tmp_path / "p.pt")


@pytest.mark.parametrize(("call", "number"), [("fsync", 2), ("replace", 1)])
def test_a_failed_save_changes_no_file(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement().save(tmp_path / "p.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, call, Mock(side_effect=[None] * (number - 1) + [full]))
    with pytest.raises(OSError, match="No space"):
        placement([[3, 2, 1, 0]]).save(tmp_path / "p.json")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
