"""A fleet of engine replicas without sockets: real calls, answered in this process."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from eldr_serve.channel import Call, CallFailedError, ChannelLostError
from eldr_serve.engine.calls import PrefillReply
from eldr_serve.engine.methods import GENERATE, RELEASE, SLOT_METHODS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.engine import VllmEngine
from eldr_serve.errors import RequestRefusedError
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.replicas.servers import describe_error

TOKEN_IDS = bytes(7 * 4)  # token ids of each prompt
_CANCEL_DELAY_S = 0.004  # time until an engine learns that a call was cancelled


@dataclass(eq=False)
class Sent:
    """A call that an engine has received."""

    replica: str
    method: str
    header: dict[str, Any]
    body: bytes
    cancelled: bool = False
    is_leaving: bool = False
    running: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def kv(self) -> dict[str, Any]:
        return self.header["kv_transfer_params"]

    def send(self, cancel: bytes) -> None:
        """Stand in for the channel, on which a call only sends its cancellation."""
        self.cancelled = True
        if self.running is not None:
            asyncio.get_running_loop().call_later(_CANCEL_DELAY_S, self.running.cancel)


class FakeFleet(Fleet):
    """A stand-in for a Fleet, whose calls are answered by the asynchronous generator `answer(sent)`.

    It yields bytes, (bytes, tokens), (bytes, tokens, ids), or a dict for the call's end.
    Its exceptions end the call: ChannelLostError as it is, any other as the engine's error.
    """

    def __init__(self, answer: Callable[[Sent], AsyncIterator[Any]], *names: str) -> None:
        super().__init__(ReplicaDirectory())
        self.answer = answer
        self.directory.publish({name: {} for name in names})
        self.sent: list[Sent] = []
        self.released: list[tuple[str, str]] = []  # replica and prompt
        self.lost: set[str] = set()  # replicas without a channel

    @property
    def live_workers(self) -> tuple[str, ...]:
        return tuple(name for name in self.directory.known_workers if name not in self.lost)

    @property
    def _open(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.running is not None and not sent.running.done()]

    @property
    def open_calls(self) -> dict[str, int]:
        counts = Counter(sent.replica for sent in self._open)
        return {name: counts[name] for name in self.live_workers}

    def slot_calls_of(self, worker: str) -> int:
        return sum(sent.replica == worker and sent.method in SLOT_METHODS for sent in self._open)

    @property
    def oldest_call_ages_s(self) -> dict[str, float]:
        return {name: 0.0 for name in self.live_workers}

    @property
    def requests(self) -> list[Sent]:
        """Return the calls that an engine works for."""
        return [sent for sent in self.sent if sent.method != RELEASE]

    def is_connected(self, replica: str) -> bool:
        return replica in self.directory.known_workers and replica not in self.lost

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def call(self, replica: str, method: str, request: EngineRequest) -> Call:
        if replica not in self.live_workers:
            raise ChannelLostError(f"there is no channel to {replica}")
        header = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
        sent = Sent(replica, method, header, header.pop("body"))
        self.sent.append(sent)
        channel: Any = sent
        call = Call(channel, len(self.sent), method)
        if method == RELEASE:
            self.released.append((replica, request.id))
            call.on_ended(None)
        else:
            sent.running = asyncio.create_task(self._run(sent, call))
            sent.running.add_done_callback(lambda task: call.on_ended(None))  # the task may never have begun
        return call

    async def _run(self, sent: Sent, call: Call) -> None:
        try:
            async with aclosing(self.answer(sent)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, dict):
                        call.engine_report = chunk
                        continue
                    call.feed(*(chunk if isinstance(chunk, tuple) else (chunk, 1)))
            call.on_ended(None)
        except (ChannelLostError, CallFailedError) as error:
            call.on_ended(error)
        except Exception as error:
            call.on_ended(CallFailedError(*describe_error(GENERATE, error, VllmEngine)))


def prefill_result(**params: Any) -> bytes:
    """Return a prefill engine's answer with these KV transfer parameters."""
    return msgspec.msgpack.encode(PrefillReply(TOKEN_IDS, params))


def refusal(status: int, message: str = "no") -> RequestRefusedError:
    """Return an error that makes an engine's call fail with this status."""
    return RequestRefusedError(message, status=status)


def in_turn(*answers: Callable[[Sent], AsyncIterator[Any]]) -> Callable[[Sent], AsyncIterator[Any]]:
    """Return an engine whose calls have these answers in turn. The last one repeats."""
    calls = iter(answers)
    return lambda sent: next(calls, answers[-1])(sent)


def answer_with(*chunks: Any) -> Callable[[Sent], AsyncIterator[Any]]:
    """Return an engine that yields these chunks, raises an exception among them, and awaits an event."""

    async def answer(sent: Sent) -> AsyncIterator[Any]:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            if isinstance(chunk, asyncio.Event):
                await chunk.wait()
            else:
                yield chunk

    return answer
