"""The whole application under load, with its processes killed and stopped, one after the other.

Clients stream, ask for whole answers and leave, so many at a time; each text is compared with what the same
prompt gave before the first fault.
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

from eldr_serve.artifacts import RoutingTable
from eldr_serve.client import Client, ServiceError
from eldr_serve.signature import SignatureSpec
from loadgen import application, workload
from loadgen.faults import processes
from loadgen.faults.steadiness import Steadiness
from loadgen.remains import remains, settle

STOP_S, GCS_S = 5.0, 8.0
HANG_S = 15.0  # a request that hears nothing for so long hangs
_PATIENCE_S = 90.0
_RECOVERY_S = 120.0
_PROMPTS = 16
_LOOKS = 8
_WARM_S, _LOOK_PERIOD_S = 20.0, 5.0  # of load until processes are warm, and between looks at their loops
_RUNNING = ("ray_vllm_num_requests_running", "ray_vllm_num_requests_waiting")
_KEY = "chaos"
POLICIES = ("round-robin", "balance-band", "locality-band", "marginal-cost")
KILLED = ("prefill", "decode", "router", "ingress", "proxy", "controller")
STOPPED = ("prefill", "decode", "router", "ingress")
FAULTS = (
    *(f"kill {role}" for role in KILLED),
    *(f"stop {role}" for role in STOPPED),
    "stop gcs", "swap table", "change policy", "redeploy",
)  # fmt: skip
NOTES = (
    "requests are counted with the fault before their end; own_connection: those whose connection a killed "
    "proxy or ingress held itself; gap: between two chunks of a stream; recovery: until as many processes as "
    "before are there, all pairs of engines are warm and the proxy answers; processes: growth from 20 s of "
    "load to the end, of the process that grew most; stalls: event loops that stood still for 0.5 s, also "
    "because their process was stopped"
)
OWN_CONNECTION = ("not connected", "connection lost")  # what a killed proxy or ingress held itself


@dataclass(frozen=True)
class Prompt:
    """A request's body without `stream`, and its greedy answer."""

    body: dict[str, Any]
    text: str


@dataclass
class Sent:
    """A request that has ended.

    Attributes:
        kind: "ok", "left", "wrong text", "engine lost", "http STATUS", "not connected", "connection lost",
            "cut" (an answer without its end), or "never ended".
        silence_s: the longest time without a byte, from its sending on.
        gap_s: the longest time between two chunks of a stream.
    """

    began_s: float
    stream: bool
    by_proxy: bool
    kind: str = ""
    detail: str = ""
    ended_s: float = 0.0
    silence_s: float = 0.0
    gap_s: float = 0.0


@dataclass
class Happened:
    """A fault, and how long after it all was well again, s; None if that took too long."""

    fault: str
    at_s: float
    recovery_s: float | None = None


@dataclass
class Run:
    """What came of it all; times are of time.monotonic()."""

    sent: list[Sent] = field(default_factory=list)
    faults: list[Happened] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    left_behind: list[str] = field(default_factory=list)
    steadiness: Steadiness = field(default_factory=Steadiness)

    @property
    def stops(self) -> Counter[str]:
        """How often a process of each role was stopped."""
        return Counter(h.fault.split()[-1] for h in self.faults if h.fault.startswith("stop"))


class Load:
    """Clients that ask one request after the other.

    Args:
        urls: of the ingress itself and of Serve's proxy.
    """

    def __init__(self, urls: tuple[str, str], prompts: list[Prompt], run: Run, rng: random.Random) -> None:
        self._urls = urls
        self._prompts = prompts
        self._run = run
        self._rng = rng

    async def client(self, until_s: float) -> None:
        """One client, until then."""
        while time.monotonic() < until_s:
            sent = await self._one()
            self._run.sent.append(sent)
            if sent.kind in ("not connected", "http 503", "http 429"):
                await asyncio.sleep(self._rng.uniform(0.2, 0.6))  # as a client would

    async def _one(self) -> Sent:
        prompt, by_proxy = self._rng.choice(self._prompts), self._rng.random() < 0.25
        sent = Sent(time.monotonic(), stream=self._rng.random() < 0.6, by_proxy=by_proxy)
        leaves_s = self._rng.uniform(0.05, 1.0) if self._rng.random() < 0.15 else None
        body = prompt.body | {"stream": sent.stream}
        received = bytearray()
        try:
            async with asyncio.timeout(_PATIENCE_S if leaves_s is None else leaves_s):
                # A connection each: the kernel spreads connections over ingress replicas.
                async with (
                    httpx.AsyncClient(timeout=None) as http,
                    http.stream("POST", f"{self._urls[by_proxy]}/v1/completions", json=body) as answer,
                ):
                    heard_s = sent.began_s
                    async for chunk in answer.aiter_bytes():
                        now = time.monotonic()
                        sent.silence_s = max(sent.silence_s, now - heard_s)
                        if received:
                            sent.gap_s = max(sent.gap_s, now - heard_s)
                        heard_s = now
                        received += chunk
            judge(sent, answer.status_code, bytes(received), prompt.text)
        except TimeoutError:
            sent.kind = "never ended" if leaves_s is None else "left"
            if sent.stream and leaves_s is not None:
                judge(sent, 200, bytes(received), prompt.text, whole=False)
        except httpx.ConnectError as error:
            sent.kind, sent.detail = "not connected", repr(error)
        except httpx.TransportError as error:
            sent.kind, sent.detail = "connection lost", repr(error)
            if sent.stream:
                judge(sent, 200, bytes(received), prompt.text, whole=False)
        sent.ended_s = time.monotonic()
        return sent


