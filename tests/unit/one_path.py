"""The path of one request over fake deployments and a fake client of the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from eldr_serve.routing import Placement, PlacementRequest, State
from eldr_serve.serving.compat import CompletionRequest, ErrorResponse
from eldr_serve.serving.path import PathOptions, RequestPath
from eldr_serve.serving.replicas import Engines, ReplicaDirectory
from eldr_serve.serving.wire import SIGNATURE
from eldr_serve.signature import pack_counts

COUNTS = np.arange(12, dtype=np.uint32).reshape(3, 4)


class Stream:
    """A DeploymentResponseGenerator: an async iterator that can be cancelled."""

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        self._chunks = chunks
        self.cancelled = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._chunks)

    def cancel(self) -> None:
        self.cancelled = True


class Deployment:
    """A DeploymentHandle whose prompts are answered by `answer(request)`, an async generator."""

    def __init__(self, answer: Callable[[Any], AsyncIterator[Any]]) -> None:
        self.answer = answer
        self.requests: list[Any] = []
        self.streams: list[Stream] = []
        self.released: list[Any] = []
        self.adapters: set[str] = set()  # that handles were made for

    def options(self, *, multiplexed_model_id: str = "", **_: Any) -> Deployment:
        self.adapters |= {multiplexed_model_id} - {""}
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, request: Any = None, raw_info: Any = None) -> Any:
        if request is None:
            return asyncio.sleep(0)  # a check of its health
        if not hasattr(request, "max_tokens"):
            self.released.append(request)
            return asyncio.sleep(0)
        self.requests.append(request)
        self.streams.append(Stream(self.answer(request)))
        return self.streams[-1]


def prefilled(**params: Any) -> Any:
    """A prefill engine's answer."""
    return SimpleNamespace(usage=SimpleNamespace(prompt_tokens=7), kv_transfer_params=params)


def answering(*chunks: Any) -> Callable[[Any], AsyncIterator[Any]]:
    """An engine that answers with these; an exception among them is raised, an event awaited."""

    async def answer(request: Any) -> AsyncIterator[Any]:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            if isinstance(chunk, asyncio.Event):
                await chunk.wait()
            else:
                yield chunk

    return answer


good_prefill = answering(
    prefilled(do_remote_prefill=True, remote_request_id="r", **{SIGNATURE: pack_counts(COUNTS)})
)
good_decode = answering("data: a", "data: b", "data: c")


def error(code: int, message: str = "no") -> ErrorResponse:
    return ErrorResponse(error={"message": message, "type": "test", "code": code})


class Client:
    """A RouterClient that leases the first replica that is not excluded."""

    def __init__(self) -> None:
        self.placed: list[tuple[PlacementRequest, Any]] = []
        self.waits: list[float] = []
        self.held: set[str] = set()
        self.tokens: list[int] = []
        self.counted: list[str] = []

    async def place(self, request: PlacementRequest, counts: Any, *, wait_s: float) -> Placement:
        self.placed.append((request, counts))
        self.waits.append(wait_s)
        self.held.add(request.request_id)
        replica = next(r for r in ("d0", "d1", "d2") if r not in request.exclude)
        return Placement(request, State.LEASED, replica=replica)

    def release(self, request_id: str) -> None:
        self.held.discard(request_id)

    def progress(self, request_id: str, tokens: int) -> None:
        assert request_id in self.held
        self.tokens.append(tokens)

    def count(self, event: str) -> None:
        self.counted.append(event)


class World:
    """The path over engines that answer by `prefill` and `decode`; each prompt was computed on p0."""

    def __init__(self, prefill: Any = good_prefill, decode: Any = good_decode, **options: Any) -> None:
        self.prefill, self.decode, self.client = Deployment(prefill), Deployment(decode), Client()
        self.prefills: Any = ReplicaDirectory()
        self.prefills.take_routed = lambda request_id: "p0"
        engines = Engines(self.prefill, self.decode, self.prefills, ReplicaDirectory())
        path_options = PathOptions(**{"retry_backoff_s": 0.0, **options})
        self.path = RequestPath(engines=engines, client=self.client, options=path_options)

    async def run(self, **fields: Any) -> list[Any]:
        """The chunks of the answer; what it leaves to do is done."""
        request = CompletionRequest(**{"model": "m", "prompt": "hello", "max_tokens": 5, **fields})
        try:
            return [chunk async for chunk in self.path.generate(request, "completions")]
        finally:
            await asyncio.sleep(0.01)
            assert not self.client.held
