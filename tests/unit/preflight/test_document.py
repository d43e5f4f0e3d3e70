"""Errors in the Serve file itself are located and reported before anything slow is imported."""

import copy
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.lib.ports import free_port
from eldr_serve.preflight import check as checking
from eldr_serve.preflight.check import CheckOutcome
from eldr_serve.preflight.engines import ProbeResult
from eldr_serve.preflight.machine import NodePool
from tests.support.processes import python
from tests.support.shipped import ROOT
from tests.unit.preflight.document_edits import MISSING, edit

THIS_MACHINE = [NodePool("nodes", 1, {"CPU": 2}, memory_gib=24, is_this_machine=True)]
OTHER_MACHINE = [NodePool("nodes", 1, {"CPU": 2}, memory_gib=24)]
SHIPPED: dict[str, Any] = yaml.safe_load((ROOT / "deployments/cpu_demo.yaml").read_text())


@pytest.fixture(autouse=True)
def no_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checking, "probe_engines", lambda engines: [ProbeResult() for _ in engines])


def content() -> dict[str, Any]:
    """Return the content of the shipped file, with free ports."""
    document = json.loads(json.dumps(SHIPPED))
    document["http_options"]["port"] = free_port()
    document["applications"][0]["args"]["ingress"]["port"] = free_port()
    return dict(document)


def check(folder: Path, text_or_document: Any, pools: Any = THIS_MACHINE) -> CheckOutcome:
    path = folder / "made.yaml"
    path.write_text(
        text_or_document if isinstance(text_or_document, str) else yaml.safe_dump(text_or_document)
    )
    (outcome,) = checking.check_deployments([path], lambda path, device: pools)
    return outcome


def sentences(outcome: CheckOutcome, severity: str = "error") -> list[str]:
    return [finding.sentence for finding in outcome.findings if finding.severity == severity]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications:\n\t- name: eldr\n", "line 2, column 1: while scanning for the next token, found"),
        ("applications: [\n  a: {", "made.yaml, line 2"),
        ("a: b: c\n", "made.yaml, line 1, column 5: mapping values are not allowed here"),
        ("a: &x 1\nb: *y\n", "made.yaml, line 2, column 4: found undefined alias 'y'"),
        ("- 1\n", "made.yaml is not a mapping"),
        ("", "made.yaml is not a mapping"),
    ],
)
def test_invalid_yaml_is_reported_with_its_location(text: str, words: str, tmp_path: Path) -> None:
    (sentence,) = sentences(check(tmp_path, text))
    assert words in sentence
    assert "\n" not in sentence
    assert ("tabs" in sentence) == ("\t" in text)


def test_a_binary_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "made.yaml").write_bytes(b"\xff\xfe\x00")
    (outcome,) = checking.check_deployments([tmp_path / "made.yaml"], lambda path, device: THIS_MACHINE)
    assert "is not text" in sentences(outcome)[0]


APPLICATION = "applications.0"
# path -> value, words of the error
WRONG: dict[str, tuple[Any, str]] = {
    "http_option": ({"port": 1}, "unknown key 'http_option': did you mean 'http_options'?"),
    "http_options.prot": (1, "http_options: unknown key 'prot': did you mean 'port'?"),
    "http_options.port": ("x", "http_options.port must be a whole number, got 'x'"),
    "proxy_location": ("HeadsOnly", "proxy_location is 'HeadsOnly': unknown, did you mean 'HeadOnly'?"),
    "logging_config.log_level": ("LOUD", "logging_config.log_level is 'LOUD'"),
    "applications": (MISSING, "applications is missing"),
    f"{APPLICATION}.import_path": ("eldr_serve.app:build", "must be eldr_serve.app:build_app"),
    f"{APPLICATION}.import_pth": (
        "x",
        "applications.0: unknown key 'import_pth': did you mean 'import_path'?",
    ),
    f"{APPLICATION}.route_prefix": ("v1", "applications.0.route_prefix must begin with /"),
    f"{APPLICATION}.name": ("", "Application names must be nonempty"),
    f"{APPLICATION}.port": (9000, "Port 9000 is set in the config for application"),
    f"{APPLICATION}.args": (3, "applications.0.args must be a mapping of names to values, got 3"),
    f"{APPLICATION}.runtime_env": ({"working_dir": "."}, "runtime_env"),
    f"{APPLICATION}.deployments": ([{"name": "EldrIngres"}], "'EldrIngres': unknown deployment, did"),
}


@pytest.mark.parametrize("path", WRONG)
def test_content_that_serve_would_refuse_or_misread_is_reported(path: str, tmp_path: Path) -> None:
    value, words = WRONG[path]
    document = content()
    edit(document, path, value)
    (sentence,) = sentences(check(tmp_path, document))
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, 'multiple configs for application "eldr"'),
        ({"name": "b"}, 'route prefix "/"'),
        ({"name": "b", "route_prefix": "/b"}, "has 2 applications eldr_serve.app:build_app"),
    ],
)
def test_two_applications_are_reported(change: dict[str, str], words: str, tmp_path: Path) -> None:
    document = content()
    document["applications"].append(copy.deepcopy(document["applications"][0]) | change)
    assert words in sentences(check(tmp_path, document))[0]