def judge(sent: Sent, status: int, body: bytes, text: str, *, whole: bool = True) -> None:
    """Set the kind, where the answer itself decides it.

    Args:
        whole: the answer has ended by itself; else it is only looked at for wrong text.
    """
    if status != 200:
        sent.kind, sent.detail = f"http {status}", body[:200].decode(errors="replace")
        return
    said, done, error = read_events(body) if sent.stream else (_whole_text(body), True, "")
    if said is None or not text.startswith(said) or (whole and done and not error and said != text):
        sent.kind, sent.detail = "wrong text", f"{said!r} in place of {text!r}"
    elif error:
        sent.kind, sent.detail = "engine lost", error
    elif whole:
        sent.kind = "ok" if done else "cut"


def read_events(body: bytes) -> tuple[str, bool, str]:
    """The text of a stream, whether it has its end, and the error in it."""
    text, done, error = "", False, ""
    for event in body.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True
            continue
        fields = json.loads(data)
        if "error" in fields:
            error = fields["error"]["message"]
        for choice in fields.get("choices", []):
            text += choice["text"]
    return text, done, error


def _whole_text(body: bytes) -> str | None:
    try:
        text: str = json.loads(body)["choices"][0]["text"]
    except (ValueError, KeyError, IndexError):
        return None
    return text


async def references(url: str, bodies: list[dict[str, Any]]) -> list[Prompt]:
    """What each prompt's greedy answer is while nothing fails."""
    found = []
    async with httpx.AsyncClient(timeout=120) as http:
        for body in bodies:
            answer = await http.post(f"{url}/v1/completions", json=body)
            found.append(Prompt(body, answer.raise_for_status().json()["choices"][0]["text"]))
    return found


