"""Kill and stop processes of the whole application under load, one after the other.

A constant number of clients stream, ask for whole answers and disconnect (traffic.py). Events are recorded as
they occur (record.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.console import Console

from eldr_serve.client import Client, ServiceError
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import SignatureSpec
from loadgen import application, processes, workload
from loadgen.remains import remains_of
from tests.faults import steadiness
from tests.faults.record import Record
from tests.faults.steadiness import Steadiness
from tests.faults.traffic import Load, Sent, bodies, references

STOP_S, GCS_S = 5.0, 8.0
SETTLE_S = 35.0  # KV blocks of a disconnected request are held for up to 30 s
_RECOVERY_S = 240.0  # an engine takes over a minute to start on few cores
_PROMPTS = 16
_INGRESSES = 2
_STATUS_TRIES = 40  # status requests until every ingress has answered; the kernel chooses which one answers
_WARM_S, _SAMPLE_PERIOD_S = 20.0, 5.0  # until processes are warm; between samples of their event loops
_RUNNING = ("ray_vllm_num_requests_running", "ray_vllm_num_requests_waiting")
_STREAMS, _STREAM_TOKENS = 4, 400  # streams that run while leases are compared
_KEY = "chaos"
POLICIES = ("round-robin", "balance-band", "locality-band", "marginal-cost")
KILLED = ("prefill", "decode", "router", "ingress", "proxy", "controller")
STOPPED = ("prefill", "decode", "router", "ingress")
FAULTS = (
    *(f"kill {role}" for role in KILLED),
    *(f"stop {role}" for role in STOPPED),
    "stop gcs", "swap table", "change policy", "redeploy",
)  # fmt: skip
# Further roles whose processes a fault removes. No fault is injected into them until the service recovers.
_FURTHER_ROLES = {"redeploy": ("prefill", "decode", "ingress")}
_DISCONNECTED = ("not connected", "connection lost", "cut")  # outcomes of a request whose server has died
_PROXY_LAG_S = 3.0  # until Serve's proxy has reported to its client that the ingress died


@dataclass
class InjectedFault:
    """An injected fault and the time until the service recovered, s; None if that took too long.

    Attributes:
        held: client ports of the connections that the killed process held.
        done_s: time of its death; it may also have accepted connections between at_s and this time.
    """

    fault: str
    at_s: float
    recovery_s: float | None = None
    held: set[int] = field(default_factory=set)
    done_s: float = 0.0


@dataclass
class Run:
    """State of a chaos run; times are of time.monotonic()."""

    record: Record
    faults: list[InjectedFault] = field(default_factory=list)
    sent: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    steadiness: Steadiness = field(default_factory=Steadiness)

    @property
    def stops(self) -> Counter[str]:
        """Return how often a process of each role was stopped."""
        return Counter(h.fault.split()[-1] for h in self.faults if h.fault.startswith("stop"))

    def ended(self, sent: Sent) -> None:
        """Record a request that has ended."""
        self.sent += 1
        before = [happened for happened in self.faults if happened.at_s <= sent.ended_s]
        self.record.add(
            "sent",
            fault=before[-1].fault if before else None,
            kind=explained_by_fault(sent, before) or sent.kind,
            detail=sent.detail[:300],
            stream=sent.stream,
            by_proxy=sent.by_proxy,
            seconds=round(sent.ended_s - sent.began_s, 3),
            silence_s=round(sent.silence_s, 3),
            gap_s=round(sent.gap_s, 3),
        )

    def over(self, happened: InjectedFault) -> None:
        """Record the recovery from a fault, or that it took too long."""
        seconds = happened.recovery_s
        self.record.add("fault", fault=happened.fault, recovery_s=seconds and round(seconds, 2))


def explained_by_fault(sent: Sent, faults: list[InjectedFault]) -> str | None:
    """Return the kind of record.APART that explains a failed request by a fault; None if no fault does."""
    kills = [happened for happened in faults if happened.fault in ("kill ingress", "kill proxy")]
    for happened in reversed(kills):
        under_way = sent.began_s <= max(happened.done_s, happened.at_s) and sent.ended_s >= happened.at_s
        # During a kill the client does not read its clock: it may have connected earlier than recorded.
        between = sent.began_s <= happened.done_s and happened.at_s <= sent.connected_s
        its_own = sent.port in happened.held or (
            between and sent.by_proxy == (happened.fault == "kill proxy")
        )
        if under_way and sent.kind in _DISCONNECTED and its_own:
            return "own_connection"
        behind = sent.by_proxy and happened.fault == "kill ingress"
        failed = sent.kind in _DISCONNECTED or sent.kind == "http 500"
        if behind and failed and under_way and sent.ended_s <= happened.at_s + _PROXY_LAG_S:
            return "behind_proxy"
        away_s = happened.recovery_s or _RECOVERY_S
        if (
            happened.fault == "kill proxy"
            and sent.by_proxy
            and sent.kind == "not connected"
            and sent.ended_s <= happened.at_s + away_s
        ):
            return "nobody_listened"
    return None


def affected_roles(fault: str) -> tuple[str, ...]:
    """Return the roles whose processes a fault may remove, and the name of an operation."""
    return (fault.split()[-1], *_FURTHER_ROLES.get(fault, ()))


class Operator:
    """Injects faults and watches how the application recovers.

    Args:
        arguments: arguments of the application, used to redeploy it.
        log: called with a line about each fault and recovery.
    """

    def __init__(
        self,
        service: Client,
        proxy_url: str,
        arguments: dict[str, Any],
        run: Run,
        rng: random.Random,
        log: Callable[[str], None],
    ) -> None:
        self._log = log
        self._service = service
        self._proxy_url = proxy_url
        self._arguments = arguments
        self._decodes = arguments["decode_config"]["deployment_config"]["num_replicas"]
        self._model = arguments["decode_config"]["model_loading_config"]["model_id"]
        self._run = run
        self._rng = rng
        self._recovering: dict[asyncio.Task[None], tuple[str, ...]] = {}  # roles of each fault
        self._shape: tuple[int, int] = (1, 1)
        self._epoch, self._seen = "", Counter[str]()

    async def begin(self) -> None:
        """Wait until the application is complete for the first time."""
        while not await asyncio.to_thread(self._is_complete):
            await asyncio.sleep(0.5)

    async def work(self, faults: list[str], every_s: float, until_s: float) -> None:
        """Inject a fault every `every_s`, each kind in turn, but none into a role that still recovers."""
        self._shape = await asyncio.to_thread(self._signature_shape)
        due: list[str] = []
        counting = asyncio.create_task(self._count())
        while time.monotonic() + every_s < until_s:
            if not due:
                due = self._rng.sample(faults, len(faults))
            busy = {role for roles in self._recovering.values() for role in roles}
            role_free = [fault for fault in due if busy.isdisjoint(affected_roles(fault))]
            if role_free:
                due.remove(role_free[0])
                await self._inject(role_free[0])
            await asyncio.sleep(every_s)
        await asyncio.gather(*self._recovering)
        await asyncio.sleep(1.5)
        counting.cancel()

    async def _inject(self, fault: str) -> None:
        happened = InjectedFault(fault, time.monotonic())
        self._run.faults.append(happened)
        self._log(fault)
        verb, _, what = fault.partition(" ")
        before = {process.pid for process in processes.of(what)} if what in processes.ROLES else set()
        there = processes.of(what) if verb in ("kill", "stop") else []
        if verb in ("kill", "stop") and not there:
            self._log(f"{fault}: there is no such process")
            self._run.counters[f"no process to {fault}"] += 1
            self._run.faults.remove(happened)
            return
        if verb == "kill":
            happened.held = processes.kill(self._rng.choice(there))
            happened.done_s = time.monotonic()
        elif verb == "stop":
            victim = self._rng.choice(there)
            processes.stop(victim)
            seconds = GCS_S if what == "gcs" else STOP_S
            asyncio.get_running_loop().call_later(seconds, processes.go_on, victim)
        else:
            await self._try_operation(_OPERATIONS[fault])
        task = asyncio.create_task(self._recover(happened, len(before)))
        self._recovering[task] = affected_roles(fault)
        task.add_done_callback(self._recovering.pop)

    async def _try_operation(self, operation: Callable[[Operator], None]) -> None:
        try:
            await asyncio.to_thread(operation, self)
        except (ServiceError, RayError, RayServeException, ConnectionError, TimeoutError) as error:
            self._run.counters[f"refused: {error}"[:100]] += 1

    def _change_policy(self) -> None:
        self._service.set_policy(self._rng.choice(POLICIES))

    def _swap_table(self) -> None:
        layers, _ = self._shape
        spec = SignatureSpec(np.ones(self._shape, np.float32), np.arange(layers))
        points = np.random.default_rng(self._rng.randrange(2**31)).random(
            (self._decodes, spec.dim), np.float32
        )
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        sizes, names = np.ones(self._decodes, np.int64), ["a"] * self._decodes
        self._service.swap_table(RoutingTable(self._model, spec, points, sizes, names, 0.05).to_bytes())

    def _redeploy(self) -> None:
        path = self._arguments.setdefault("path", {})
        path["retry_backoff_s"] = 0.051 if path.get("retry_backoff_s", 0.05) == 0.05 else 0.05
        application.deploy(self._arguments)

    def _signature_shape(self) -> tuple[int, int]:
        source = self._arguments["decode_config"]["model_loading_config"]["model_source"]
        fields = json.loads((Path(source) / "config.json").read_text())
        return fields["num_hidden_layers"], fields["num_local_experts"]

    async def _recover(self, happened: InjectedFault, number: int) -> None:
        """Wait until there are as many processes as before and the service is complete."""
        role = happened.fault.split()[-1]
        while time.monotonic() - happened.at_s < _RECOVERY_S:
            await asyncio.sleep(0.25)
            if role in processes.ROLES and len(processes.of(role)) < number:
                continue
            if await asyncio.to_thread(self._is_complete):
                happened.recovery_s = time.monotonic() - happened.at_s
                self._log(f"{happened.fault}: recovered after {happened.recovery_s:.1f} s")
                self._run.over(happened)
                return
        self._run.over(happened)
        self._log(f"{happened.fault}: no recovery within {_RECOVERY_S:g} s")

    def _is_complete(self) -> bool:
        try:
            status = Client(self._service.url, _KEY, timeout_s=3.0).status()
            by_proxy = httpx.get(f"{self._proxy_url}/v1/models", timeout=3.0).status_code
        except (ServiceError, httpx.TransportError):
            return False
        ready = status["ingress"]["ready"] and not status["ingress"]["router_away"]
        served = ready and by_proxy == 200 and len(status.get("workers", ())) == self._decodes
        try:
            return served and application.whole()
        except (RayError, RayServeException, ConnectionError, TimeoutError):  # the controller is away
            return False

    async def _count(self) -> None:
        """Sum up the router's counters, which each new actor restarts at 0."""
        while True:
            await asyncio.sleep(1.0)
            try:
                status = await asyncio.to_thread(self._service.status)
            except ServiceError:
                continue
            if "counters" in status:
                if status["epoch"] != self._epoch:
                    self._epoch, self._seen = status["epoch"], Counter()
                now = Counter(status["counters"])
                self._run.counters.update(now - self._seen)
                self._seen = now


