"""One Ray cluster with 1 prefill + 2 decode real engines for the whole suite."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from service import ADMIN_KEY, POOL_TTL_S, ROOT, Service, submit_job, wait_for

MODEL = ROOT / "demo_model" / "weights"
PROMPTS = ROOT / "demo_model" / "prompts"
PORT = 8231
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll hides what failed
ENGINE_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


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
    """A Ray cluster of this suite's own, with the dashboard that `ray job submit` talks to.

    The only one of the process: after a second `ray.init`, calls through Serve handles of a driver can
    wait for ever (Ray 2.60).
    """
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_metrics_report_interval_ms": "1000"}  # or each test of a metric waits for 10 s
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import ray

    context = ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=True,
        dashboard_port=8271,
        object_store_memory=300_000_000,
        log_to_driver=False,
        logging_level="warning",
        _metrics_export_port=8272,
        namespace="serve",
    )
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield f"http://{context.dashboard_url}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def service(ray_cluster: str, single_engine: dict[str, list[str]]) -> Service:
    """deployments/cpu_demo.yaml, running and warm; starts after the single engine has left."""
    from ray import serve

    from eldr_serve.serving.app import build_app

    arguments = yaml.safe_load((ROOT / "deployments" / "cpu_demo.yaml").read_text())["applications"][0][
        "args"
    ]
    for role, port in (("prefill_config", 27100), ("decode_config", 27200)):
        arguments[role]["model_loading_config"]["model_source"] = str(MODEL)
        arguments[role]["experimental_configs"] = {"NIXL_SIDE_CHANNEL_PORT_BASE": port}
    arguments["admin_key"] = ADMIN_KEY
    arguments["path"] = {"pool_ttl_s": POOL_TTL_S}
    serve.run(build_app(arguments), name="eldr", route_prefix="/")
    running = Service(f"http://127.0.0.1:{PORT}")
    wait_for(lambda: running.status()["ingress"]["ready"], "every pair of engines is warm", 180)
    return running


@pytest.fixture(scope="session")
def trace_file(service: Service, ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration trace from offline.calibrate, submitted as a Ray job, as a user would."""
    out = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    command = [
        sys.executable,
        "-m",
        "offline.calibrate",
        "--deployment",
        "deployments/cpu_demo.yaml",
        "--prompts",
        "demo_model/prompts",
        "--out",
        str(out),
        "--limit",
        "40",
        "--max-tokens",
        "12",
        "--routes",
    ]
    submit_job(ray_cluster, command)
    return out


@pytest.fixture(scope="session")
def table_file(trace_file: Path, service: Service) -> Path:
    """The table that offline.refit fits for the live replicas and swaps in."""
    out = trace_file.with_name("table.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "offline.refit", "--trace", str(trace_file), "--swap", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "auto"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, no lease and no load stays behind."""
    yield
    if "service" in request.fixturenames:
        running: Service = request.getfixturevalue("service")
        wait_for(
            lambda: (
                running.status()["leases"] == running.status()["pool"]["size"] == 0
                and all(w["in_flight"] == w["kv_tokens"] == 0 for w in running.status()["workers"])
            ),
            "all leases are released",
            30,
        )