def test_a_key_that_serve_ignores_is_a_warning(tmp_path: Path) -> None:
    document = content() | {"x-shared": {"any": "thing"}}
    document["applications"][0]["import_path"] = "eldr_serve.app.build_app"
    document["applications"][0]["deployments"] = [{"name": "EldrIngress", "num_replicas": 3}]
    outcome = check(tmp_path, document)
    assert outcome.can_start
    ignored, overridden = sentences(outcome, "warning")
    assert ignored == "Serve ignores the key x-shared: leave it out"
    assert overridden.startswith("applications.0.deployments.0 overrides options of EldrIngress")


@pytest.mark.parametrize("roles_on_gpus", [[], ["prefill"], ["decode"], ["prefill", "decode"]])
def test_nodes_have_gpus_if_any_engine_needs_one(roles_on_gpus: list[str], tmp_path: Path) -> None:
    document = content()
    for role in roles_on_gpus:
        engines = document["applications"][0]["args"][f"{role}_config"]
        engines |= {
            "accelerator_config": {"kind": "gpu"},
            "placement_group_config": {"bundles": [{"GPU": 1}]},
        }
        engines["engine_kwargs"]["block_size"] = 32  # block size on CPUs
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(document))
    devices: list[str] = []

    def find_node_pools(path: Path, device: str) -> list[NodePool]:
        devices.append(device)
        return THIS_MACHINE

    checking.check_deployments([tmp_path / "made.yaml"], find_node_pools)
    assert devices == ["gpu" if roles_on_gpus else "cpu"]


@pytest.mark.parametrize("where", ["ingress", "http_options"])
def test_a_port_of_another_process_is_reported(where: str, tmp_path: Path) -> None:
    document = content()
    part = (
        document["http_options"]
        if where == "http_options"
        else document["applications"][0]["args"]["ingress"]
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        part["port"] = port = server.getsockname()[1]
        outcome = check(tmp_path, document)
        assert sentences(outcome) == [
            f"{where}.port is {port}: another process listens there at 127.0.0.1; stop that process, "
            "or set another port"
        ]
        assert check(tmp_path, document, OTHER_MACHINE).can_start
    assert check(tmp_path, document).can_start


def test_a_port_of_an_own_service_is_a_warning(tmp_path: Path) -> None:
    document = content()
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        document["applications"][0]["args"]["ingress"]["port"] = port = server.getsockname()[1]
        outcome = check(tmp_path, document)
        assert outcome.can_start
        assert sentences(outcome, "warning")[0].startswith(
            f"ingress.port is {port}, and your running service listens there"
        )


def test_a_host_that_this_machine_does_not_have_is_reported(tmp_path: Path) -> None:
    document = content()
    document["applications"][0]["args"]["ingress"]["host"] = "192.0.2.1"
    (sentence,) = sentences(check(tmp_path, document))
    assert sentence.startswith("ingress cannot listen at host '192.0.2.1' and port")


def test_a_missing_or_invalid_key_file_is_reported(tmp_path: Path) -> None:
    document = content()
    keys = tmp_path / "keys.json"
    document["applications"][0]["args"]["ingress"]["keys_file"] = str(keys)
    (sentence,) = sentences(check(tmp_path, document))
    assert sentence.startswith(f"ingress.keys_file: {keys} cannot be read")
    away = check(tmp_path, document, OTHER_MACHINE)
    assert away.can_start
    assert sentences(away, "warning") == [
        f"ingress.keys_file {keys} is not on this machine: each node of the ingress must have it"
    ]
    keys.write_text('{"tenants": {"A B": {}}}')
    assert "tenants" in sentences(check(tmp_path, document))[0]
    keys.write_text("{}")
    assert check(tmp_path, document).can_start


@pytest.mark.parametrize(
    ("part", "near"),
    [
        ({"ingres": {}}, "'ingress'"),
        ({"decode_config": {"engine_kwargs": {"max_num_seq": 1}}}, "'max_num_seqs'"),
    ],
)
def test_a_misspelt_key_is_found_before_anything_slow_is_imported(
    part: dict[str, Any], near: str, tmp_path: Path
) -> None:
    document = content()
    args = document["applications"][0]["args"]
    args |= part if "ingres" in part else {}
    args["decode_config"] |= part.get("decode_config", {})
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(document))
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom eldr_serve.cli import app\n"
        "done = CliRunner().invoke(app, ['check', sys.argv[1]])\nprint(done.output, done.exit_code)\n"
        "print([name for name in ('vllm', 'torch', 'transformers', 'ray.llm') if name in sys.modules])\n"
    )
    done = python("-c", script, tmp_path / "made.yaml")
    assert f"did you mean {near}" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("1\n[]")
