"""Kill and stop processes of the whole application under load, one after the other.

A constant number of clients stream, ask for whole answers and disconnect (traffic.py). Events are recorded as
they occur (record.py).
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from eldr_serve.commands.client import Client, ServiceError
from loadgen import application, processes, workload
from loadgen.held_resources import held_in_status
from tests.faults import steadiness
from tests.faults.operations import ADMIN_KEY, Operator, Run
from tests.faults.record import Record
from tests.faults.steadiness import Steadiness
from tests.faults.traffic import Load, bodies, references

SETTLE_S = 35.0  # KV blocks of a disconnected request are held for up to 30 s
_PROMPTS = 16
_INGRESSES = 2
_STATUS_TRIES = 40  # status requests until every ingress has answered; the kernel chooses which one answers
_WARM_S, _SAMPLE_PERIOD_S = 20.0, 5.0  # until processes are warm; between samples of their event loops
_RUNNING = ("ray_vllm_num_requests_running", "ray_vllm_num_requests_waiting")
_STREAMS, _STREAM_TOKENS = 4, 400  # streams that run while leases are compared


@dataclass(frozen=True)
class Options:
    """Options of a chaos run.

    Attributes:
        every_s: time between two faults.
        blocks: KV blocks of each engine.
    """

    faults: list[str]
    seconds: float
    every_s: float
    in_flight: int
    blocks: int
    port: int
    seed: int


async def drive(
    service: Client,
    proxy_url: str,
    arguments: dict[str, Any],
    asked: list[tuple[str, Any]],
    record: Record,
    options: Options,
    log: Callable[[str], None],
) -> None:
    """Run the load and the faults, then record what the service still holds."""
    rng, run = random.Random(options.seed), Run(record)
    operator = Operator(service, proxy_url, arguments, run, rng, log)
    await operator.begin()
    log("greedy answers without faults")
    prompts = await references(service.url, asked)
    log("load")
    load = Load((service.url, proxy_url), prompts, run.record_request, rng)
    until_s = time.monotonic() + options.seconds
    clients = [asyncio.create_task(load.client(until_s)) for _ in range(options.in_flight)]
    watching = asyncio.create_task(_watch(run.steadiness))
    await operator.work(options.faults, options.every_s, until_s)
    await asyncio.gather(*clients)
    watching.cancel()
    log(f"{run.sent} requests; what is left")
    settled_s, left = await asyncio.to_thread(_wait_until_nothing_is_left, service.url)
    left += await asyncio.to_thread(_wait_until_engines_are_idle, service.url)
    await asyncio.to_thread(_sample, run.steadiness)
    await asyncio.to_thread(run.steadiness.end)
    log("compare the router's leases with those of its clients")
    left += await _compare_leases(
        service.url, str(arguments["decode_config"]["model_loading_config"]["model_id"])
    )
    held = run.steadiness.rows(run.stops)
    record.add(
        "end",
        settled_s=round(settled_s, 1),
        left_behind=left,
        counters=dict(run.counters),
        processes=held,
        unsteady=steadiness.find_problems(held),
    )


async def _watch(steadiness: Steadiness) -> None:
    """Sample processes and their event loops periodically, until cancelled."""
    await asyncio.sleep(_WARM_S)
    await asyncio.to_thread(steadiness.begin)
    while True:
        await asyncio.to_thread(_sample, steadiness)
        await asyncio.sleep(_SAMPLE_PERIOD_S)


def _sample(steadiness: Steadiness) -> None:
    with contextlib.suppress(httpx.TransportError):
        steadiness.take(_metrics())


def _read_statuses(url: str) -> list[dict[str, Any]]:
    """Return the status of each ingress on the port that answered."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(_STATUS_TRIES):
        with contextlib.suppress(ServiceError):
            status = Client(url, ADMIN_KEY, timeout_s=5.0).status()
            found[status["answered_by"]] = status
            if len(found) == _INGRESSES:
                break
    return list(found.values())