_OPERATIONS: dict[str, Callable[[Operator], None]] = {
    "change policy": Operator._change_policy,
    "swap table": Operator._swap_table,
    "redeploy": Operator._redeploy,
}


async def drive(
    service: Client,
    proxy_url: str,
    arguments: dict[str, Any],
    asked: list[tuple[str, Any]],
    record: Record,
    *,
    faults: list[str],
    seconds: float,
    every_s: float,
    in_flight: int,
    seed: int,
    log: Callable[[str], None],
) -> None:
    """Run the load and the faults, then record what the service still holds."""
    rng, run = random.Random(seed), Run(record)
    operator = Operator(service, proxy_url, arguments, run, rng, log)
    await operator.begin()
    log("greedy answers without faults")
    prompts = await references(service.url, asked)
    log("load")
    load = Load((service.url, proxy_url), prompts, run.ended, rng)
    until_s = time.monotonic() + seconds
    clients = [asyncio.create_task(load.client(until_s)) for _ in range(in_flight)]
    watching = asyncio.create_task(_watch(run.steadiness))
    await operator.work(faults, every_s, until_s)
    await asyncio.gather(*clients)
    watching.cancel()
    log(f"{run.sent} requests; what is left")
    settled_s, left = await asyncio.to_thread(_settle, service.url)
    left += await asyncio.to_thread(_still_running, service.url)
    await asyncio.to_thread(_take, run.steadiness)
    await asyncio.to_thread(run.steadiness.end)
    log("compare the router's leases with those of its clients")
    left += await _union(service.url, str(arguments["decode_config"]["model_loading_config"]["model_id"]))
    held = run.steadiness.rows(run.stops)
    record.add(
        "end", settled_s=round(settled_s, 1), left_behind=left, counters=dict(run.counters), processes=held,
        unsteady=steadiness.wrong(held),
    )  # fmt: skip


