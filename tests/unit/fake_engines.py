"""Prefill and decode engines that model who owns KV blocks, behind a Serve that loses replicas.

A block belongs to a prompt until the decode engine has read it, it is released, or its lease ends. From
then on it holds another prompt. A decode engine reads whatever is there and keeps it in its prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from one_path import prefilled
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.exceptions import RequestCancelledError
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
from router_talk import FakeActor, connected

from eldr_serve.engine.keys import REQUEST
from eldr_serve.serving.compat import CompletionRequest, ErrorResponse
from eldr_serve.serving.path import PathOptions, RequestPath
from eldr_serve.serving.replicas import Engines, ReplicaDirectory
from eldr_serve.serving.request_router import DecodeRequestRouter, PrefillRequestRouter
from eldr_serve.serving.servers import ReleaseKv

SOMEBODY_ELSES = "another prompt"
TOKENS = 4
INTERVALS = (
    "prefill-sent", "prefilling", "prefilled", "placing", "decode-routed", "decode-sent", "before-pull",
    "pulled", "first-token", "mid-stream", "last-token",
)  # fmt: skip
_BLOCKS = 12
_A_MOMENT_S = 0.001
_TO_CANCEL_S = 0.004  # how long it takes until an engine hears that a call was cancelled


@dataclass(eq=False)
class Engine:
    """One replica. Its `run` answers a call by `emit`, and says at each interval that it is there."""

    world: World
    name: str
    alive: bool = True


@dataclass(eq=False)
class PrefillEngine(Engine):
    free: deque[int] = field(default_factory=lambda: deque(range(_BLOCKS)))
    memory: list[str] = field(default_factory=lambda: [SOMEBODY_ELSES] * _BLOCKS)
    owned: dict[str, list[int]] = field(default_factory=dict)
    _computed: set[str] = field(default_factory=set)
    _abandoned: set[str] = field(default_factory=set)

    async def run(self, request: Any, emit: Callable[[Any], None]) -> None:
        name = request.kv_transfer_params[REQUEST]
        await self.world.reach("prefill-sent", self)
        blocks = self.owned[name] = [self.free.popleft() for _ in range(2)]
        for block in blocks:
            self.memory[block] = request.prompt
        try:
            await self.world.reach("prefilling", self)
        except asyncio.CancelledError:
            self.give_back(name)
            raise
        self._computed.add(name)
        if name in self._abandoned:
            self.give_back(name)
        await self.world.reach("prefilled", self)
        emit(prefilled(**self.handed_over(name, list(blocks))))

    def handed_over(self, name: str, blocks: list[int]) -> dict[str, Any]:
        where = {"remote_engine_id": self.name, "remote_request_id": name, "remote_block_ids": blocks}
        return {"do_remote_prefill": True, **where}

    def give_back(self, name: str) -> None:
        """The prompt's blocks are free and at once another prompt's; calling it again does nothing."""
        for block in self.owned.pop(name, []):
            self.memory[block] = SOMEBODY_ELSES
            self.free.append(block)

    def release(self, name: str) -> None:
        """Nobody will read the prompt, whether it has been computed or not."""
        self._abandoned.add(name)
        if name in self._computed:
            self.give_back(name)

    def end_leases(self) -> None:
        for name in list(self.owned):
            self.give_back(name)


@dataclass(eq=False)
class DecodeEngine(Engine):
    prefix_cache: dict[str, str] = field(default_factory=dict)

    async def run(self, request: Any, emit: Callable[[Any], None]) -> None:
        await self.world.reach("decode-sent", self)
        await self.world.reach("before-pull", self)
        try:
            text = self.read(request.prompt, request.kv_transfer_params or {})
        except ConnectionError as error:
            failed = {"message": f"{error}", "type": "engine", "code": 500}
            emit(f"data: {json.dumps({'error': failed})}" if request.stream else ErrorResponse(error=failed))
            return
        await self.world.reach("pulled", self)
        tokens = []
        for interval in ("first-token", *["mid-stream"] * (TOKENS - 2), "last-token"):
            tokens.append(f"{text} {len(tokens)}")
            if request.stream:
                emit(f"data: {tokens[-1]}")
            await self.world.reach(interval, self)
        if not request.stream:
            emit(SimpleNamespace(tokens=tokens, usage=None))

    def read(self, prompt: str, params: dict[str, Any]) -> str:
        """What the engine takes for the prompt; its prefix cache keeps full blocks, so not the last one."""
        if not params.get("do_remote_prefill"):
            return self._joined(prompt, prompt, prompt)
        owner = self.world.prefills.engines.get(params["remote_engine_id"])
        if owner is None:
            raise ConnectionError("the prefill engine does not answer")
        text = self._joined(prompt, *(owner.memory[block] for block in params["remote_block_ids"]))
        owner.give_back(params["remote_request_id"])
        return text

    def _joined(self, prompt: str, first: str, last: str) -> str:
        kept = self.prefix_cache.setdefault(prompt, first)
        return kept if kept == last else f"{kept}, {last}"


class Call:
    """A DeploymentResponseGenerator. Serve chooses a replica, and another if it loses the first unheard."""

    def __init__(self, deployment: Deployment, request: Any) -> None:
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._running = self._serving = asyncio.create_task(self._serve(deployment, request))

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            self._answers.put_nowait(StopAsyncIteration())  # whatever came, it was the last
            raise answer
        return answer

    def cancel(self) -> None:
        asyncio.get_running_loop().call_later(_TO_CANCEL_S, lambda: self._running.cancel())

    async def _serve(self, deployment: Deployment, request: Any) -> None:
        pending = PendingRequest([request], {}, SimpleNamespace(internal_request_id=uuid.uuid4().hex))
        world, end = deployment.world, None
        try:
            while end is None:
                engine = await deployment.choose(pending)
                lost, heard = world.contact(engine), asyncio.Event()

                def emit(answer: Any, lost: asyncio.Future[Exception] = lost, heard: Any = heard) -> None:
                    if not lost.done():
                        heard.set()
                        self._answers.put_nowait(answer)

                self._running = asyncio.create_task(engine.run(request, emit))
                await asyncio.wait([self._running, lost], return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    deployment.lose(engine, lost.result())
                    end = lost.result() if heard.is_set() or world.accepts_at_once else None
                else:
                    end = RequestCancelledError() if self._running.cancelled() else StopAsyncIteration()
        except asyncio.CancelledError:
            end = RequestCancelledError()
        self._answers.put_nowait(end)


class Deployment:
    """A DeploymentHandle over engines, with the real request router of its kind."""

    def __init__(self, world: World, kind: type[Engine], router: Any, name: str, replicas: int) -> None:
        self.world = world
        self._id = DeploymentID(name)
        self._kind = kind
        self._names = (f"{name[0]}{n}" for n in itertools.count())
        self.engines: dict[str, Any] = {}
        self.router = router(self._id, DeploymentHandleSource.UNKNOWN)
        self.router.initialize_state(directory_name=f"{name}-{uuid.uuid4().hex}")
        for _ in range(replicas):
            self.start()

    @property
    def directory(self) -> ReplicaDirectory:
        return self.router.directory

    def start(self) -> None:
        name = next(self._names)
        self.engines[name] = self._kind(self.world, name)
        self.directory.publish(self.engines)

    def options(self, **_: Any) -> Deployment:
        return self

    def __getattr__(self, method: str) -> Any:
        if method == "release_kv":
            return SimpleNamespace(remote=self._release)
        return self

    def remote(self, request: Any, raw_info: Any = None) -> Call:
        return Call(self, request)

    async def _release(self, release: ReleaseKv) -> None:
        await asyncio.sleep(0)
        for engine in self.engines.values():
            engine.release(release.request_id)

    async def choose(self, pending: PendingRequest) -> Any:
        if self._kind is DecodeEngine:
            await self.world.reach("decode-routed", None)
        candidates: list[RunningReplica] = [
            SimpleNamespace(replica_id=ReplicaID(name, self._id)) for name in self.engines
        ]
        ((replica,),) = await self.router.choose_replicas(candidates, pending)
        return self.engines[replica.replica_id.unique_id]

    def lose(self, engine: Engine, error: Exception) -> None:
        replica = ReplicaID(engine.name, self._id)
        if isinstance(error, ActorDiedError):
            self.router.on_replica_actor_died(replica)
        else:
            self.router.on_replica_actor_unavailable(replica)


class World:
    """The real path, client, router state and request routers over these engines.

    Args:
        faults: (interval, fault) in turn: each happens once, when a request reaches the interval next.
        accepts_at_once: Serve hears that a replica takes a call when it does; else with its first answer.
    """

    def __init__(self, faults: list[tuple[str, str]], *, accepts_at_once: bool = True) -> None:
        self.faults = list(faults)
        self.accepts_at_once = accepts_at_once
        self.happened: list[tuple[str, str]] = []
        self.prefills = Deployment(self, PrefillEngine, PrefillRequestRouter, "prefill", 2)
        self.decodes = Deployment(self, DecodeEngine, DecodeRequestRouter, "decode", 3)
        self.actor = FakeActor(policy="round-robin", table=None)
        self.asking: dict[str, asyncio.Task[list[str]]] = {}
        self._contacts: dict[str, list[asyncio.Future[Exception]]] = {}
        self._where: dict[str, str] = {}

    @asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[World]:
        async with connected(self.actor, *self.decodes.engines, directory=self.decodes.directory) as client:
            self.client = client
            directories = self.prefills.directory, self.decodes.directory
            engines = Engines(self.prefills, self.decodes, *directories)
            path_options = PathOptions(retry_backoff_s=0.001, **options)
            self.path = RequestPath(engines=engines, client=client, options=path_options)
            place = client.place

            async def slowly(*args: Any, **kwargs: Any) -> Any:
                await self.reach("placing", None)
                return await place(*args, **kwargs)

            client.place = slowly
            yield self

    async def ask(self, prompt: str, *, stream: bool) -> list[str]:
        """The tokens of the answer; raises what the path raises."""
        request = CompletionRequest(model="m", prompt=prompt, max_tokens=TOKENS, stream=stream)
        chunks = self.path.generate(request, "completions")
        answer: list[str] = []
        try:
            async for chunk in chunks:
                answer += [chunk.removeprefix("data: ")] if isinstance(chunk, str) else chunk.tokens
        finally:
            await chunks.aclose()
        return answer

    async def answers(self, prompts: list[str], *, stream: bool) -> list[Any]:
        self.asking = {p: asyncio.create_task(self.ask(p, stream=stream)) for p in prompts}
        return await asyncio.gather(*self.asking.values(), return_exceptions=True)

    # -- faults ------------------------------------------------------------------------------------

    def contact(self, engine: Engine) -> asyncio.Future[Exception]:
        """Done with the error when Serve loses the engine."""
        lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._contacts.setdefault(engine.name, []).append(lost)
        return lost

    async def reach(self, interval: str, engine: Engine | None) -> None:
        """A request is at `interval`, in `engine` or on its way there: the fault of this point happens."""
        for fault in [fault for at, fault in self.faults if at == interval][:1]:
            self.faults.remove((interval, fault))
            self.happened.append((interval, fault))
            self._happen(fault, engine)
        await asyncio.sleep(_A_MOMENT_S)
        if engine is not None and not engine.alive:
            raise asyncio.CancelledError

    def _happen(self, fault: str, engine: Engine | None) -> None:
        if fault == "client leaves":
            next(iter(self.asking.values())).cancel()
        elif fault == "decode unreachable" and isinstance(engine, DecodeEngine):
            self._break(engine.name, ActorUnavailableError("test", None))
        elif fault == "decode dies":
            self._kill(self.decodes, engine)
        elif fault == "prefill dies":
            owners = [owner for owner in self.prefills.engines.values() if owner.owned]
            self._kill(
                self.prefills, engine if isinstance(engine, PrefillEngine) else next(iter(owners), None)
            )

    def _kill(self, deployment: Deployment, victim: Engine | None) -> None:
        """Kill the engine, or any of the deployment if it is none of it; Serve starts another."""
        if victim is None or victim.name not in deployment.engines:
            victim = next(iter(deployment.engines.values()))
        victim.alive = False
        del deployment.engines[victim.name]
        deployment.start()
        self._break(victim.name, ActorDiedError())

    def _break(self, name: str, error: Exception) -> None:
        for lost in self._contacts.pop(name, []):
            with suppress(asyncio.InvalidStateError):
                lost.set_result(error)
