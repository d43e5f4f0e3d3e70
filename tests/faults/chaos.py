"""One run of the whole application under load, while its processes are killed and stopped in turn.

The application runs on a Ray cluster of its own with real engines. A constant number of clients stream, ask
for complete answers and disconnect (`traffic`). `operations` injects the faults, and `record` has the events.

When the load has ended, the run waits until the application holds nothing more, asks the engines whether they
still run requests, and compares the router's leases with those of its ingresses while a few streams run. What
is left after SETTLE_S, and what has grown (`steadiness`), is an error.
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

from eldr_serve.commands.client import OperatorClient, ServiceError
from loadgen import application, processes
from loadgen.held_resources import held_in_status
from loadgen.workload import WorkloadPrompt
from tests.faults import steadiness
from tests.faults.nodes import INGRESS_ACTOR, separate_nodes
from tests.faults.operations import ADMIN_KEY, FaultInjector, Run
from tests.faults.record import Record
from tests.faults.steadiness import Steadiness
from tests.faults.traffic import MAX_TOKENS, ClientLoad, bodies, references

SETTLE_S = 35.0  # KV blocks of a disconnected request are held for up to 30 s
_PROMPTS = 16
_INGRESSES = 2
_STATUS_TRIES = 40  # maximum status requests until every ingress has answered, since the kernel chooses one
_WARM_S, _SAMPLE_PERIOD_S = 20.0, 5.0  # time until processes are warm, and between samples
_RUNNING = ("ray_vllm_num_requests_running", "ray_vllm_num_requests_waiting")
_STREAMS, _STREAM_TOKENS = 4, 400  # streams that run while leases are compared


@dataclass(frozen=True)
class Options:
    """Options of a chaos run.

    Attributes:
        every_s: time between two faults.
        blocks: KV blocks of each engine.
        proxies: Serve's proxies, each on a Ray node of its own.
        max_tokens: maximum number of tokens of an answer.
    """

    faults: list[str]
    seconds: float
    every_s: float
    in_flight: int
    blocks: int
    port: int
    seed: int
    proxies: int = 1
    max_tokens: int = MAX_TOKENS


async def drive(
    service: OperatorClient,
    proxy_url: str,
    arguments: dict[str, Any],
    requests: list[tuple[str, Any]],
    record: Record,
    options: Options,
    log: Callable[[str], None],
) -> None:
    """Run the load and the faults, then record what the service still holds.

    Args:
        service: client of the operator's endpoints.
        proxy_url: address of Serve's proxy.
        arguments: arguments of the application.
        requests: (path, body) of the requests that clients send.
        log: called with a line about each phase and fault.
    """
    rng, run = random.Random(options.seed), Run(record, proxies=options.proxies)
    listeners = {options.port: _INGRESSES, options.port + 1: options.proxies}
    injector = FaultInjector(service, proxy_url, arguments, run, rng, log, listeners)
    await injector.wait_until_complete()
    log("greedy answers without faults")
    prompts = await references(service.url, requests)
    log("load")
    load = ClientLoad((service.url, proxy_url), prompts, run.record_request, rng)
    until_s = time.monotonic() + options.seconds
    clients = [asyncio.create_task(load.client(until_s)) for _ in range(options.in_flight)]
    watching = asyncio.create_task(_watch(run.steadiness))
    await injector.inject_faults(options.faults, options.every_s, until_s)
    await asyncio.gather(*clients)
    watching.cancel()
    log(f"{run.sent} requests; what is left")
    settled_s, problems = await asyncio.to_thread(_wait_until_nothing_is_left, service.url)
    problems += await asyncio.to_thread(_wait_until_engines_are_idle, service.url)
    await asyncio.to_thread(_sample, run.steadiness)
    await asyncio.to_thread(run.steadiness.end)
    log("compare the router's leases with those of its ingresses")
    problems += await _compare_leases(
        service.url, str(arguments["decode_config"]["model_loading_config"]["model_id"])
    )
    processes_table = run.steadiness.rows(run.stops)
    record.add(
        "end",
        settled_s=round(settled_s, 1),
        left_behind=problems,
        counters=dict(run.counters),
        processes=processes_table,
        unsteady=steadiness.find_problems(processes_table),
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
    status_by_ingress: dict[str, dict[str, Any]] = {}
    for _ in range(_STATUS_TRIES):
        with contextlib.suppress(ServiceError):
            status = OperatorClient(url, ADMIN_KEY, timeout_s=5.0).status()
            status_by_ingress[status["answered_by"]] = status
            if len(status_by_ingress) == _INGRESSES:
                break
    return list(status_by_ingress.values())


def _wait_until_nothing_is_left(url: str) -> tuple[float, list[str]]:
    """Return the seconds until nothing was left, and what is still left after SETTLE_S."""
    since = time.monotonic()
    while True:
        statuses = _read_statuses(url)
        problems = list(dict.fromkeys(what for status in statuses for what in held_in_status(status)))
        if len(statuses) < _INGRESSES:
            problems.append(f"{len(statuses)} of {_INGRESSES} ingresses answer")
        took_s = time.monotonic() - since
        if not problems or took_s > SETTLE_S:
            return took_s, problems
        time.sleep(0.5)


async def _compare_leases(url: str, model: str) -> list[str]:
    """Return how the router's leases differ from one for each stream of the ingresses."""
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
    difference = "no stream began"
    try:
        async with asyncio.timeout(30):
            while not all(task.done() for task in streams):
                statuses = await asyncio.to_thread(_read_statuses, url)
                of_ingresses = sum(status["ingress"]["leases"] for status in statuses)
                of_router = [status.get("leases", -1) for status in statuses]
                if of_ingresses == _STREAMS and of_router == [of_ingresses] * _INGRESSES:
                    return []
                difference = f"the router holds {of_router} leases, its ingresses {of_ingresses}"
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return [f"{difference}, of {_STREAMS} streams"]