async def _watch(steadiness: Steadiness) -> None:
    """Sample processes and their event loops periodically, until cancelled."""
    await asyncio.sleep(_WARM_S)
    await asyncio.to_thread(steadiness.begin)
    while True:
        await asyncio.to_thread(_take, steadiness)
        await asyncio.sleep(_SAMPLE_PERIOD_S)


def _take(steadiness: Steadiness) -> None:
    with contextlib.suppress(httpx.TransportError):
        steadiness.take(_metrics())


def _ingresses(url: str) -> list[dict[str, Any]]:
    """Return the status of each ingress on the port that answered."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(_STATUS_TRIES):
        with contextlib.suppress(ServiceError):
            status = Client(url, _KEY, timeout_s=5.0).status()
            found[status["answered_by"]] = status
            if len(found) == _INGRESSES:
                break
    return list(found.values())


def _settle(url: str) -> tuple[float, list[str]]:
    """Return the time until nothing was left, s, and what is still left after SETTLE_S."""
    since = time.monotonic()
    while True:
        reported = _ingresses(url)
        held = list(dict.fromkeys(what for status in reported for what in remains_of(status)))
        if len(reported) < _INGRESSES:
            held.append(f"{len(reported)} of {_INGRESSES} ingresses answer")
        took_s = time.monotonic() - since
        if not held or took_s > SETTLE_S:
            return took_s, held
        time.sleep(0.5)


async def _union(url: str, model: str) -> list[str]:
    """Check that the router holds exactly one lease for each stream of the ingresses; return what differs."""
    body = {
        "model": model, "prompt": "Once upon a time", "max_tokens": _STREAM_TOKENS, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip

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
                reported = await asyncio.to_thread(_ingresses, url)
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


def _still_running(url: str) -> list[str]:
    """Return what `_running` finds; wait, since a new engine takes a while to report its metrics."""
    until = time.monotonic() + SETTLE_S
    while (wrong := _running(url)) and time.monotonic() < until:
        time.sleep(1.0)
    return wrong


def _running(url: str) -> list[str]:
    """Return live engines with running or waiting requests according to vLLM's metrics."""
    status = Client(url, _KEY).status()
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


