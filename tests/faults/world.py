"""The application of one simulated run: ingresses, a router and engines, each in a simulated process.

The code of the service is real:

- the ingress's HTTP application with admission, request path and warm-up,
- the router's actor with its state, policies and queue, and the client that connects an ingress to it,
- the servers around the engines, and both ends of every channel between these processes.

Four things are fake, and `patch_serving_code` puts them into the modules of the service:

- Ray starts no processes. `World` starts them, tells ingresses which replicas there are, and replaces those
  that die. Calls of actors go through `fake_ray.Remote`.
- vLLM's engines are `fake_engines`, which have no model and detect every wrong KV block.
- HTTP has no bytes: `clients` call the ingress's ASGI application.
- The clock, random numbers and the network are those of the run: `virtual_time`, `virtual_network`.

The seed decides the settings of a world: the policy, the number of KV blocks, whether decode engines prefill
too, whether clients need keys, and how long everything takes. `World.kill`, `stop` and `drain` inject faults;
`schedule` decides when.
"""

import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from eldr_serve.channel import calls as channel_calls
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.fleet.kv_usage import KvUsage
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.ingress import deployment as ingress
from eldr_serve.ingress import http_application
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.limits import tenants
from eldr_serve.monitoring import loop_watch
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.replicas import decode_reporter, engine_watch, servers
from eldr_serve.router import actor as decode_router
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router.state import RouterState
from eldr_serve.router_protocol.messages import LiveSettings
from tests.faults.fake_engines import BlockEngine, DecodeEngine, PrefillEngine
from tests.faults.fake_ray import (
    FakePromptTokenizer,
    NoMetrics,
    Remote,
    predictor,
    read_fake_keys,
    start_channel_server_without_ray,
    table,
)
from tests.faults.greedy_model import MODEL
from tests.faults.virtual_network import Network
from tests.faults.virtual_time import Process, VirtualLoop, current

ADMIN_KEY = "key"
LEASE_S = 12.0  # lease of a prompt's KV blocks
INGRESS_TIMEOUT_S = 6.0  # time until the leases of an ingress without a channel are released
CALL_S = 10.0
QUEUE_S = 5.0
WAIT_S = 2.0  # maximum wait of a tenant's request for admission
RETRIES_AT_ONCE = (2, 64)
LONG_DOWNTIME_S = 12.0  # occasional downtime of the router, in which no request may wait for it
_MAX_UNREAD_BYTES = 40_000  # bytes of an unread stream, more than 4 s of tokens
SLOTS = (1, 2, 64)  # slots of a decode engine under a policy with a decode queue, few so that requests wait
POLICIES = ("round-robin", "marginal-cost", "balance-band", "locality-band")
ROLES = ("prefill", "decode", "router", "ingress")


class _Ingress(ingress.EldrIngress):
    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: Serve's method is asynchronous, and only Serve awaits it."""


