"""The frames of a channel in one bidirectional gRPC stream, in place of its socket."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from eldr_serve.channel.peer import Peer


class _Transport(asyncio.Transport):
    """The transport of a channel's peer that collects its writes for one gRPC message at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._out: list[bytes] = []
        self._size = 0
        self.written = asyncio.Event()
        self.aborted = asyncio.Event()

    def writelines(self, parts: Any) -> None:
        self._out += parts
        self._size += sum(map(len, parts))
        self.written.set()

    def take(self) -> bytes:
        """Return everything that has been written since the last call."""
        data = b"".join(self._out)
        self._out, self._size = [], 0
        self.written.clear()
        return data

    def get_write_buffer_size(self) -> int:
        return self._size

    def abort(self) -> None:
        self.aborted.set()


async def carry(peer: Peer, stream: Any) -> None:
    """Carry a peer's bytes over a gRPC stream, in both directions, until either end closes it.

    A failure to read or to write ends both directions, and is raised.
    """
    transport = _Transport()
    peer.connection_made(transport)

    async def read() -> None:
        while (data := await stream.read()) is not grpc.aio.EOF:
            peer.data_received(data)

    async def write() -> None:
        while True:
            await transport.written.wait()
            await stream.write(transport.take())

    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(read()),
        asyncio.create_task(write()),
        asyncio.create_task(transport.aborted.wait()),
    ]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        peer.connection_lost(None)
