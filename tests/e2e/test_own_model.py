"""The README's commands for the user's own model, exactly as printed, in a separate folder."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.lib.engines import wait_http
from tests.e2e.applications import beside_the_demo
from tests.e2e.service import ADMIN_KEY, ROOT
from tests.support.processes import output

PORT = 8271
URL = f"http://127.0.0.1:{PORT}"
# Few short answers at a time: some end in a trial although the engine tests have most of the machine.
FEW = ["--warm-up-seconds", "2", "--in-flight", "4", "--max-tokens", "8"]
# Settings that no user changes: small sizes, and ports that differ from the suite's service.
SHORTER = {
    "check": [],
    "compare": ["--host", URL, "--rounds", "1", "--trial-seconds", "6", *FEW],
    "status": ["--url", URL],
}


def commands() -> dict[str, list[str]]:
    """Return the commands of the README's section by their second word. `serve run` is "run"."""
    section = (ROOT / "README.md").read_text().partition("## Your model")[2].partition("\n## ")[0]
    lines = re.findall(r"^(?:eldr|serve) .*?(?=\s+#|$)", section.replace("\\\n", " "), re.MULTILINE)
    words_by_command = {line.split()[1]: line.split() for line in lines}
    return words_by_command


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return an environment in which each command starts its own Ray. `eldr` and `serve` are on the path."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": paths,
        "ELDR_ADMIN_KEY": ADMIN_KEY,
        "RAY_ADDRESS": "local",
        "RAY_AUTH_MODE": "disabled",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Prepare a user's files: a copy of the nearest deployment with other ports, a log of OpenAI requests."""
    root = tmp_path_factory.mktemp("own")
    copy = ["eldr", "deployments", "cpu_demo.yaml", "--copy", "my_deployment.yaml"]
    output(*copy, cwd=root, env=environment)
    document = yaml.safe_load((root / "my_deployment.yaml").read_text())
    document["http_options"]["port"] = PORT + 1
    arguments = document["applications"][0]["args"]
    arguments["ingress"]["port"] = PORT
    arguments["decode_config"]["deployment_config"]["num_replicas"] = 1  # the demo's engines run, too
    beside_the_demo(arguments)
    (root / "my_deployment.yaml").write_text(yaml.safe_dump(document))
    (root / "my_prompts").mkdir()
    with (root / "my_prompts/log.jsonl").open("w") as log:
        for file in sorted((ROOT / "examples/demo_model/prompts").glob("*.jsonl")):
            for line in file.read_text().splitlines()[:4]:
                messages = [{"role": "user", "content": json.loads(line)["prompt"][:500]}]
                log.write(json.dumps({"model": "eldr-demo", "messages": messages}) + "\n")
    return root


@pytest.fixture(scope="module")
def served(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `serve run` until it is ready for requests."""
    log = folder / "served.txt"
    # As in a terminal: background processes of a shell, such as this suite, ignore Ctrl-C.
    command = ["env", "--default-signal=INT", *commands()["run"]]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_http(f"{URL}/eldr/ready", process, log, 600)
        yield process
    finally:
        process.kill()
        process.wait(60)


def run_command(name: str, folder: Path, environment: dict[str, str]) -> str:
    return output(*commands()[name], *SHORTER[name], cwd=folder, env=environment, timeout_s=300)


def test_the_section_has_four_commands() -> None:
    assert list(commands()) == ["check", "run", "status", "compare"]


def test_check_reports_that_it_would_start(folder: Path, environment: dict[str, str]) -> None:
    assert "my_deployment.yaml: would start" in run_command("check", folder, environment)


def test_the_served_model_is_compared_watched_and_stopped(
    served: subprocess.Popen[bytes], folder: Path, environment: dict[str, str]
) -> None:
    body = {"model": "eldr-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    run_command("compare", folder, environment)
    rows = json.loads((folder / "out/compare/compare.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["shortest-queue", "marginal-cost"]
    assert min(row["requests"] for row in rows) > 0
    assert sum(row["failures"] for row in rows) == 0
    assert "marginal-cost" in run_command("status", folder, environment)
    served.send_signal(signal.SIGINT)
    served.wait(60)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{URL}/eldr/ready")