class World:
    """All processes of the application. It also does Ray's work of starting and replacing them.

    Args:
        rng: draws everything that the seed decides.

    Attributes:
        engines: fake engines by the name of their process, including dead ones.
        servers: the real servers around the engines, by the same names.
        live: processes of each role that run or are stopped.
        replicas: metadata of the replicas that Serve announces, by role and name of the process.
        directories: the directories of each ingress, by role.
        killed: processes that a fault has killed.
        target_numbers: processes of each role. A dead one is replaced.
        has_whole_replicas: decode engines prefill too, and there are no prefill engines.
        has_keys: clients send their tenant's key.
        gcs_until_s: time at which an outage of Ray's GCS ends.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.network: Network = loop.network
        self.engines: dict[str, BlockEngine] = {}
        self.servers: dict[str, servers.EngineServer] = {}
        self.live: dict[str, list[Process]] = {role: [] for role in ROLES}
        self.replicas: dict[str, dict[str, dict[str, Any]]] = {"prefill": {}, "decode": {}}
        self.directories: dict[Process, dict[str, ReplicaDirectory]] = {}
        self.killed: set[Process] = set()
        self.target_numbers: dict[str, int] = {}
        self.gcs_until_s = 0.0
        self.prefill_blocks = rng.choice([12, 24, 48])
        self.decode_blocks = rng.choice([192, 256, 384])
        self._numbers = dict.fromkeys(ROLES, 0)
        self.has_whole_replicas, self.has_keys = rng.random() < 0.25, rng.random() < 0.5
        self.retries_at_once = rng.choice(RETRIES_AT_ONCE)
        predicts = self.has_whole_replicas and rng.random() < 0.7
        policy, self._slots = rng.choice(POLICIES), rng.choice(SLOTS)
        self.settings = RouterSettings(
            model_id=MODEL,
            policy=policy,
            parameters=self.parameters(policy),
            table=table(3).to_bytes(),
            predictor=predictor().to_bytes() if predicts else None,
            ingress_timeout_s=INGRESS_TIMEOUT_S,
        )

    def parameters(self, policy: str) -> dict[str, Any]:
        """Return the policy's parameters in this world."""
        return {"slots": self._slots} if policy == "balance-band" else {}

    # -- starting ----------------------------------------------------------------------------------

    async def start(self, *, prefills: int, decodes: int, ingresses: int) -> None:
        """Start all processes and the virtual threads."""
        prefills = 0 if self.has_whole_replicas else prefills
        self.target_numbers = {"router": 1, "prefill": prefills, "decode": decodes, "ingress": ingresses}
        for role, number in self.target_numbers.items():
            for _ in range(number):
                self.start_one(role)
        self.loop.thread_s = self._thread_s

    def _thread_s(self) -> float:
        """Draw the time of a call in a thread. Such calls are Ray's, and wait for GCS."""
        return max(self.gcs_until_s - self.loop.time(), 0) + self.rng.uniform(0.0001, 0.005)

    def start_one(self, role: str) -> None:
        """Start another process of the role."""
        self._numbers[role] += 1
        process = self.loop.process(f"{role}-{self._numbers[role]}")
        self.live[role].append(process)
        if role == "ingress":
            self.directories[process] = {}
            process.run(self._start_ingress, process)
        elif role == "router":
            process.run(self._start_router, process)
        else:
            process.run(self.loop.create_task, self._start_engine(role, process))

    async def _start_engine(self, role: str, process: Process) -> None:
        shared: dict[str, Any] = {"process": process, "time_s": self.time_s, "lease_s": LEASE_S}

        async def prefill(config: Any) -> PrefillEngine:
            return PrefillEngine(blocks=self.prefill_blocks, **shared)

        async def decode(config: Any) -> DecodeEngine:
            return DecodeEngine(blocks=self.decode_blocks, peers=self.engines, **shared)

        config: Any = SimpleNamespace(deployment_config={})
        server: servers.EngineServer
        if role == "prefill":
            server = servers.PrefillServer.__new__(servers.PrefillServer)
            await server.__init__(config, start_engine=prefill, stall_timeout_s=CALL_S)  # type: ignore[misc]
        else:
            server = servers.DecodeServer.__new__(servers.DecodeServer)
            await server.__init__(  # type: ignore[misc]
                config, start_engine=decode, router_name="router", stall_timeout_s=CALL_S
            )
        process.servable_object = server
        self.engines[process.name] = server._engine  # type: ignore[assignment]
        self.servers[process.name] = server
        self.replicas[role][process.name] = await server.record_replica_metadata()
        self._publish(role)

    def _start_router(self, process: Process) -> None:
        process.servable_object = DecodeRouter(self.settings)

    def _start_ingress(self, process: Process) -> None:
        handle: Any = SimpleNamespace(check_health=Remote(lambda: process, _report_healthy))
        process.servable_object = deployment = _Ingress(
            prefill=None if self.has_whole_replicas else handle,
            decode=handle,
            model_cards=[{"id": MODEL, "object": "model"}],
            openapi={},
            application="world",
            tokenizer="/nowhere",
            router_settings=self.settings,
            options=IngressOptions(
                max_in_flight=self.rng.choice([6, 64]),
                max_wait_s=WAIT_S,
                keys_file=Path("/nowhere/keys.json") if self.has_keys else None,
            ),
            path_options=PathOptions(
                kv_lease_s=LEASE_S,
                queue_timeout_s=QUEUE_S,
                prefill_timeout_s=CALL_S,
                first_token_timeout_s=CALL_S,
                next_token_timeout_s=CALL_S,
                retries_at_once=self.retries_at_once,
            ),
            prefill_options=PrefillRouterOptions(),
            admin_key_sha256=sha256(ADMIN_KEY.encode()).hexdigest(),
        )
        for role in ("prefill", "decode"):
            self._publish(role)
        self.loop.create_task(deployment.check_health())

    # -- what Ray does -----------------------------------------------------------------------------

    def get_directory(self, name: str) -> ReplicaDirectory:
        """Return the current process's directory of a deployment."""
        role = name.rpartition("/")[2]
        directory = ReplicaDirectory()
        directory.kv_usage = KvUsage(clock=self.loop.time)
        return self.directories[current()].setdefault(role, directory)

    def router(self) -> Process | None:
        """Return the actor's process, if it lives."""
        return self.live["router"][0] if self.live["router"] else None

    def _publish(self, role: str) -> None:
        """Send the replicas to every ingress, as Serve does."""

        def publish(directory: ReplicaDirectory) -> None:
            directory.publish(dict(self.replicas[role]))  # the newest state at delivery

        for process, directories in self.directories.items():
            if role in directories:
                after_s = max(self.gcs_until_s - self.loop.time(), 0) + self.rng.uniform(0.001, 0.1)
                process.soon(publish, directories[role], after_s=after_s)

    def time_s(self, mean_s: float) -> float:
        """Draw the time of a piece of work."""
        return mean_s * self.rng.uniform(0.5, 1.5)

    # -- faults ------------------------------------------------------------------------------------

    def kill(self, process: Process, *, silently: bool = False) -> None:
        """Kill the process with SIGKILL, or with its machine. Another one starts after a while."""
        if not process.alive:
            return
        role = process.name.partition("-")[0]
        self.killed.add(process)
        self.loop.kill(process)
        self.network.kill(process, silently=silently)
        self._remove(role, process)
        if process in self.directories:
            del self.directories[process]
        downtime_s = self.rng.uniform(0.3, 3)
        if role == "router" and self.rng.random() < 0.3:
            downtime_s += LONG_DOWNTIME_S
        self.loop.processes[0].soon(self.start_one, role, after_s=downtime_s)

    def _remove(self, role: str, process: Process) -> None:
        if process in self.live[role]:
            self.live[role].remove(process)
        if role in self.replicas:
            self.replicas[role].pop(process.name, None)
            self.loop.processes[0].soon(self._publish, role, after_s=self.rng.uniform(0, 1.5))

    def stop(self, process: Process, seconds: float) -> None:
        """Send SIGSTOP, and SIGCONT after `seconds`."""
        if process.alive and not process.stopped:
            self.loop.stop_process(process)
            self.loop.processes[0].soon(self.loop.go_on, process, after_s=seconds)

    def drain(self, process: Process) -> None:
        """Drain the engine as Serve does: it takes no further call, completes its calls, and is replaced."""
        role = process.name.partition("-")[0]
        server = self.servers.get(process.name)
        if server is None or not process.alive or process not in self.live[role]:
            return
        self._remove(role, process)

        async def leave() -> None:
            await server.shut_down()
            # The harness ends the process, which could not run its own end.
            process.soon(self.loop.processes[0].soon, self._end, process, after_s=0.01)

        process.run(self.loop.create_task, leave())
        self.loop.processes[0].soon(self.start_one, role, after_s=self.rng.uniform(0, 2))

    def _end(self, process: Process) -> None:
        self.loop.kill(process)
        self.network.kill(process)