class Operator:
    """Who lets faults happen, and watches how the application gets over them.

    Args:
        arguments: of the application, for a new deployment of it.
        tell: told of each fault and recovery.
    """

    def __init__(
        self,
        service: Client,
        proxy_url: str,
        arguments: dict[str, Any],
        run: Run,
        rng: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._service = service
        self._proxy_url = proxy_url
        self._arguments = arguments
        self._decodes = arguments["decode_config"]["deployment_config"]["num_replicas"]
        self._model = arguments["decode_config"]["model_loading_config"]["model_id"]
        self._run = run
        self._rng = rng
        self._recovering: dict[str, asyncio.Task[None]] = {}
        self._shape: tuple[int, int] = (1, 1)
        self._epoch, self._seen = "", Counter[str]()

    async def work(self, faults: list[str], every_s: float, until_s: float) -> None:
        """A fault every so often, each kind in turn; none for a role that has not got over its last."""
        self._shape = await asyncio.to_thread(self._signature_shape)
        due: list[str] = []
        counting = asyncio.create_task(self._count())
        while time.monotonic() + every_s < until_s:
            if not due:
                due = self._rng.sample(faults, len(faults))
            role_free = [fault for fault in due if fault.split()[-1] not in self._recovering]
            if role_free:
                due.remove(role_free[0])
                await self._happen(role_free[0])
            await asyncio.sleep(every_s)
        await asyncio.gather(*self._recovering.values())
        await asyncio.sleep(1.5)
        counting.cancel()

    async def _happen(self, fault: str) -> None:
        happened = Happened(fault, time.monotonic())
        self._run.faults.append(happened)
        self._tell(fault)
        verb, _, what = fault.partition(" ")
        before = {process.pid for process in processes.of(what)} if what in processes.ROLES else set()
        there = processes.of(what) if verb in ("kill", "stop") else []
        if verb in ("kill", "stop") and not there:
            self._tell(f"{fault}: there is no such process")
            self._run.counters[f"nobody to {fault}"] += 1
            self._run.faults.remove(happened)
            return
        if verb == "kill":
            processes.kill(self._rng.choice(there))
        elif verb == "stop":
            victim = self._rng.choice(there)
            processes.stop(victim)
            seconds = GCS_S if what == "gcs" else STOP_S
            asyncio.get_running_loop().call_later(seconds, processes.go_on, victim)
        else:
            await self._tolerantly(_OPERATIONS[fault])
        task = asyncio.create_task(self._recover(happened, len(before)))
        self._recovering[what] = task
        task.add_done_callback(lambda _: self._recovering.pop(what, None))

    async def _tolerantly(self, operation: Callable[[Operator], None]) -> None:
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

    async def _recover(self, happened: Happened, number: int) -> None:
        """Wait until as many processes are there as before, and the service is whole."""
        role = happened.fault.split()[-1]
        while time.monotonic() - happened.at_s < _RECOVERY_S:
            await asyncio.sleep(0.25)
            if role in processes.ROLES and len(processes.of(role)) < number:
                continue
            if await asyncio.to_thread(self._whole):
                happened.recovery_s = time.monotonic() - happened.at_s
                self._tell(f"{happened.fault}: all is well after {happened.recovery_s:.1f} s")
                return
        self._tell(f"{happened.fault}: not got over within {_RECOVERY_S:g} s")

    def _whole(self) -> bool:
        try:
            status = Client(self._service.url, _KEY, timeout_s=3.0).status()
            by_proxy = httpx.get(f"{self._proxy_url}/v1/models", timeout=3.0).status_code
        except (ServiceError, httpx.TransportError):
            return False
        ready = status["ingress"]["ready"] and not status["ingress"]["router_away"]
        return ready and by_proxy == 200 and len(status.get("workers", ())) == self._decodes

    async def _count(self) -> None:
        """Sum up the router's counters, which begin anew with each actor."""
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


def rows(run: Run) -> list[dict[str, Any]]:
    """A row for each kind of fault, with the requests that ended between it and the next; and one for all."""
    times = [happened.at_s for happened in run.faults]
    found = []
    for kind in [None, *dict.fromkeys(happened.fault for happened in run.faults), ""]:
        if kind == "":
            sent, recoveries, number = run.sent, [h.recovery_s for h in run.faults], len(run.faults)
        else:
            mine = [i for i, h in enumerate(run.faults) if h.fault == kind]
            sent = [s for s in run.sent if _index(times, s.ended_s) in (mine if kind else [-1])]
            recoveries, number = [run.faults[i].recovery_s for i in mine], len(mine)
        found.append(_row({None: "before any", "": "all"}.get(kind, kind), number, sent, recoveries))
    found[-1] |= {"resumed": run.counters["resumed"], "left_behind": len(run.left_behind)}
    return found


def _index(times: list[float], at_s: float) -> int:
    """Of the last fault before; -1 for none."""
    return int(np.searchsorted(times, at_s, side="right")) - 1


def _row(fault: str | None, number: int, sent: list[Sent], recoveries: list[float | None]) -> dict[str, Any]:
    known = [seconds for seconds in recoveries if seconds is not None]
    kinds = Counter(s.kind for s in sent)
    silent = [s for s in sent if s.silence_s > HANG_S]
    return {
        "fault": fault,
        "times": number,
        "requests": len(sent),
        "ok": kinds.pop("ok", 0),
        "left": kinds.pop("left", 0),
        "own_connection": sum(kinds.pop(kind, 0) for kind in OWN_CONNECTION),
        "wrong_text": kinds.pop("wrong text", 0),
        "failed": sum(kinds.values()),
        "failures": dict(sorted(kinds.items())),
        "silent_over_15_s": len(silent),
        "longest_silence_s": max((s.silence_s for s in sent), default=0.0),
        "longest_gap_s": max((s.gap_s for s in sent if s.stream), default=0.0),
        "recovery_p50_s": float(np.median(known)) if known else None,
        "recovery_max_s": max(known, default=None),
        "not_recovered": len(recoveries) - len(known),
    }


async def drive(
    service: Client,
    proxy_url: str,
    arguments: dict[str, Any],
    bodies: list[dict[str, Any]],
    *,
    faults: list[str],
    seconds: float,
    every_s: float,
    in_flight: int,
    seed: int,
    tell: Callable[[str], None],
) -> Run:
    """The load and the faults; then what is left behind after some time."""
    rng, run = random.Random(seed), Run()
    tell("greedy answers without faults")
    prompts = await references(service.url, bodies)
    tell("load")
    load = Load((service.url, proxy_url), prompts, run, rng)
    until_s = time.monotonic() + seconds
    clients = [asyncio.create_task(load.client(until_s)) for _ in range(in_flight)]
    watching = asyncio.create_task(_watch(run.steadiness))
    await Operator(service, proxy_url, arguments, run, rng, tell).work(faults, every_s, until_s)
    await asyncio.gather(*clients)
    watching.cancel()
    tell("what is left")
    run.left_behind = await asyncio.to_thread(_settle, service.url, str(bodies[0]["model"]))
    await asyncio.to_thread(_take, run.steadiness)
    await asyncio.to_thread(run.steadiness.end)
    return run


async def _watch(steadiness: Steadiness) -> None:
    """Look at processes and their event loops now and then, until cancelled."""
    await asyncio.sleep(_WARM_S)
    await asyncio.to_thread(steadiness.begin)
    while True:
        await asyncio.to_thread(_take, steadiness)
        await asyncio.sleep(_LOOK_PERIOD_S)


def _take(steadiness: Steadiness) -> None:
    with contextlib.suppress(httpx.TransportError):
        steadiness.take(_metrics())


def _settle(url: str, model: str) -> list[str]:
    """What is wrong when all clients have gone; several looks, since each ingress shows its own part."""
    wrong = settle(url, model, _KEY)
    looks = [what for _ in range(_LOOKS) for what in remains(url, _KEY)]
    return [*dict.fromkeys([*wrong, *looks]), *_running(url)]


def _running(url: str) -> list[str]:
    """Live engines that run requests or have some waiting, as vLLM's metrics say."""
    status = Client(url, _KEY).status()
    if "workers" not in status:
        return ["the router is away, so nobody says which engines live"]
    live = {worker["replica"] for worker in status["workers"]} | set(status["ingress"]["prefill_kv_usage"])
    told, wrong = set(), []
    for family in text_string_to_metric_families(_metrics()):
        for sample in family.samples:
            replica = sample.labels.get("ReplicaId", "")
            if sample.name in _RUNNING and replica in live:
                told.add(replica)
                if sample.value:
                    wrong.append(f"{replica}: {sample.name} is {sample.value:g}")
    return wrong + [f"{replica} does not tell what it runs" for replica in sorted(live - told)]


def _metrics() -> str:
    """All that Ray's node exports."""
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text


def run_chaos(
    deployment: Path,
    prompts: list[workload.Prompt],
    faults: list[str],
    *,
    seconds: float,
    every_s: float,
    in_flight: int,
    blocks: int,
    port: int,
    seed: int,
) -> Run:
    """Start the application on a cluster of its own, drive it, and stop it.

    Args:
        blocks: KV blocks of each engine.

    Raises:
        BadInput: it does not start.
    """
    os.environ |= {"RAY_metrics_report_interval_ms": "1000"}
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["engine_kwargs"] |= {"num_gpu_blocks_override": blocks, "max_model_len": 1024}
        arguments[role]["deployment_config"] |= {"health_check_period_s": 1}
    arguments["ingress_deployment_config"] |= {"num_replicas": 2}
    model = arguments["decode_config"]["model_loading_config"]["model_id"]
    lengths = random.Random(seed)
    bodies = [
        {
            "model": model, "prompt": prompt.text[:600], "max_tokens": lengths.choice([8, 24, 64, 128]),
            "temperature": 0, "ignore_eos": True,
        }
        for prompt in workload.balanced_sample(prompts, _PROMPTS, seed)
    ]  # fmt: skip
    console, began_s = Console(stderr=True, highlight=False), time.monotonic()

    def tell(what: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.1f} s: {what}", markup=False, soft_wrap=True)

    application.check_port(port)
    try:
        service, _ = application.start(arguments, port, _KEY, dashboard=False, tell=tell)
        load = drive(
            service, f"http://127.0.0.1:{port + 1}", arguments, bodies,
            faults=faults, seconds=seconds, every_s=every_s, in_flight=in_flight, seed=seed, tell=tell,
        )  # fmt: skip
        return asyncio.run(load)
    finally:
        for role in processes.ROLES:
            for process in processes.of(role):
                processes.go_on(process)
        application.stop()
