"""The README's commands for a model of one's own, as they stand there, in a folder of one's own."""

from __future__ import annotations

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
from applications import beside_the_demo
from service import ADMIN_KEY, ROOT

from benchmarks.lib.engines import wait_http

PORT = 8271
URL = f"http://127.0.0.1:{PORT}"
# Nothing that a user changes: less of everything, and the address, beside the suite's own service.
SHORTER = {
    "check": [],
    "compare": ["--host", URL, "--rounds", "2", "--trial-seconds", "4", "--warm-up-seconds", "1"],
    "status": ["--url", URL],
}


def commands() -> dict[str, list[str]]:
    """Of the README's section, by their second word; `serve run` is "run"."""
    section = (ROOT / "README.md").read_text().partition("## Your own model")[2].partition("\n## ")[0]
    lines = re.findall(r"^(?:eldr|serve) .*?(?=\s+#|$)", section, re.MULTILINE)
    return {line.split()[1]: line.split() for line in lines}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """A cluster of Ray for each command, as where there is none; `eldr` and `serve` on the path."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths,
        "ELDR_ADMIN_KEY": ADMIN_KEY, "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """What a user has: a copy of the nearest deployment with his ports, and a log of OpenAI requests."""
    found = tmp_path_factory.mktemp("own")
    copy = ["eldr", "deployments", "cpu_demo.yaml", "--copy", "my_deployment.yaml"]
    subprocess.run(copy, cwd=found, env=environment, check=True, capture_output=True, timeout=60)
    document = yaml.safe_load((found / "my_deployment.yaml").read_text())
    document["http_options"]["port"] = PORT + 1
    arguments = document["applications"][0]["args"]
    arguments["ingress"]["port"] = PORT
    beside_the_demo(arguments)
    (found / "my_deployment.yaml").write_text(yaml.safe_dump(document))
    (found / "my_prompts").mkdir()
    with (found / "my_prompts/log.jsonl").open("w") as log:
        for file in sorted((ROOT / "examples/demo_model/prompts").glob("*.jsonl")):
            for line in file.read_text().splitlines()[:4]:
                messages = [{"role": "user", "content": json.loads(line)["prompt"][:500]}]
                log.write(json.dumps({"model": "eldr-demo", "messages": messages}) + "\n")
    return found


@pytest.fixture(scope="module")
def served(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`serve run`, ready for requests."""
    said = folder / "served.txt"
    # As in a terminal: what a shell has started in the background, this suite too, ignores Ctrl-C.
    command = ["env", "--default-signal=INT", *commands()["run"]]
    with said.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_http(f"{URL}/eldr/ready", process, said, 240)
        yield process
    finally:
        process.kill()
        process.wait(60)


def ran(name: str, folder: Path, environment: dict[str, str]) -> str:
    """What the command says on its output."""
    done = subprocess.run(
        [*commands()[name], *SHORTER[name]], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_section_has_four_commands() -> None:
    assert list(commands()) == ["check", "run", "compare", "status"]


def test_check_says_that_it_would_start(folder: Path, environment: dict[str, str]) -> None:
    assert "my_deployment.yaml: would start" in ran("check", folder, environment)


def test_served_it_is_compared_watched_and_stopped(
    served: subprocess.Popen[bytes], folder: Path, environment: dict[str, str]
) -> None:
    body = {"model": "eldr-demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    ran("compare", folder, environment)
    rows = json.loads((folder / "out/compare/compare.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["shortest-queue", "marginal-cost"]
    assert min(row["requests"] for row in rows) > 0
    assert sum(row["failures"] for row in rows) == 0
    assert "marginal-cost" in ran("status", folder, environment)
    served.send_signal(signal.SIGINT)
    served.wait(60)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{URL}/eldr/ready")
