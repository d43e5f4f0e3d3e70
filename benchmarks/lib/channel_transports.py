"""Token streams between two processes, over eldr_serve's channel and over gRPC.

Transports:

    channel           eldr_serve.channel, as the product uses it
    grpc              grpc.aio, one server-streaming call for each stream, messages of bytes
    channel-in-grpc   the channel's frames in one bidirectional gRPC stream, in place of the socket

The server's engine computes nothing: at each step, every open stream gets one chunk. All transports share the
engine, the chunks and the event loop (uvloop, as in Ray's workers). gRPC's messages begin with the number of
tokens, which a channel has in the header of its frames.
"""

from __future__ import annotations

import asyncio
import json
import resource
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import grpc
import uvloop

from benchmarks.lib.frames_in_grpc import carry
from eldr_serve.channel import Channel, ChannelServer, Chunk, Reply
from eldr_serve.channel.client import SILENT_S
from eldr_serve.channel.frames import MAX_FRAME_BYTES, PING_S
from eldr_serve.channel.server import SILENT_S as SERVER_SILENT_S
from eldr_serve.channel.server import ServerConnection

TRANSPORTS = ("channel", "grpc", "channel-in-grpc")
PAYLOAD = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"text":" token"}]}\n\n'.ljust(250)
ID = (7).to_bytes(4, "little")
SLOW_BYTES = 65536  # size of a chunk of the stream that is not read
_SLOW_S = 0.005  # interval of its chunks
STEP_TIMEOUT_S = 60.0  # longer waits mean that tokens were lost
_MAX_BACKLOG = 2**20  # without a pace, the engine waits while more bytes are unsent
_MAX_CALLS = 10**6
_SECRET = "secret"
_TOKENS = struct.Struct("<I")
_HOST = "127.0.0.1"
_SERVICE = "bench"

Json = dict[str, Any]
Send = Callable[[bytes, bytes], Awaitable[None] | None]


def grpc_options(silent_s: float) -> list[tuple[str, int]]:
    """Return channel options of gRPC: the channel's keepalive and limits, and no retries.

    Args:
        silent_s: seconds without an answer to a ping after which the other end is lost.
    """
    return [
        ("grpc.keepalive_time_ms", int(1000 * PING_S)),
        ("grpc.keepalive_timeout_ms", int(1000 * silent_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * PING_S)),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.enable_retries", 0),
        # By default a server cancels calls at random if 1,000 arrive faster than it begins them.
        ("grpc.server.max_pending_requests", _MAX_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_CALLS),
    ]


# -- the server ------------------------------------------------------------------------------------


class _Stream:
    """An open stream.

    Attributes:
        due: number of tokens to send.
        ready: set when there are tokens to send.
    """

    __slots__ = ("due", "ready")

    def __init__(self) -> None:
        self.due = 0
        self.ready = asyncio.Event()


class TokenSource:
    """Source of tokens that computes nothing.

    Attributes:
        backlog: returns the size of the connection's write buffer in bytes.
    """

    def __init__(self) -> None:
        self.backlog: Callable[[], int] = lambda: 0
        self._streams: dict[int, _Stream] = {}
        self._stopped: dict[int, float] = {}
        self._slow_bytes = 0
        self._left = 0  # chunks of the last step that no handler has sent
        self._all_sent = asyncio.Event()

    async def stream(self, request: Json, send: Send) -> None:
        """Send one chunk at each step until cancelled. All transports use this handler of a stream."""
        number = request["stream"]
        stream = self._streams[number] = _Stream()
        try:
            if request.get("slow"):
                await self._send_always(send)
            while True:
                await stream.ready.wait()
                stream.ready.clear()
                while stream.due:
                    sent = send(PAYLOAD, ID)
                    if sent is not None:
                        await sent
                    stream.due -= 1
                    self._left -= 1
                if self._left <= 0:
                    self._all_sent.set()
        finally:
            self._stopped[number] = time.monotonic()
            del self._streams[number]

    async def _send_always(self, send: Send) -> None:
        """Send large chunks on a clock of their own."""
        self._slow_bytes = 0
        while True:
            sent = send(bytes(SLOW_BYTES), ID)
            if sent is not None:
                await sent
            self._slow_bytes += SLOW_BYTES
            await asyncio.sleep(_SLOW_S)

    async def run(self, request: Json) -> Json:
        """Take steps for `seconds`, one every `gap_s`, or each as soon as the last is sent if that is 0.

        Returns:
            {"began_s"}: start of each step in seconds of the machine's monotonic clock.

        Raises:
            RuntimeError: without a gap, a stream has not sent its chunk within STEP_TIMEOUT_S.
        """
        seconds, gap_s = request["seconds"], request["gap_s"]
        began: list[float] = [time.monotonic()]
        self._step()
        while len(began) < round(seconds / gap_s) if gap_s else time.monotonic() < began[0] + seconds:
            if gap_s:
                await asyncio.sleep(began[0] + len(began) * gap_s - time.monotonic())
            else:
                await self._wait_until_sent()
            began.append(time.monotonic())
            self._step()
        return {"began_s": began}

    async def _wait_until_sent(self) -> None:
        """Wait until all streams have sent the chunk of the last step; raise RuntimeError if one does not."""
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._all_sent.wait()
                while self.backlog() > _MAX_BACKLOG:
                    await asyncio.sleep(0.0005)
        except TimeoutError:
            raise RuntimeError(
                f"{self._left} of {len(self._streams)} streams have not sent the chunk of a step within "
                f"{STEP_TIMEOUT_S:g} s, and {self.backlog()} bytes are unsent"
            ) from None

    def _step(self) -> None:
        self._all_sent.clear()
        self._left = len(self._streams)
        for stream in self._streams.values():
            stream.due += 1
            stream.ready.set()

    async def stats(self, request: Json) -> Json:
        """Return this process's figures, and the times at which handlers stopped since the last call."""
        stopped, self._stopped = self._stopped, {}
        return {
            "cpu_s": time.process_time(),
            "resident_mib": resident_mib(),
            "open": len(self._streams),
            "stopped_at": stopped,
            "slow_bytes": self._slow_bytes,
        }


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _channel_server(engine: TokenSource) -> ChannelServer:
    async def handler(method: str, header: Json, body: bytes, reply: Reply) -> None:
        peer = reply.peer
        engine.backlog = lambda: peer.unsent_bytes
        if method == "stream":
            await engine.stream(header, lambda payload, ids: reply.send(payload, 1, ids))
        else:
            reply.send(json.dumps(await getattr(engine, method)(header)).encode())

    return ChannelServer(
        _SECRET,
        handler,
        error_response=lambda _, error: (500, repr(error).encode()),
        max_calls=_MAX_CALLS,
        full_error=lambda: RuntimeError("full"),
    )


