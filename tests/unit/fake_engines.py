"""Prefill and decode engines that model who owns KV blocks, behind channels that break.

A block belongs to a prompt until the decode engine has read it, it is released, or its lease ends. From
then on it holds another prompt. A decode engine reads whatever is there and keeps it in its prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fake_fleet import FakeFleet, Sent, prefilled
from one_path import generation
from router_talk import FakeActor, connected

from eldr_serve.channel import Call, ChannelLost
from eldr_serve.engine.keys import REQUEST
from eldr_serve.serving.path import Engines, PathOptions, RequestPath

SOMEBODY_ELSES = "another prompt"
TOKENS = 4
INTERVALS = (
    "prefill-sent", "prefilling", "prefilled", "placing", "decode-sent", "before-pull", "pulled",
    "first-token", "mid-stream", "last-token",
)  # fmt: skip
_BLOCKS = 12
_A_MOMENT_S = 0.001


@dataclass(eq=False)
class Engine:
    """One replica. Its `run` answers a call, and says at each interval that it is there."""

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

    async def run(self, sent: Sent) -> AsyncIterator[bytes]:
        name, prompt = sent.kv[REQUEST], sent.fields["prompt"]
        await self.world.reach("prefill-sent", self)
        blocks = self.owned[name] = [self.free.popleft() for _ in range(2)]
        for block in blocks:
            self.memory[block] = prompt
        try:
            await self.world.reach("prefilling", self)
        except asyncio.CancelledError:
            self.give_back(name)
            raise
        self._computed.add(name)
        if name in self._abandoned:
            self.give_back(name)
        await self.world.reach("prefilled", self)
        yield prefilled(**self.handed_over(name, list(blocks)))

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

    async def run(self, sent: Sent) -> AsyncIterator[bytes]:
        await self.world.reach("decode-sent", self)
        await self.world.reach("before-pull", self)
        text = self.read(sent.fields["prompt"], sent.kv)
        await self.world.reach("pulled", self)
        tokens = []
        for interval in ("first-token", *["mid-stream"] * (TOKENS - 2), "last-token"):
            tokens.append(f"{text} {len(tokens)}\n".encode())
            if sent.fields["stream"]:
                yield tokens[-1]
            await self.world.reach(interval, self)
        if not sent.fields["stream"]:
            yield b"".join(tokens)

    def read(self, prompt: str, params: dict[str, Any]) -> str:
        """What the engine takes for the prompt; its prefix cache keeps full blocks, so not the last one."""
        if not params.get("do_remote_prefill"):
            return self._joined(prompt, prompt, prompt)
        owner = self.world.prefills.engines.get(params["remote_engine_id"])
        if owner is None:
            raise RuntimeError("the prefill engine does not answer")
        text = self._joined(prompt, *(owner.memory[block] for block in params["remote_block_ids"]))
        owner.give_back(params["remote_request_id"])
        return text

    def _joined(self, prompt: str, first: str, last: str) -> str:
        kept = self.prefix_cache.setdefault(prompt, first)
        return kept if kept == last else f"{kept}, {last}"


class Deployment(FakeFleet):
    """A fleet over engines. A call whose channel is lost may run on unseen, if its engine lives."""

    def __init__(self, world: World, kind: type[Engine], name: str, replicas: int) -> None:
        super().__init__(lambda sent: self.engines[sent.replica].run(sent))
        self.world = world
        self._kind = kind
        self._names = (f"{name}{n}" for n in itertools.count())
        self._calls: list[tuple[Sent, Call]] = []
        self.engines: dict[str, Any] = {}
        for _ in range(replicas):
            self.start_one()

    def start_one(self) -> None:
        name = next(self._names)
        self.engines[name] = self._kind(self.world, name)
        self.directory.publish({name: {} for name in self.engines})

    def call(self, replica: str, method: str, header: Any, body: bytes = b"") -> Call:
        call = super().call(replica, method, header, body)
        if method == "release":
            asyncio.get_running_loop().call_soon(self._release, replica, header["id"])
        else:
            self._calls.append((self.sent[-1], call))
        return call

    def _release(self, replica: str, name: str) -> None:
        if replica in self.engines:
            self.engines[replica].release(name)

    def cut(self, replica: str) -> None:
        """The channel breaks: whoever waits for an answer learns no more."""
        for sent, call in self._calls:
            if sent.replica == replica:
                call.over(ChannelLost("cut"))
        self._calls = [(sent, call) for sent, call in self._calls if sent.replica != replica]

    def kill(self, victim: Engine | None) -> None:
        """Kill the engine, or any if it is none of this fleet; Serve starts another."""
        if victim is None or victim.name not in self.engines:
            victim = next(iter(self.engines.values()))
        victim.alive = False
        del self.engines[victim.name]
        self.start_one()
        self.cut(victim.name)


class World:
    """The real path, client and router state over these engines.

    Args:
        faults: (interval, fault) in turn: each happens once, when a request reaches the interval next.
    """

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = list(faults)
        self.happened: list[tuple[str, str]] = []
        self.prefills = Deployment(self, PrefillEngine, "p", 2)
        self.decodes = Deployment(self, DecodeEngine, "d", 3)
        self.actor = FakeActor(policy="round-robin", table=None)
        self.asking: dict[str, asyncio.Task[list[str]]] = {}

    @asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[World]:
        async with connected(self.actor, *self.decodes.engines, directory=self.decodes.directory) as client:
            self.client = client
            fleets: Any = self.prefills, self.decodes
            path_options = PathOptions(retry_backoff_s=0.001, **options)
            self.path = RequestPath(engines=Engines(*fleets), client=client, options=path_options)
            place = client.place

            async def slowly(*args: Any, **kwargs: Any) -> Any:
                await self.reach("placing", None)
                return await place(*args, **kwargs)

            client.place = slowly
            yield self

    async def ask(self, prompt: str, *, stream: bool) -> list[str]:
        """The tokens of the answer; raises what the path raises."""
        chunks = self.path.generate(generation(prompt=prompt, max_tokens=TOKENS, stream=stream))
        answer = b""
        try:
            async for chunk in chunks:
                answer += chunk
        finally:
            await chunks.aclose()
        return [line for line in answer.decode().splitlines() if line not in ("", "data: [DONE]")]

    async def answers(self, prompts: list[str], *, stream: bool) -> list[Any]:
        self.asking = {p: asyncio.create_task(self.ask(p, stream=stream)) for p in prompts}
        return await asyncio.gather(*self.asking.values(), return_exceptions=True)

    # -- faults ------------------------------------------------------------------------------------

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
            self.decodes.cut(engine.name)
        elif fault == "decode dies":
            self.decodes.kill(engine)
        elif fault == "prefill dies":
            owners = [owner for owner in self.prefills.engines.values() if owner.owned]
            self.prefills.kill(engine if isinstance(engine, PrefillEngine) else next(iter(owners), None))
