"""`eldr check` without vLLM: GPUs and ports of an engine's ranks, and the policy that scales engines."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from eldr_serve.preflight import check as checking
from eldr_serve.preflight.deployment import EngineDeployment
from eldr_serve.preflight.engines import ProbeResult
from eldr_serve.preflight.machine import NodePool, gpu_of
from eldr_serve.preflight.report import show
from eldr_serve.preflight.rules import check_gpus
from tests.support.shipped import ROOT
from tests.unit.preflight.document_edits import edit

D, P = "decode_config", "prefill_config"
RESOURCES = {"CPU": 192, "accelerator_type:H200": 1, "prefill": 16, "decode": 16, "ingress": 8}


def outcome(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], *, gpus: int = 16
) -> checking.CheckOutcome:
    """Return the outcome for a changed qwen3_235b_wide_ep.yaml, as if vLLM had accepted its engines."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checking, "probe_engines", lambda engines: [ProbeResult() for _ in engines])
    (folder / "models").symlink_to(ROOT / "deployments/models")
    document = yaml.safe_load((ROOT / "deployments/qwen3_235b_wide_ep.yaml").read_text())
    document = json.loads(json.dumps(document))  # then YAML aliases do not share their values
    for path, value in changes.items():
        edit(document["applications"][0]["args"], path, value)
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump(document))
    nodes = [NodePool("nodes", 8, RESOURCES | {"GPU": gpus}, gpu_of("H200"))]
    (result,) = checking.check_deployments([path], lambda path, device: nodes)
    return result


def errors(result: checking.CheckOutcome) -> list[str]:
    return [finding.sentence for finding in result.findings if finding.severity == "error"]


@pytest.mark.parametrize(
    ("bundles", "ranks", "device", "is_right"),
    [
        ([{"GPU": 1}] * 4, 4, "gpu", True),
        ([{"GPU": 8, "CPU": 16}], 8, "gpu", True),
        ([{"GPU": 8.0}], 8, "gpu", True),
        ([{"GPU": 0.3}], 1, "gpu", True),
        ([{"GPU": 0.5}] * 4, 4, "gpu", True),
        ([{"CPU": 1}] * 2, 2, "cpu", True),
        ([{"GPU": 1}] * 4, 8, "gpu", False),
        ([{"GPU": 9}] + [{"GPU": 1}] * 7, 8, "gpu", False),
        ([{"CPU": 1, "GPU": 0}], 1, "gpu", False),
    ],
)
def test_a_replica_requests_a_gpu_per_rank(
    bundles: list[dict[str, float]], ranks: int, device: str, is_right: bool
) -> None:
    spec: Any = SimpleNamespace(device=device, ranks=ranks)
    engines = EngineDeployment("decode", spec, 1, 1, 1, False, bundles, "PACK", "")
    sentences = [finding.sentence for finding in check_gpus(engines)]
    gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
    assert is_right == (not sentences)
    for sentence in sentences:
        assert (
            f"requests {gpus:g} GPUs, but tensor_parallel_size x data_parallel_size is {ranks}:" in sentence
        )


def test_each_rank_of_each_replica_has_a_port_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = outcome(tmp_path, monkeypatch, {})
    assert errors(result) == []
    prefill, decode = (engines for engines, _, _ in result.results)
    assert decode.nixl_ports == [*range(22000, 22000 + 4 * 8)]
    assert prefill.nixl_ports == [*range(20000, 20000 + 2 * 4)]
    assert decode.spec.ports(4) == [22000, 22008, 22016, 22024]
    assert {name for node in result.assignment.nodes for name, _ in node.replicas} >= {"prefill", "decode"}


def test_a_policy_that_assumes_other_slots_than_the_engines_have_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = outcome(tmp_path, monkeypatch, {"router.parameters": {"slots": 64}})
    assert [finding.sentence for finding in result.findings if "slots" in finding.sentence] == [
        "the policy balance-band assumes 64 slots in each worker of decode, but its max_num_seqs is 128: set "
        "router.parameters.slots to 128"
    ]
    (tmp_path / "models").unlink()
    result = outcome(tmp_path, monkeypatch, {})
    assert not [finding for finding in result.findings if "slots" in finding.sentence]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {f"{P}.experimental_configs.NIXL_SIDE_CHANNEL_PORT_BASE": 22031},
            "prefill's NIXL ports 22031-22038 overlap decode's 22000-22031 on one node",
        ),
        (
            {f"{D}.runtime_env.env_vars.VLLM_NIXL_SIDE_CHANNEL_PORT": "23000"},
            "decode replicas on one node would share NIXL's port 23000",
        ),
        (
            {f"{D}.experimental_configs.NIXL_SIDE_CHANNEL_PORT_BASE": 32740},
            "decode's NIXL ports 32740-32771 overlap 32768-60999",
        ),
        (
            {f"{D}.placement_group_config.bundles": [{"decode": 8, "GPU": 1}]},
            "a decode replica requests 9 GPUs, but tensor_parallel_size x data_parallel_size is 8",
        ),
    ],
)
def test_ports_and_gpus_that_do_not_fit_the_ranks_get_one_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = [
        sentence for sentence in errors(outcome(tmp_path, monkeypatch, changes)) if words in sentence
    ]
    assert len(sentences) == 1
    assert "\n" not in sentences[0]


def test_ranks_find_no_node_with_fewer_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sentence,) = errors(outcome(tmp_path, monkeypatch, {}, gpus=4))
    assert sentence.startswith("4 of 4 decode replicas find no node: each needs")
    assert "8 GPU" in sentence


@pytest.mark.parametrize("policy", [{}, {"policy_kwargs": {}}])
def test_a_policy_without_a_function_is_serves_own(
    policy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {f"{D}.deployment_config.autoscaling_config.policy": policy}
    result = outcome(tmp_path, monkeypatch, changes)
    (error,) = errors(result)
    assert error.startswith("decode's autoscaling policy is Serve's own")
    text = io.StringIO()
    show(result, Console(file=text, width=200))
    assert "default_autoscaling_policy" in text.getvalue()


@pytest.mark.parametrize(
    ("found", "kernels", "engine", "counted"),
    [
        (None, None, "-", "-"),
        (gpu_of("H200"), (), "H200", "no"),
        (gpu_of("H200"), (("Experts", True),), "H200", "yes"),
        (gpu_of("H200"), (("Experts", True), ("Monolith", False)), "H200", "no"),
    ],
)
def test_the_table_shows_only_what_was_found(
    found: Any, kernels: Any, engine: str, counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = outcome(tmp_path, monkeypatch, {})
    answer = ProbeResult() if kernels is None else ProbeResult(weights=1, kernels=kernels)
    result.results[:] = [(engines, found, answer) for engines, *_ in result.results]
    text = io.StringIO()
    show(result, Console(file=text, width=200))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines()]
    cells = {row[0]: row[1:] for row in rows if row}
    assert all(engine in cell and "CPU" not in cell for cell in cells["an engine"])
    assert cells["experts counted"] == [counted] * 2
