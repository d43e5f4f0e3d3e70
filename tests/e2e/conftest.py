"""A small run of the README's first command, whose service the whole suite uses."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.applications import arguments_of, running
from tests.e2e.collector import Collector
from tests.e2e.service import (
    AGENT_PORT,
    ENGINE_ENV,
    PROMPTS,
    QUEUE_TIMEOUT_S,
    ROOT,
    STOP_WAIT_S,
    STRANGER,
    Background,
    Demo,
    Service,
    is_free,
    run,
    submit_job,
    wait_for,
)

PORT = 8231
# Files that run last, in this order. Some end with a test that kills an engine of the demo. It starts again
# while the application of the next file starts. The last file drains an engine for good.
LAST = (
    "test_when_engines_die.py",  # it kills an engine
    "test_signature_pool.py",
    "test_resumed_answers.py",  # it kills an engine
    "test_whole_replicas.py",
    "test_dead_core.py",  # it kills an engine
    "test_wide_expert_parallel.py",
    "test_prefill_by_decode.py",  # it uses the application of the previous file
    "test_when_workers_leave.py",
)
_POLICY = """
from eldr_serve.scheduling import Decision, Policy
from pydantic import Field

class LastWorker(Policy):
    class Parameters(Policy.Parameters):
        at_most: int = Field(default=4, ge=1, description="requests in flight on the last worker")

    def select(self, request, loads, rng):
        workers = loads.available_positions
        room = workers[loads.in_flight[workers] < self.parameters.at_most]
        last = room[-1] if len(room) else workers[0]
        return Decision(int(last), num_candidates=len(workers), reason="last")
"""
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every poll hides failures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests and order their files.

    First come those whose engines use the NIXL ports of the suite's application.
    """

    def place(item: pytest.Item) -> int:
        if item.path.parent != Path(__file__).parent:
            return 0
        if item.path.name == "test_benchmarks_of_serving.py":
            return -1
        return 1 + LAST.index(item.path.name) if item.path.name in LAST else 0

    items.sort(key=place)
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Return short and long prompts of several domains, of which two share a long prefix."""
    records = [
        json.loads(line)
        for file in sorted(PROMPTS.glob("*.jsonl"))
        for line in file.read_text().splitlines()[:2]
    ]
    texts = [record["prompt"][:600] for record in records][:8]
    return [*texts, texts[0] + " And then?", "x"]


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Yield the collector that receives the spans of the demo's ingress and engines."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def starting_demo(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Demo]:
    """Start the demo with a few seconds of load under each policy."""
    out = tmp_path_factory.mktemp("demo")
    document = yaml.safe_load((ROOT / "deployments" / "cpu_demo.yaml").read_text())
    arguments = document["applications"][0]["args"]
    arguments["path"] = {"queue_timeout_s": QUEUE_TIMEOUT_S, "prefill_queue_s": 8.0}
    arguments["signatures"] = {"min_gain": 2}  # never refit: keep the tables that tests swap in
    for role in ("prefill_config", "decode_config"):
        arguments[role]["deployment_config"] |= {
            "health_check_period_s": 1,  # Serve replaces a dead replica at its next health check
            "graceful_shutdown_timeout_s": 3,  # a replica that is still starting ignores the request
            "graceful_shutdown_wait_loop_s": STOP_WAIT_S,
        }
    arguments["ingress_deployment_config"] |= {
        "graceful_shutdown_timeout_s": 20,
        "graceful_shutdown_wait_loop_s": STOP_WAIT_S,
    }
    # Only requests whose clients ask for it are traced; vLLM exports spans in both its ways.
    arguments["ingress"] |= {"tracing": {"endpoint": collector.http_url, "sample": 0}}
    over_http = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    for role, endpoint, variables in (
        ("prefill_config", collector.grpc_url, {}),
        ("decode_config", collector.http_url, over_http),
    ):
        config = arguments[role]
        config["engine_kwargs"] = config["engine_kwargs"] | {"otlp_traces_endpoint": endpoint}
        config["runtime_env"] = {"env_vars": config["runtime_env"]["env_vars"] | variables}
    deployment = out / "deployment.yaml"
    deployment.write_text(yaml.safe_dump(document))
    options = {
        "deployment": deployment,
        "decode-engines": 0,
        "seconds": 4,
        "warm-up-seconds": 1,
        "rounds": 2,
        "max-tokens": 32,  # short answers end within a trial, even beside other work
        "first-table": 24,
        "greedy": 3,
        "intermediate": 64,
        "port": PORT,
        "out": out,
    }
    command = [sys.executable, "-m", "offline.demo", "--keep"]
    log = out / "demo.txt"
    # By default each test of a metric waits for 10 s, and of spans for 5 s.
    os.environ |= {"RAY_metrics_report_interval_ms": "1000", "OTEL_BSP_SCHEDULE_DELAY": "500"}
    # By default each test of autoscaling waits for 10 s.
    os.environ |= {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    STRANGER.parent.mkdir(exist_ok=True)
    STRANGER.write_text(_POLICY)
    paths = [str(ROOT), str(STRANGER.parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # The agent of a cluster that lived for seconds stays for a minute; without the port, Ray accepts no jobs.
    wait_for(lambda: is_free(AGENT_PORT), "the port of Ray's job agent is free", 180)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            text=True,
        )
    running = Demo(process, log, out, f"http://127.0.0.1:{PORT}")
    try:
        yield running
    finally:
        running.stop()
    assert process.returncode == 0, log.read_text()[-5000:]


@pytest.fixture(scope="session")
def single_engine_run(starting_demo: Demo, prompts: list[str]) -> Iterator[Background]:
    """Run a plain engine during the demo's first load."""
    starting_demo.wait_for_line("fits its routing table")
    answers = starting_demo.out / "answers.json"
    model = starting_demo.out / "model_64"
    job = {"model": str(model), "prompts": prompts, "max_tokens": 24, "out": str(answers)}
    command = [sys.executable, str(Path(__file__).with_name("single_engine.py")), json.dumps(job)]
    with Background(command, starting_demo.out / "single_engine.txt", ENGINE_ENV) as run:
        yield run


