"""Connections that only take resources: idle ones, half requests, and clients that never read."""

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SMALL_BUFFER = 2048
_MAX_CONCURRENT = 50  # connections opened concurrently
_SPARE_DESCRIPTORS = 256  # file descriptors for everything else
_HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"


def slow_request(model: str, max_tokens: int) -> bytes:
    """Return a request for a long stream, for a client that will not read it."""
    body = json.dumps(
        {
            "model": model,
            "prompt": "Once",
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 5,
        }
    ).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def occupy(host: str, port: int, *, idle: int, slow: int, request: bytes) -> AsyncIterator[None]:
    """Hold connections to a service during the block.

    Args:
        idle: number of connections that get no answer: half of them send nothing, half a part of a request.
        slow: number of connections that send `request` and never read the answer.
        request: bytes of a request for a long stream.

    Raises:
        OSError: the connections cannot be opened.
    """
    descriptors = idle + slow + _SPARE_DESCRIPTORS
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, max(descriptors, most)))
    loop, connections, turn = asyncio.get_running_loop(), [], asyncio.Semaphore(_MAX_CONCURRENT)

    async def hold(data: bytes, *, small: bool) -> None:
        async with turn:
            connection = socket.socket()
            connections.append(connection)
            if small:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, port))
            await loop.sock_sendall(connection, data)

    try:
        await asyncio.gather(
            *(hold(_HALF if number % 2 else b"", small=False) for number in range(idle)),
            *(hold(request, small=True) for _ in range(slow)),
        )
        yield
    finally:
        for connection in connections:
            connection.close()
