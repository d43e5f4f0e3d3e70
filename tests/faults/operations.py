"""Faults of the whole application, which runs on Ray with real engines, and the recovery from each.

`FaultInjector` injects the faults of a run in turn. A fault kills a process by SIGKILL, stops it by SIGSTOP
for some seconds, or is an operation such as a change of policy. After each fault the injector waits until the
application is complete again: as many processes run and listen as before, all engines are warm, and Serve's
proxy answers.

Most requests must survive every fault. `explained_by_fault` recognises the few that cannot, such as those on
a connection that the killed ingress itself held. A random generator chooses the order of the faults and the
processes. Unlike a simulated run, a run of the whole application is not repeatable.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eldr_serve.commands.client import OperatorClient, ServiceError
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import SignatureSpec
from loadgen import application, processes
from tests.faults.record import Record
from tests.faults.steadiness import Steadiness
from tests.faults.traffic import Sent

ADMIN_KEY = "chaos"
STOP_S, GCS_S = 5.0, 8.0
POLICIES = ("round-robin", "balance-band", "locality-band", "marginal-cost")
_KILLED = ("prefill", "decode", "router", "ingress", "proxy", "controller")
_STOPPED = ("prefill", "decode", "router", "ingress")
FAULTS = (
    *(f"kill {role}" for role in _KILLED),
    *(f"stop {role}" for role in _STOPPED),
    "stop gcs",
    "swap table",
    "change policy",
    "redeploy",
)
# Further roles whose processes a fault removes. No fault is injected into them until the service recovers.
_FURTHER_ROLES = {"redeploy": ("prefill", "decode", "ingress")}
_RECOVERY_S = 240.0  # an engine takes over a minute to start on few cores
_DISCONNECTED = ("not connected", "connection lost", "cut")  # outcomes of a request whose server has died
_PROXY_LAG_S = 3.0  # time until Serve's proxy has reported to its client that the ingress died


@dataclass
class InjectedFault:
    """A fault that was injected into the application.

    Attributes:
        fault: one of FAULTS.
        at_s: time at which it was injected.
        recovery_s: seconds until the application had recovered; None if that took too long.
        client_ports: client ports of the connections that the killed process held.
        died_s: time at which the killed process was dead. Until then it may have accepted connections.
    """

    fault: str
    at_s: float
    recovery_s: float | None = None
    client_ports: set[int] = field(default_factory=set)
    died_s: float = 0.0


@dataclass
class Run:
    """Record of a run. Times are of time.monotonic().

    Attributes:
        record: file of the events.
        faults: injected faults, in order.
        sent: number of requests that have ended.
        counters: sums of the router's counters over all its restarts, and of operations that were refused.
        steadiness: measurements of the processes.
        proxies: number of Serve's proxies, which share a port.
    """

    record: Record
    faults: list[InjectedFault] = field(default_factory=list)
    sent: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    steadiness: Steadiness = field(default_factory=Steadiness)
    proxies: int = 1

    @property
    def stops(self) -> Counter[str]:
        """Return how often a process of each role was stopped."""
        return Counter(one.fault.split()[-1] for one in self.faults if one.fault.startswith("stop"))

    def record_request(self, sent: Sent) -> None:
        """Record a request that has ended."""
        self.sent += 1
        before = [injected for injected in self.faults if injected.at_s <= sent.ended_s]
        self.record.add(
            "sent",
            fault=before[-1].fault if before else None,
            kind=explained_by_fault(sent, before, self.proxies) or sent.kind,
            detail=sent.detail[:300],
            stream=sent.stream,
            by_proxy=sent.by_proxy,
            seconds=round(sent.ended_s - sent.start_s, 3),
            silence_s=round(sent.silence_s, 3),
            gap_s=round(sent.gap_s, 3),
        )

    def record_recovery(self, injected: InjectedFault) -> None:
        """Record the recovery from a fault, or that it took too long."""
        seconds = injected.recovery_s
        self.record.add("fault", fault=injected.fault, recovery_s=seconds and round(seconds, 2))


def explained_by_fault(sent: Sent, faults: list[InjectedFault], proxies: int = 1) -> str | None:
    """Return which kind in `record.APART` a failed request is; None if no fault explains it.

    Args:
        sent: a request that has ended.
        faults: the faults before its end, in order.
        proxies: number of Serve's proxies. With several, one always listens at their port.
    """
    kills = [injected for injected in faults if injected.fault in ("kill ingress", "kill proxy")]
    for injected in reversed(kills):
        under_way = sent.start_s <= max(injected.died_s, injected.at_s) and sent.ended_s >= injected.at_s
        # During a kill the client does not read its clock: it may have connected earlier than recorded.
        connected_during_kill = sent.start_s <= injected.died_s and injected.at_s <= sent.connected_s
        is_own_connection = sent.port in injected.client_ports or (
            connected_during_kill and sent.by_proxy == (injected.fault == "kill proxy")
        )
        if under_way and sent.kind in _DISCONNECTED and is_own_connection:
            return "own_connection"
        is_behind_proxy = sent.by_proxy and injected.fault == "kill ingress"
        failed = sent.kind in _DISCONNECTED or sent.kind == "http 500"
        if is_behind_proxy and failed and under_way and sent.ended_s <= injected.at_s + _PROXY_LAG_S:
            return "behind_proxy"
        downtime_s = injected.recovery_s or _RECOVERY_S
        if (
            proxies == 1
            and injected.fault == "kill proxy"
            and sent.by_proxy
            and sent.kind == "not connected"
            and sent.ended_s <= injected.at_s + downtime_s
        ):
            return "nobody_listened"
    return None


def affected_roles(fault: str) -> tuple[str, ...]:
    """Return the roles whose processes a fault may remove, and the name of an operation."""
    return (fault.split()[-1], *_FURTHER_ROLES.get(fault, ()))


class FaultInjector:
    """Injector of faults, which also waits for the recovery from each.

    Args:
        arguments: arguments of the application, used to redeploy it.
        log: called with a line about each fault and recovery.
        listeners: how many processes listen at each port of the complete application.
    """

    def __init__(
        self,
        service: OperatorClient,
        proxy_url: str,
        arguments: dict[str, Any],
        run: Run,
        rng: random.Random,
        log: Callable[[str], None],
        listeners: Mapping[int, int] | None = None,
    ) -> None:
        self._service, self._proxy_url, self._arguments = service, proxy_url, arguments
        self._listeners = listeners or {}
        self._decodes = arguments["decode_config"]["deployment_config"]["num_replicas"]
        self._model = arguments["decode_config"]["model_loading_config"]["model_id"]
        self._run, self._rng, self._log = run, rng, log
        self._recovering: dict[asyncio.Task[None], tuple[str, ...]] = {}  # roles of each fault
        self._shape: tuple[int, int] = (1, 1)  # layers and experts of the model
        self._epoch, self._last_counters = "", Counter[str]()  # epoch and counters of the router's actor

    async def wait_until_complete(self) -> None:
        """Wait until the application is complete for the first time."""
        while not await asyncio.to_thread(self._is_complete):
            await asyncio.sleep(0.5)

    async def inject_faults(self, faults: list[str], every_s: float, until_s: float) -> None:
        """Inject a fault every `every_s` seconds until `until_s`, each kind in turn.

        A role gets no fault before it has recovered from its last one.
        """
        self._shape = await asyncio.to_thread(self._read_shape)
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
        injected = InjectedFault(fault, time.monotonic())
        self._run.faults.append(injected)
        self._log(fault)
        verb, _, what = fault.partition(" ")
        before = {process.pid for process in processes.find_role(what)} if what in processes.ROLES else set()
        victims = processes.find_role(what) if verb in ("kill", "stop") else []
        if verb in ("kill", "stop") and not victims:
            self._log(f"{fault}: there is no such process")
            self._run.counters[f"no process to {fault}"] += 1
            self._run.faults.remove(injected)
            return
        if verb == "kill":
            # The oldest proxy, so that each proxy is killed in turn.
            victim = victims[0] if what == "proxy" else self._rng.choice(victims)
            injected.client_ports = processes.kill(victim)
            injected.died_s = time.monotonic()
        elif verb == "stop":
            victim = self._rng.choice(victims)
            processes.stop(victim)
            seconds = GCS_S if what == "gcs" else STOP_S
            asyncio.get_running_loop().call_later(seconds, processes.resume, victim)
        else:
            await self._try_operation(_OPERATIONS[fault])
        task = asyncio.create_task(self._recover(injected, len(before)))
        self._recovering[task] = affected_roles(fault)
        task.add_done_callback(self._recovering.pop)

    async def _try_operation(self, operation: Callable[[FaultInjector], None]) -> None:
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

    def _read_shape(self) -> tuple[int, int]:
        """Return the numbers of layers and of experts of the served model."""
        source = self._arguments["decode_config"]["model_loading_config"]["model_source"]
        fields = json.loads((Path(source) / "config.json").read_text())
        return fields["num_hidden_layers"], fields["num_local_experts"]

    async def _recover(self, injected: InjectedFault, number: int) -> None:
        """Wait until there are as many processes as before and the service is complete."""
        role = injected.fault.split()[-1]
        while time.monotonic() - injected.at_s < _RECOVERY_S:
            await asyncio.sleep(0.25)
            if role in processes.ROLES and len(processes.find_role(role)) < number:
                continue
            if await asyncio.to_thread(self._is_complete):
                injected.recovery_s = time.monotonic() - injected.at_s
                self._log(f"{injected.fault}: recovered after {injected.recovery_s:.1f} s")
                self._run.record_recovery(injected)
                return
        self._run.record_recovery(injected)
        self._log(f"{injected.fault}: no recovery within {_RECOVERY_S:g} s")

    def _is_complete(self) -> bool:
        try:
            status = OperatorClient(self._service.url, ADMIN_KEY, timeout_s=3.0).status()
            by_proxy = httpx.get(f"{self._proxy_url}/v1/models", timeout=3.0).status_code
        except (ServiceError, httpx.TransportError):
            return False
        warm = status["ingress"]["all_warm"] and not status["ingress"]["router_unreachable"]
        served = warm and by_proxy == 200 and len(status.get("workers", ())) == self._decodes
        try:
            if not (served and application.all_replicas_running()):
                return False
        except (RayError, RayServeException, ConnectionError, TimeoutError):  # no controller
            return False
        listening = processes.listeners()
        return all(listening[port] >= number for port, number in self._listeners.items())

    async def _count(self) -> None:
        """Add up the router's counters until cancelled. Each new actor begins at 0."""
        while True:
            await asyncio.sleep(1.0)
            try:
                status = await asyncio.to_thread(self._service.status)
            except ServiceError:
                continue
            if "counters" in status:
                if status["epoch"] != self._epoch:
                    self._epoch, self._last_counters = status["epoch"], Counter()
                counters = Counter(status["counters"])
                self._run.counters.update(counters - self._last_counters)
                self._last_counters = counters


_OPERATIONS: dict[str, Callable[[FaultInjector], None]] = {
    "change policy": FaultInjector._change_policy,
    "swap table": FaultInjector._swap_table,
    "redeploy": FaultInjector._redeploy,
}