@pytest.fixture(scope="session")
def calibration_job(starting_demo: Demo) -> Iterator[Background]:
    """Run offline.calibrate as a Ray job, like a user, during the demo's load."""
    starting_demo.wait_for_line("waiting for the routing table")
    out = starting_demo.out / "job_trace.safetensors"
    command = [
        sys.executable,
        "-m",
        "offline.calibrate",
        "--deployment=deployments/cpu_demo.yaml",
        "--prompts=examples/demo_model/prompts",
        f"--out={out}",
        "--limit=40",
        "--max-tokens=12",
        "--routes",
    ]
    with submit_job(starting_demo.dashboard, command, starting_demo.out / "job.txt") as job:
        yield job


@pytest.fixture(scope="session")
def demo(request: pytest.FixtureRequest, starting_demo: Demo) -> Demo:
    """Run the demo to its report. Its service stays. Other requested fixtures run meanwhile."""
    for fixture, background in (("single_engine", "single_engine_run"), ("trace_file", "calibration_job")):
        if any(fixture in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue(background)
    starting_demo.wait_for_line("until Ctrl-C")
    return starting_demo


@pytest.fixture(scope="session")
def ray_cluster(demo: Demo) -> Iterator[str]:
    """Join the demo's Ray cluster, and yield the address of its dashboard.

    This process joins only this cluster: after a second `ray.init`, calls through a driver's Serve handles
    can block forever (Ray 2.60).
    """
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="warning", namespace="serve")
    yield demo.dashboard
    ray.shutdown()


@pytest.fixture(scope="session")
def service(demo: Demo, ray_cluster: str) -> Service:
    """Return the demo's running and warm service: deployments/cpu_demo.yaml."""
    return Service(demo.url)


@pytest.fixture(scope="session")
def wide(ray_cluster: str) -> Iterator[Service]:
    """Run deployments/cpu_demo_wide_ep.yaml beside the demo. Its decode engine may also compute prompts."""
    arguments = arguments_of("cpu_demo_wide_ep.yaml")
    # Serve replaces a dead replica at its next health check, and answers wait for the new one.
    arguments["decode_config"]["deployment_config"] |= {
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 3,
    }
    # A burst of prompts can lower the measured rate of prefill until the predicted wait exceeds the default.
    arguments["path"] = {"replica_wait_s": 200.0, "prefill_queue_s": 200.0, "local_prefill_tokens": 2048}
    with running("wide", arguments) as service:
        service.set_policy("round-robin")
        yield service


@pytest.fixture(scope="session")
def single_engine(demo: Demo, single_engine_run: Background) -> dict[str, list[str]]:
    """Return the greedy fp32 answers of one plain engine with the demo's model, one prompt at a time."""
    single_engine_run.finished()
    answers: dict[str, list[str]] = json.loads((demo.out / "answers.json").read_text())
    return answers


@pytest.fixture(scope="session")
def trace_file(demo: Demo, calibration_job: Background) -> Path:
    """Return the trace of `calibration_job`."""
    calibration_job.finished()
    return demo.out / "job_trace.safetensors"


@pytest.fixture(scope="session")
def table_file(trace_file: Path, service: Service) -> Path:
    """Return the table that offline.refit fits for the live replicas and swaps in."""
    out = trace_file.with_name("table.safetensors")
    environment = os.environ | {"RAY_ADDRESS": "auto"}
    run("-m", "offline.refit", "--trace", trace_file, "--swap", "--out", out, env=environment)
    return out


@pytest.fixture(autouse=True)
def whole_before_and_idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for two warm decode engines before a test, and for no leases and no load after it."""
    if "service" not in request.fixturenames:
        yield
    else:
        running: Service = request.getfixturevalue("service")
        wait_for(running.whole, "both decode engines are warm", 240)
        yield
        wait_for(
            lambda: (
                running.status()["leases"] == running.status()["decode_queue"]["size"] == 0
                and all(w["in_flight"] == w["kv_tokens"] == 0 for w in running.status()["workers"])
            ),
            "all leases are released",
            30,
        )