def _grpc_methods(engine: TokenSource) -> Json:
    async def stream(request: bytes, context: Any) -> None:
        def send(payload: bytes, ids: bytes) -> Awaitable[None]:
            write: Awaitable[None] = context.write(b"".join((_TOKENS.pack(1), ids, payload)))
            return write

        await engine.stream(json.loads(request), send)

    def command(method: Callable[[Json], Awaitable[Json]]) -> Any:
        async def handle(request: bytes, context: Any) -> bytes:
            return json.dumps(await method(json.loads(request))).encode()

        return grpc.unary_unary_rpc_method_handler(handle)

    return {
        "stream": grpc.unary_stream_rpc_method_handler(stream),
        "run": command(engine.run),
        "stats": command(engine.stats),
    }


def _frames_methods(engine: TokenSource) -> Json:
    server = _channel_server(engine)

    async def frames(requests: Any, context: Any) -> None:
        await carry(ServerConnection(server), context)

    return {"frames": grpc.stream_stream_rpc_method_handler(frames)}


@asynccontextmanager
async def run_transport_server(transport: str) -> AsyncIterator[int]:
    """Serve one transport on this machine and yield its port."""
    engine = TokenSource()
    if transport == "channel":
        server = _channel_server(engine)
        try:
            yield await server.start(_HOST)
        finally:
            await server.stop()
        return
    methods = _grpc_methods(engine) if transport == "grpc" else _frames_methods(engine)
    grpc_server = grpc.aio.server(options=grpc_options(SERVER_SILENT_S))
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = grpc_server.add_insecure_port(f"{_HOST}:0")
    await grpc_server.start()
    try:
        yield port
    finally:
        await grpc_server.stop(None)


def serve(transport: str, ready: Connection) -> None:
    """Serve one transport until the process is terminated. Send the port over the pipe."""

    async def forever() -> None:
        async with run_transport_server(transport) as port:
            ready.send(port)
            await asyncio.Event().wait()

    run_loop(forever())


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on uvloop and return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


# -- the client ------------------------------------------------------------------------------------


class Readable(Protocol):
    """A stream at the client."""

    async def read(self) -> Chunk | None:
        """Return the next chunk, None at the end."""

    def cancel(self) -> Any:
        """Stop the stream."""


class Link(Protocol):
    """A connection to the server."""

    def stream(self, request: Json) -> Readable:
        """Open a stream."""

    async def command(self, name: str, request: Json) -> Json:
        """Call a method of the engine and return its answer."""


class _OverChannel:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def stream(self, request: Json) -> Readable:
        return self._channel.call("stream", request)

    async def command(self, name: str, request: Json) -> Json:
        call, parts = self._channel.call(name, request), []
        while (chunk := await call.read()) is not None:
            parts.append(chunk.payload)
        answer: Json = json.loads(b"".join(parts))
        return answer


class _GrpcStream:
    __slots__ = ("_call", "cancel")

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    async def read(self) -> Chunk | None:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            return None
        (tokens,) = _TOKENS.unpack_from(message)
        start = 4 + 4 * tokens
        return Chunk(message[start:], tokens, message[4:start])


class _OverGrpc:
    def __init__(self, channel: Any) -> None:
        self._open = channel.unary_stream(f"/{_SERVICE}/stream")
        self._commands = {name: channel.unary_unary(f"/{_SERVICE}/{name}") for name in ("run", "stats")}

    def stream(self, request: Json) -> Readable:
        return _GrpcStream(self._open(json.dumps(request).encode()))

    async def command(self, name: str, request: Json) -> Json:
        answer: Json = json.loads(await self._commands[name](json.dumps(request).encode()))
        return answer


@asynccontextmanager
async def connect_by_transport(transport: str, port: int) -> AsyncIterator[Link]:
    """Yield a link to the server of a transport on this machine."""
    if transport == "channel":
        channel = await Channel.connect(_HOST, port, _SECRET)
        try:
            yield _OverChannel(channel)
        finally:
            channel.close("the benchmark ends")
        return
    async with grpc.aio.insecure_channel(f"{_HOST}:{port}", options=grpc_options(SILENT_S)) as grpc_channel:
        await grpc_channel.channel_ready()
        if transport == "grpc":
            yield _OverGrpc(grpc_channel)
            return
        channel = Channel(_SECRET, lambda: None)
        call = grpc_channel.stream_stream(f"/{_SERVICE}/frames")()
        carrying = asyncio.create_task(carry(channel, call))
        await channel.welcome
        try:
            yield _OverChannel(channel)
        finally:
            call.cancel()
            with suppress(asyncio.CancelledError):
                await carrying
