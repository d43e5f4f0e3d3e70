"""One Ray cluster with 1 prefill + 2 decode real engines for the whole suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "demo_model" / "weights"
PROMPTS = ROOT / "demo_model" / "prompts"
ADMIN_KEY = "e2e-key"
PORT = 8231
ENGINE_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@dataclass
class Service:
    """The running application, as a client and an operator see it."""

    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def status(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/eldr/status", timeout=30)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def admin(self, method: str, path: str, key: str | None = ADMIN_KEY, **kwargs: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **kwargs)

    def set_policy(self, name: str, **parameters: Any) -> None:
        answer = self.admin("PUT", "/eldr/policy", json={"name": name, "parameters": parameters})
        assert answer.status_code == 200, answer.text

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples whose labels contain the given texts, from Ray's own endpoint."""
        total = 0.0
        for line in self._metrics().splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == f"ray_{name}" and all(f'{k}="{v}' in head for k, v in labels.items()):
                total += float(value)
        return total

    def _metrics(self) -> str:
        import ray

        port = ray.nodes()[0]["MetricsExportPort"]
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds; fails the test with `what` if it never does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    pytest.fail(f"not within {timeout_s} s: {what}")


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Short and long prompts of several domains; two share a long prefix."""
    records = [
        json.loads(line)
        for file in sorted(PROMPTS.glob("*.jsonl"))
        for line in file.read_text().splitlines()[:2]
    ]
    texts = [record["prompt"][:600] for record in records][:8]
    return [*texts, texts[0] + " And then?", "x"]


@pytest.fixture(scope="session")
def single_engine(prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one plain engine answers, greedily, in fp32, one prompt at a time."""
    out = tmp_path_factory.mktemp("single") / "answers.json"
    job = {"model": str(MODEL), "prompts": prompts, "max_tokens": 24, "out": str(out)}
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("single_engine.py"))],
        input=json.dumps(job),
        text=True,
        check=True,
        timeout=300,
        capture_output=True,
        env=os.environ | ENGINE_ENV,
    )
    answers: dict[str, list[str]] = json.loads(out.read_text())
    return answers


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A Ray cluster of this suite's own, with the dashboard that `ray job submit` talks to."""
    import ray

    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    context = ray.init(
        num_cpus=8,
        include_dashboard=True,
        dashboard_port=8271,
        object_store_memory=300_000_000,
        log_to_driver=False,
        logging_level="warning",
        _metrics_export_port=8272,
        namespace="serve",
    )
    yield f"http://{context.dashboard_url}"
    ray.shutdown()


@pytest.fixture(scope="session")
def service(ray_cluster: str, single_engine: dict[str, list[str]]) -> Iterator[Service]:
    """deployments/cpu_demo.yaml, running and warm; starts after the single engine has left."""
    from ray import serve

    from eldr_serve.serving.app import build_app

    arguments = yaml.safe_load((ROOT / "deployments" / "cpu_demo.yaml").read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["model_loading_config"]["model_source"] = str(MODEL)
    arguments["admin_key"] = ADMIN_KEY
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build_app(arguments), name="eldr", route_prefix="/")
    running = Service(f"http://127.0.0.1:{PORT}")
    wait_for(lambda: running.status()["ingress"]["ready"], "every pair of engines is warm", 180)
    yield running
    serve.shutdown()


@pytest.fixture(scope="session")
def trace_file(service: Service, ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration trace from offline.calibrate, submitted as a Ray job, as a user would."""
    out = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    command = [
        sys.executable, "-m", "offline.calibrate",
        "--deployment", "deployments/cpu_demo.yaml",
        "--prompts", "demo_model/prompts",
        "--out", str(out),
        "--limit", "40", "--max-tokens", "12", "--routes",
    ]  # fmt: skip
    submit_job(ray_cluster, command)
    return out


def submit_job(dashboard: str, command: list[str]) -> str:
    """`ray job submit` and wait; returns its output."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", dashboard, "--", *command],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": dashboard},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def table_file(trace_file: Path, service: Service) -> Path:
    """The table that offline.refit fits for the live replicas and swaps in."""
    out = trace_file.with_name("table.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "offline.refit", "--trace", str(trace_file), "--swap", "--out", str(out)],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": "auto"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, no lease and no load stays behind."""
    yield
    if "service" in request.fixturenames:
        running: Service = request.getfixturevalue("service")
        wait_for(
            lambda: running.status()["leases"] == 0
            and all(w["in_flight"] == w["kv_tokens"] == 0 for w in running.status()["workers"]),
            "all leases are released",
            30,
        )
