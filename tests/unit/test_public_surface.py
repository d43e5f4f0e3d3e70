"""Public names of `eldr_serve`, light imports, and the subcommands of `eldr`."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import eldr_serve
import eldr_serve.scheduling
from eldr_serve.cli import app
from eldr_serve.router.status import router_status
from tests.support.busy_router import busy_actor
from tests.support.fake_service import KEY, FakeService
from tests.support.in_process import sentence
from tests.support.processes import python
from tests.support.shipped import ROOT

PUBLIC = [
    "ArtifactError",
    "ConfigurationError",
    "Decision",
    "ExpertPlacement",
    "Loads",
    "NoWorkerError",
    "OperatorClient",
    "PlacementRequest",
    "Policy",
    "PolicyError",
    "QueuedPolicy",
    "RoutingTable",
    "ServiceError",
    "build_app",
    "check_policy",
    "make_policy",
    "policy_names",
]
HEAVY = ("ray", "vllm", "torch", "sklearn", "matplotlib", "scipy")


def eldr(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="eldr")


def in_a_process(code: str) -> str:
    done = python("-c", code)
    return done.stdout + done.stderr


def test_the_public_names_are_complete_and_exist() -> None:
    assert sorted(eldr_serve.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(eldr_serve, name).__name__ == name


def test_the_page_for_authors_of_policies_names_all_that_scheduling_exports() -> None:
    page = (ROOT / "docs/extend.md").read_text()
    assert not [name for name in eldr_serve.scheduling.__all__ if name not in page]


@pytest.mark.parametrize(
    "code",
    [
        "from eldr_serve import make_policy, RoutingTable, OperatorClient; make_policy('locality-band')",
        "from eldr_serve.cli import app",
    ],
)
def test_importing_the_package_loads_no_engine(code: str) -> None:
    heavy = HEAVY[: 4 if "make_policy" in code else None]
    assert in_a_process(f"{code}; import sys; print([m for m in {heavy} if m in sys.modules])") == "[]\n"


def test_an_ingress_needs_no_engine() -> None:
    code = "import sys, eldr_serve.ingress.deployment, eldr_serve.integrations.decode_request_router"
    loaded = f"{code}; print([m for m in ('vllm', 'torch', 'ray.llm') if m in sys.modules])"
    assert in_a_process(loaded) == "[]\n"


def test_the_list_of_subcommands_loads_none_of_them() -> None:
    done = in_a_process(
        "import sys, eldr_serve.cli as c\nsys.argv[1:] = ['--help']\n"
        "try: c.main()\nexcept SystemExit: pass\n"
        f"print([m for m in (*{HEAVY}, 'offline', 'httpx') if m in sys.modules])"
    )
    assert done.endswith("[]\n")
    assert all(name in done for name in get_command(app).commands)


@pytest.mark.parametrize("name", ["fit", "bench"])
def test_a_subcommand_has_the_help_of_its_command(name: str) -> None:
    done = eldr(name, "--help")
    assert done.exit_code == 0
    assert f"Usage: eldr {name}" in done.stdout


def test_a_subcommand_outside_a_checkout_explains_where_it_is() -> None:
    output = in_a_process(
        "import sys, eldr_serve.cli as c\nsys.modules['benchmarks'] = None\n"
        "sys.argv[1:] = ['reproduce']\nc.main()"
    )
    assert output.startswith("eldr reproduce: the command is part of the repository")
    assert len(output.strip().splitlines()) == 1


def test_a_service_is_shown_and_changed(service: FakeService) -> None:
    address = ("--url", service.url)
    assert "locality-band (band 0.2)" in eldr("status", *address).stdout
    assert '"leases": 0' in eldr("status", "--json", *address).stdout
    changed = eldr("policy", "random", "--set", "seed=3", "--admin-key", KEY, *address)
    assert changed.exit_code == 0, changed.stderr
    assert service.policy == {"name": "random", "parameters": {"seed": 3}}
    assert '"policy": "random"' in eldr("policy", *address).stdout


def test_the_status_shows_the_decode_queue_and_the_live_policys_saving(service: FakeService) -> None:
    state = busy_actor().state
    service.more_status = router_status(state)
    output = " ".join(eldr("status", "--url", service.url).stdout.split())
    now = service.more_status["comparison"]["now"]
    assert "decode queue size 0, oldest_wait_s 0 " in output
    assert f"{now['change_pct']:+.1f} % [{now['low_pct']:+.1f}, {now['high_pct']:+.1f}], over" in output
    assert f"over {now['tokens']} tokens" in output
    now["tokens"] = None
    assert "no token has been priced yet" in " ".join(eldr("status", "--url", service.url).stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["policy", "random"], "admin key"),
        (["policy", "nosuch", "--admin-key", KEY], "unknown policy"),
        (["policy", "random", "--set", "seed"], "name=value"),
        (["policy", "--set", "seed=1"], "the name of a policy"),
        (["table", "nowhere"], "nowhere"),
    ],
)
def test_refusals_are_reported_in_one_sentence(
    arguments: list[str], words: str, service: FakeService
) -> None:
    assert words in sentence(eldr(*arguments, "--url", service.url))


def test_a_fault_of_the_program_is_not_reported_as_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ValueError("a fault")
    monkeypatch.setattr(eldr_serve.OperatorClient, "status", Mock(side_effect=fault))
    done = eldr("status")
    assert done.exception is fault
    assert not done.stderr


def test_deployments_are_listed_shown_and_copied_without_overwriting(tmp_path: Path) -> None:
    assert "cpu_demo.yaml" in eldr("deployments").stdout.split()
    own_copy = tmp_path / "own.yaml"
    assert eldr("deployments", "cpu_demo.yaml", "--copy", own_copy).exit_code == 0
    shipped = (ROOT / "deployments/cpu_demo.yaml").read_text()
    assert own_copy.read_text() == shipped == eldr("deployments", "cpu_demo.yaml").stdout
    own_copy.write_text("mine")
    assert "own.yaml" in sentence(eldr("deployments", "cpu_demo.yaml", "--copy", own_copy))
    assert own_copy.read_text() == "mine"
    assert "cpu_demo.yaml" in sentence(eldr("deployments", "nosuch.yaml"))
    assert "--copy" in sentence(eldr("deployments", "--copy", own_copy))


def test_a_refit_without_a_trace_asks_the_service(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = eldr("refit", "--url", service.url, "--admin-key", KEY)
    assert done.stdout == "table version 7 is live: 90 recent requests, 2 decode replicas\n"
    assert "holds 3 samples" in sentence(eldr("refit", "--url", service.url))
    assert "--trace" in sentence(eldr("refit", "--url", service.url, "--workers", 3))


def test_the_complete_trace_is_saved(service: FakeService, tmp_path: Path) -> None:
    out = tmp_path / "trace.safetensors"
    assert "wrote" in eldr("trace", "--out", out, "--url", service.url).stdout
    saved = tmp_path / "table.safetensors"
    assert "wrote" in eldr("table", "--out", saved, "--url", service.url).stdout
    assert saved.read_bytes() == b"a table"
    assert "--out" in sentence(eldr("table", saved, "--out", out, "--url", service.url))
    assert out.read_bytes() == b"a trace"
    assert "cannot be reached" in sentence(eldr("trace", "--out", out, "--url", "http://127.0.0.1:9"))
    assert out.read_bytes() == b"a trace"