async def _report_healthy(process: Process) -> None:
    """Do nothing, as the health check of a healthy replica does."""


async def _router_address(process: Process) -> Any:
    return await process.servable_object.address()


async def _configure(process: Process, settings: RouterSettings, live: LiveSettings | None) -> None:
    await process.servable_object.configure(settings, live)


async def _observe_steps(process: Process, *args: Any) -> Any:
    return await process.servable_object.observe_steps(*args)


@contextmanager
def patch_serving_code(loop: VirtualLoop, world: World, rng: random.Random) -> Iterator[None]:
    """Let the serving code use this world's Ray, clocks and random numbers within the block.

    An event loop that looks something up in Ray's GCS, outside of a thread, is recorded as an error.
    """

    def connect(name: str, settings: RouterSettings) -> Any:
        require_thread()
        return SimpleNamespace(
            address=Remote(world.router, _router_address), configure=Remote(world.router, _configure)
        )

    def require_thread() -> None:
        if not loop.in_thread:
            loop.errors.append(f"the event loop of {current()} waits for GCS")

    def find(name: str) -> Any:
        require_thread()
        if world.router() is None:
            raise ValueError("the actor is unreachable")
        return SimpleNamespace(observe_steps=Remote(world.router, _observe_steps))

    def context() -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id=current().name))

    state_of_random = random.getstate()
    random.seed(rng.random())
    with ExitStack() as patches:
        for owner, name, substitute in (
            (ingress, "connect", connect),
            (ingress, "get_directory", world.get_directory),
            (http_application, "serve", SimpleNamespace(get_replica_context=current)),
            (ingress, "PromptTokenizer", FakePromptTokenizer),
            (tenants, "read_keys", read_fake_keys),
            (tenants, "_stamp", lambda path: 0),
            (decode_reporter, "find_actor", find),
            (decode_reporter, "serve", SimpleNamespace(get_replica_context=context)),
            (decode_router, "start_channel_server", start_channel_server_without_ray),
            (servers, "start_channel_server", start_channel_server_without_ray),
            (decode_router, "RouterMetrics", NoMetrics),
            (ingress, "IngressMetrics", NoMetrics),
            (loop_watch, "LoopMetrics", NoMetrics),
            (engine_watch, "ReplicaMetrics", NoMetrics),
            (channel_calls, "MAX_UNREAD_BYTES", _MAX_UNREAD_BYTES),
            (uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4)),
        ):
            patches.enter_context(patch.object(owner, name, substitute))
        patches.enter_context(patch("time.monotonic", loop.time))
        patches.enter_context(patch("time.time_ns", lambda: int(1e9 * loop.time())))
        for init in (RouterState.__init__, OutlierDetector.__init__):
            patches.enter_context(patch.dict(init.__kwdefaults__, clock=loop.time))
        for function in (tenants.Tenants.__init__, tenants.SharedLimits.__init__):
            patches.enter_context(patch.object(function, "__defaults__", (loop.time,)))
        try:
            yield
        finally:
            random.setstate(state_of_random)
