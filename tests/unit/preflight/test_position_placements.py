"""`eldr check` refuses expert placements that the decode engines could not take, in one sentence each."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eldr_serve.preflight import check as checking
from eldr_serve.preflight.engines import EngineProbe, ProbeResult
from eldr_serve.preflight.machine import NodePool
from tests.support.shipped import ROOT
from tests.support.tables import save_placements, unit_table
from tests.unit.preflight.document_edits import edit

D = "decode_config"
NODES = [NodePool("nodes", 1, {"CPU": 2}, memory_gib=24)]
DEMO: dict[str, Any] = {"model": "eldr-demo", "num_layers": 6, "num_experts": 64}
QWEN: dict[str, Any] = {"file": "qwen3_235b_2p8d_eldr", "positions": 8, "ranks": 4, "redundant": 0}
EXPERTS = f"{D}.engine_kwargs.additional_config.eldr_experts"


def errors(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    file: str = "cpu_demo_ep",
    text: str = "",
    positions: int = 2,
    changes: dict[str, Any] | None = None,
    shape: tuple[int, int] = (6, 64),
    **placement: Any,
) -> list[str]:
    """Return the errors of a shipped file with expert placements, as if vLLM had accepted its engines.

    Args:
        text: content to check instead of that of the file.
    """

    def probe(engines: list[EngineProbe]) -> list[ProbeResult]:
        return [ProbeResult(expert_shape=shape) for _ in engines]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checking, "probe_engines", probe)
    (folder / "models").symlink_to(ROOT / "deployments/models")
    save_placements(folder, range(positions), **DEMO | {"redundant": 16} | placement)
    unit_table(positions, **DEMO).save(folder / "table.safetensors")
    text = text or (ROOT / f"deployments/{file}.yaml").read_text()
    document = json.loads(json.dumps(yaml.safe_load(text)))
    arguments = document["applications"][0]["args"]
    arguments["router"] |= {"table": str(folder / "table.safetensors"), "expert_placements": str(folder)}
    for path, value in (changes or {}).items():
        edit(arguments, path, value)
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump(document))
    (outcome,) = checking.check_deployments([path], lambda path, device: NODES)
    return [finding.sentence for finding in outcome.findings if finding.severity == "error"]


def test_placements_that_fit_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors(tmp_path, monkeypatch) == []


def test_the_lines_that_are_commented_out_in_the_file_fit_placements_without_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (ROOT / "deployments/cpu_demo_ep.yaml").read_text()
    text, replaced = re.subn(r"(?m)^( +)(\w+): .*\n\1# (\2: .*)$", r"\1\3", shipped)
    assert replaced == 2
    router = yaml.safe_load(text)["applications"][0]["args"]["router"]
    assert (router["table"], router["expert_placements"]) == ("table.safetensors", "placements")
    assert errors(tmp_path, monkeypatch, text=text, redundant=0) == []


def test_engines_on_gpus_that_place_experts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = errors(tmp_path, monkeypatch, **QWEN)  # this machine has no GPUs
    assert not [sentence for sentence in sentences if "placement" in sentence]


def test_more_positions_than_replicas_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with more clusters than workers is allowed, too."""
    assert errors(tmp_path, monkeypatch, positions=3) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": 1}, "placements of positions 0 to 0, but there are up to 2 decode replicas"),
        ({"ranks": 4}, "the placements are for 4 ranks, and the engines have 2"),
        ({"redundant": 8}, "the placements have 8 redundant slots, and the engines have 16"),
        ({"changes": {EXPERTS: {}}}, "the placements have 16 redundant slots, and the engines have 0"),
        ({"changes": {EXPERTS: {"redundant": 16}}}, "eldr_experts has the invalid value"),
        ({"shape": (6, 32)}, "placements of 6 x 64 experts, but the model of decode has 6 x 32"),
        ({"shape": (5, 64)}, "placements of 6 x 64 experts, but the model of decode has 5 x 64"),
        (
            {"changes": {f"{D}.runtime_env.env_vars.ELDR_EXPERT_PARALLEL": "0"}},
            "the engines are not expert-parallel",
        ),
        ({"file": "cpu_demo"}, "the engines are not expert-parallel"),
        (
            {"file": "cpu_demo_wide_ep", "positions": 1, "redundant": 0},
            "data-parallel ranks cannot change their experts while they serve",
        ),
        (
            {"file": "qwen3_235b_2p8d", "positions": 8, "ranks": 4},
            "set enable_expert_parallel, enable_eplb and additional_config's eldr_experts",
        ),
        (
            QWEN | {"changes": {EXPERTS: {"replica_choice": "metro"}}},
            "engines on GPUs with replica_choice metro cannot move experts while they serve",
        ),
        (
            QWEN | {"redundant": 8},
            "8 redundant slots, and the engines have 0: set num_redundant_experts of eplb_config",
        ),
    ],
)
def test_placements_that_do_not_fit_are_refused_in_one_sentence(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = [sentence for sentence in errors(tmp_path, monkeypatch, **options) if words in sentence]
    assert len(sentences) == 1
    assert sentences[0].startswith("router.expert_placements ")
    assert "\n" not in sentences[0]