def _wait_until_engines_are_idle(url: str) -> list[str]:
    """Wait until `_busy_engines` finds none, and return those that it still finds after SETTLE_S.

    A new engine takes a while to report its metrics.
    """
    until = time.monotonic() + SETTLE_S
    while (problems := _busy_engines(url)) and time.monotonic() < until:
        time.sleep(1.0)
    return problems


def _busy_engines(url: str) -> list[str]:
    """Return live engines with running or waiting requests according to vLLM's metrics."""
    status = OperatorClient(url, ADMIN_KEY).status()
    if "workers" not in status:
        return ["the router is unreachable, so the live engines are unknown"]
    live = {worker["worker"] for worker in status["workers"]} | set(status["ingress"]["prefill_kv_usage"])
    reporting_replicas, num_other_samples, problems = set(), Counter[str](), []
    for family in text_string_to_metric_families(_metrics()):
        for sample in family.samples:
            replica = sample.labels.get("ReplicaId", "")
            num_other_samples[replica] += sample.name not in _RUNNING
            if sample.name in _RUNNING and replica in live:
                reporting_replicas.add(replica)
                if sample.value:
                    problems.append(f"{replica}: {sample.name} is {sample.value:g}")
    return problems + [
        f"{replica} does not report running requests, but {num_other_samples[replica]} other samples"
        for replica in sorted(live - reporting_replicas)
    ]


def _metrics() -> str:
    """Return all metrics that Ray's nodes export."""
    import ray

    ports = [node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]]
    return "\n".join(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text for port in ports)


def run_chaos(deployment: Path, prompts: list[WorkloadPrompt], record: Record, options: Options) -> None:
    """Start the application on its own cluster, drive it and stop it. Add the events to `record`.

    Raises:
        UserInputError: the application does not start.
    """
    # Ray's default niceness of 15 would let other work on the machine slow the engines down.
    os.environ |= {"RAY_metrics_report_interval_ms": "1000", "RAY_worker_niceness": "0"}
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["engine_kwargs"] |= {"num_gpu_blocks_override": options.blocks, "max_model_len": 1024}
        arguments[role]["deployment_config"] |= {"health_check_period_s": 1}
    has_nodes = options.proxies > 1
    arguments["ingress_deployment_config"] |= {"num_replicas": _INGRESSES}
    if has_nodes:
        arguments["ingress_deployment_config"] |= {"ray_actor_options": INGRESS_ACTOR}
    model = arguments["decode_config"]["model_loading_config"]["model_id"]
    requests = bodies(prompts, model, _PROMPTS, options.seed, options.max_tokens)
    console, start_s = Console(stderr=True, highlight=False), time.monotonic()

    def log(what: str) -> None:
        console.print(f"{time.monotonic() - start_s:6.1f} s: {what}", markup=False, soft_wrap=True)

    application.check_port(options.port)
    with separate_nodes(options.proxies) as start_nodes:
        try:
            service, _ = application.start(
                arguments,
                options.port,
                ADMIN_KEY,
                dashboard=False,
                log=log,
                start_ray=start_nodes if has_nodes else None,
            )
            record.add(
                "run",
                seed=options.seed,
                seconds=options.seconds,
                every_s=options.every_s,
                in_flight=options.in_flight,
                faults=options.faults,
                proxies=options.proxies,
                max_tokens=options.max_tokens,
            )
            proxy_url = f"http://127.0.0.1:{options.port + 1}"
            asyncio.run(drive(service, proxy_url, arguments, requests, record, options, log))
        finally:
            for role in processes.ROLES:
                for process in processes.find_role(role):
                    processes.resume(process)
            application.stop()
