"""Options that `eldr check` refuses at once, and cluster files."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from eldr_serve.cli import app
from eldr_serve.preflight.machine import gpu_of, identical_nodes, read_cluster, set_gpu
from tests.support.in_process import sentence
from tests.support.shipped import ROOT

YAML = "deployments/qwen3_30b_8p16d.yaml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "1", "--cluster", "ray_cluster.yaml"], "--cluster"),
        (["--resource", "decode=1"], "--nodes"),
        (["--gpu", "cpu"], "--nodes"),
        (["--nodes", "1", "--gpu", "V100"], "'V100'"),
        (["--nodes", "1", "--gpu", "H100", "--resource", "decode"], "NAME=AMOUNT"),
        (["--cluster", "Makefile"], "Makefile"),
    ],
)
def test_contradictory_options_are_reported_in_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert words in sentence(CliRunner().invoke(app, ["check", YAML, *arguments], prog_name="eldr"))


def test_the_shipped_cluster_has_the_resources_of_the_shipped_deployments() -> None:
    pools = {pool.name: pool for pool in read_cluster(ROOT / "ray_cluster.yaml")}
    assert pools["head"].nodes == 1
    assert pools["head"].gpu is None
    assert pools["decode"].gpu == gpu_of("H100")
    assert pools["decode_of_8"].resources["GPU"] == pools["decode_of_8"].resources["decode"] == 8


def test_another_gpu_changes_only_the_type() -> None:
    (before,) = identical_nodes(
        gpu_of("H100"), nodes=2, gpus_per_node=4, cpus_per_node=8, memory_gib=9, resources={"decode": 4}
    )
    (after,) = set_gpu([before], gpu_of("H200", 100))
    assert after.gpu.memory_gib == 100
    assert dict(after.resources) == {"CPU": 8, "GPU": 4, "decode": 4, "accelerator_type:H200": 1}


NODE_TYPE = "head_node_type: b\navailable_node_types: {a: {max_workers: %s, resources: %s}}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [",
        "available_node_types: {a: {}}",
        "available_node_types: 3",
        NODE_TYPE % ("many", "{CPU: 1}"),
        NODE_TYPE % ("1", "CPU"),
    ],
)
def test_a_file_without_a_cluster_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(ValueError, match="is not a cluster file"):
        read_cluster(tmp_path / "cluster.yaml")


def test_a_node_type_needs_resources(tmp_path: Path) -> None:
    """Ray detects them on some clouds."""
    (tmp_path / "cluster.yaml").write_text("head_node_type: a\navailable_node_types: {a: {node_config: {}}}")
    with pytest.raises(ValueError, match=r"/cluster\.yaml: node type a has no resources: list CPU, .*:KIND$"):
        read_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ("", "has GPUs but no resource accelerator_type:KIND"),
        (', "accelerator_type:H100": 1, "accelerator_type:H200": 1', "of the kinds H100, H200: keep one"),
    ],
)
def test_a_node_type_with_gpus_needs_one_kind(kinds: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(NODE_TYPE % ("1", f"{{GPU: 1{kinds}}}"))
    with pytest.raises(ValueError, match=words):
        read_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("line", "a", "b"), [("max_workers: 4", 4, 4), ("max_workers: 20", 8, 20), ("", 2, 2)]
)
def test_the_global_maximum_bounds_each_worker_type_and_is_its_default(
    line: str, a: int, b: int, tmp_path: Path
) -> None:
    types = "{h: {resources: {CPU: 1}}, a: {max_workers: 8, resources: {}}, b: {resources: {}}}"
    (tmp_path / "cluster.yaml").write_text(f"{line}\nhead_node_type: h\navailable_node_types: {types}")
    pools = read_cluster(tmp_path / "cluster.yaml")
    assert [(pool.nodes, pool.max_workers) for pool in pools] == [(1, None), (a, b), (b, b)]