def run_chaos(
    deployment: Path,
    prompts: list[workload.Prompt],
    faults: list[str],
    record: Record,
    *,
    seconds: float,
    every_s: float,
    in_flight: int,
    blocks: int,
    port: int,
    seed: int,
) -> None:
    """Start the application on its own cluster, drive it and stop it.

    Args:
        record: gets the events of the run.
        blocks: KV blocks of each engine.

    Raises:
        BadInput: the application does not start.
    """
    # Ray's default niceness of 15 would let other work on the machine slow the engines down.
    os.environ |= {"RAY_metrics_report_interval_ms": "1000", "RAY_worker_niceness": "0"}
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["engine_kwargs"] |= {"num_gpu_blocks_override": blocks, "max_model_len": 1024}
        arguments[role]["deployment_config"] |= {"health_check_period_s": 1}
    arguments["ingress_deployment_config"] |= {"num_replicas": _INGRESSES}
    model = arguments["decode_config"]["model_loading_config"]["model_id"]
    asked = bodies(prompts, model, _PROMPTS, seed)
    console, began_s = Console(stderr=True, highlight=False), time.monotonic()

    def log(what: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.1f} s: {what}", markup=False, soft_wrap=True)

    application.check_port(port)
    try:
        service, _ = application.start(arguments, port, _KEY, dashboard=False, tell=log)
        record.add("run", seed=seed, seconds=seconds, every_s=every_s, in_flight=in_flight, faults=faults)
        load = drive(
            service, f"http://127.0.0.1:{port + 1}", arguments, asked, record,
            faults=faults, seconds=seconds, every_s=every_s, in_flight=in_flight, seed=seed, log=log,
        )  # fmt: skip
        asyncio.run(load)
    finally:
        for role in processes.ROLES:
            for process in processes.of(role):
                processes.go_on(process)
        application.stop()