def _wait_until_nothing_is_left(url: str) -> tuple[float, list[str]]:
    """Return the time until nothing was left, s, and what is still left after SETTLE_S."""
    since = time.monotonic()
    while True:
        reported = _read_statuses(url)
        held = list(dict.fromkeys(what for status in reported for what in held_in_status(status)))
        if len(reported) < _INGRESSES:
            held.append(f"{len(reported)} of {_INGRESSES} ingresses answer")
        took_s = time.monotonic() - since
        if not held or took_s > SETTLE_S:
            return took_s, held
        time.sleep(0.5)


async def _compare_leases(url: str, model: str) -> list[str]:
    """Check that the router holds exactly one lease for each stream of the ingresses; return what differs."""
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": _STREAM_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }

    async def stream() -> None:
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            async for _ in answer.aiter_bytes():
                pass

    streams = [asyncio.create_task(stream()) for _ in range(_STREAMS)]
    seen = "no stream began"
    try:
        async with asyncio.timeout(30):
            while not all(task.done() for task in streams):
                reported = await asyncio.to_thread(_read_statuses, url)
                own = sum(status["ingress"]["leases"] for status in reported)
                router = [status.get("leases", -1) for status in reported]
                if own == _STREAMS and router == [own] * _INGRESSES:
                    return []
                seen = f"the router holds {router} leases, its ingresses {own}"
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return [f"{seen}, of {_STREAMS} streams"]


def _wait_until_engines_are_idle(url: str) -> list[str]:
    """Return what `_busy_engines` finds; wait, since a new engine takes a while to report its metrics."""
    until = time.monotonic() + SETTLE_S
    while (wrong := _busy_engines(url)) and time.monotonic() < until:
        time.sleep(1.0)
    return wrong


def _busy_engines(url: str) -> list[str]:
    """Return live engines with running or waiting requests according to vLLM's metrics."""
    status = Client(url, ADMIN_KEY).status()
    if "workers" not in status:
        return ["the router is away, so the live engines are unknown"]
    live = {worker["replica"] for worker in status["workers"]} | set(status["ingress"]["prefill_kv_usage"])
    reported, others, wrong = set(), Counter[str](), []
    for family in text_string_to_metric_families(_metrics()):
        for sample in family.samples:
            replica = sample.labels.get("ReplicaId", "")
            others[replica] += sample.name not in _RUNNING
            if sample.name in _RUNNING and replica in live:
                reported.add(replica)
                if sample.value:
                    wrong.append(f"{replica}: {sample.name} is {sample.value:g}")
    return wrong + [
        f"{replica} does not report running requests, but {others[replica]} other samples"
        for replica in sorted(live - reported)
    ]


def _metrics() -> str:
    """Return all metrics that Ray's node exports."""
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text


def run_chaos(deployment: Path, prompts: list[workload.Prompt], record: Record, options: Options) -> None:
    """Start the application on its own cluster, drive it and stop it; add the events to `record`.

    Raises:
        UserInputError: the application does not start.
    """
    # Ray's default niceness of 15 would let other work on the machine slow the engines down.
    os.environ |= {"RAY_metrics_report_interval_ms": "1000", "RAY_worker_niceness": "0"}
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["engine_kwargs"] |= {"num_gpu_blocks_override": options.blocks, "max_model_len": 1024}
        arguments[role]["deployment_config"] |= {"health_check_period_s": 1}
    arguments["ingress_deployment_config"] |= {"num_replicas": _INGRESSES}
    model = arguments["decode_config"]["model_loading_config"]["model_id"]
    asked = bodies(prompts, model, _PROMPTS, options.seed)
    console, start_s = Console(stderr=True, highlight=False), time.monotonic()

    def log(what: str) -> None:
        console.print(f"{time.monotonic() - start_s:6.1f} s: {what}", markup=False, soft_wrap=True)

    application.check_port(options.port)
    try:
        service, _ = application.start(arguments, options.port, ADMIN_KEY, dashboard=False, tell=log)
        record.add(
            "run",
            seed=options.seed,
            seconds=options.seconds,
            every_s=options.every_s,
            in_flight=options.in_flight,
            faults=options.faults,
        )
        proxy_url = f"http://127.0.0.1:{options.port + 1}"
        asyncio.run(drive(service, proxy_url, arguments, asked, record, options, log))
    finally:
        for role in processes.ROLES:
            for process in processes.with_role(role):
                processes.resume(process)
        application.stop()
