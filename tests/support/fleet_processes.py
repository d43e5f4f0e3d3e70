"""Engine replicas, an ingress and clients as processes of their own, over engines that compute nothing."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

from ray import serve

from eldr_serve.channel.address import Address
from eldr_serve.engine.fake import FakeConfig, FakeEngine
from eldr_serve.engine.report_fields import ADDRESS
from eldr_serve.fleet.directory import get_directory
from eldr_serve.ingress import deployment as ingress
from eldr_serve.ingress.http_application import application
from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.replicas import servers
from eldr_serve.router.settings import RouterSettings
from tests.support.engine_server import COUNTS
from tests.support.fake_router import FakeActor, wait_until

Fleet = Mapping[str, Mapping[str, Any]]  # metadata that each replica of a deployment reports to Serve
ReadLine = Callable[[], Awaitable[Any]]  # function that reads the next line of a process
_APPLICATION = "processes"


class Replica:
    """An engine's replica in a process of its own.

    Attributes:
        metadata: values that the replica reports to Serve, once it has started.
    """

    def __init__(self, process: subprocess.Popen[bytes], read_line: ReadLine) -> None:
        self.process = process
        self.metadata: dict[str, Any] = {}
        self._read_line = read_line

    async def start(self) -> None:
        self.metadata = await self._read_line()

    async def running(self) -> list[str]:
        """Return the requests that the engine reports to be running."""
        channel = await Address(**self.metadata[ADDRESS]).connect()
        try:
            chunk = await channel.call("running", {}).read()
            assert chunk is not None
            return json.loads(chunk.payload)
        finally:
            channel.close("that was all")


@contextmanager
def process(*arguments: Any) -> Iterator[tuple[subprocess.Popen[bytes], ReadLine]]:
    """Run this module with these arguments, and yield the process and a function that reads its next line."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "tests.support.fleet_processes", *map(json.dumps, arguments)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
    output = child.stdout
    assert output is not None

    async def read_line() -> Any:
        return json.loads(await asyncio.to_thread(output.readline))

    try:
        yield child, read_line
    finally:
        child.kill()
        child.wait()
        output.close()


@contextmanager
def replica(role: str, **config: float) -> Iterator[Replica]:
    """Run a replica. `config` has fields of FakeConfig."""
    with process(role, config) as started:
        yield Replica(*started)


class _Ingress(ingress.EldrIngress):
    def __del__(self) -> None:  # type: ignore[override]
        """Replace the asynchronous destructor, which only Serve awaits."""


@asynccontextmanager
async def running_ingress(prefill: Fleet, decode: Fleet) -> AsyncIterator[Any]:
    """Run an ingress in this process, at a port of its own, with a fake router."""
    get_directory(ingress.prefill_directory(_APPLICATION)).publish(prefill)
    get_directory(ingress.decode_directory(_APPLICATION)).publish(decode)
    actor = FakeActor(policy="round-robin")
    holder = SimpleNamespace(servable_object=None, actor=actor)
    with (
        patch.object(ingress, "RouterCalls", lambda find, settings: actor),
        patch.object(serve, "get_replica_context", lambda: holder),
    ):
        holder.servable_object = deployment = _Ingress(
            prefill=Mock(),
            decode=Mock(),
            tokenizer="/nowhere",
            model_cards=[{"id": "m"}],
            openapi={},
            application=_APPLICATION,
            router_settings=RouterSettings(model_id="m"),
            options=IngressOptions(port=0),
            path_options=PathOptions(retry_backoff_s=0.0),
            prefill_options=PrefillRouterOptions(),
        )
        deployment._fleets.prefill.start()
        deployment._fleets.decode.start()
        deployment._router.start()
        server = HttpServer(application(), deployment.gate.options)
        holder.port, holder.ingress = server.port, deployment
        await wait_until(lambda: server._server.started, 30)
        await wait_until(lambda: len(deployment._fleets.prefill.live_workers) == len(prefill), 30)
        await wait_until(lambda: len(deployment._fleets.decode.live_workers) == len(decode), 30)
        try:
            yield holder
        finally:
            await deployment.stop()
            await server.drain()


# -- in those processes ----------------------------------------------------------------------------------


def _print(value: Any) -> None:
    print(json.dumps(value), flush=True)


async def _engine(role: str, config: dict[str, float]) -> None:
    kind: Any = {"prefill": servers.PrefillServer, "decode": servers.DecodeServer}[role]

    class Server(kind):  # type: ignore[misc]
        async def handle_call(self, method: str, request: Any, reply: Any) -> None:
            if method == "running":
                reply.send(json.dumps(sorted(self._engine.running)).encode())
            else:
                await super().handle_call(method, request, reply)

    server = object.__new__(Server)
    router = {"router_name": "router"} if role == "decode" else {}
    with patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"):
        config_of_engine = FakeConfig(COUNTS, **config)  # type: ignore[arg-type]
        await server.__init__(config_of_engine, start_engine=FakeEngine.start, stall_timeout_s=60.0, **router)
    _print(await server.record_replica_metadata())
    await asyncio.Event().wait()


async def _ingress(prefill: Fleet, decode: Fleet) -> None:
    async with running_ingress(prefill, decode) as holder:
        _print(holder.port)
        await asyncio.Event().wait()


def _post(body: dict[str, Any]) -> bytes:
    sent = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent


async def _client(port: int, body: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_post(body))
    while not (await reader.readline()).startswith(b"data: "):
        pass
    _print("begun")
    while await reader.read(65536):
        pass


async def _deaf(port: int, body: dict[str, Any]) -> None:
    """Send a request and read nothing of its answer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(_post(body))
        _print("sent")
        await asyncio.Event().wait()


if __name__ == "__main__":
    what, *rest = map(json.loads, sys.argv[1:])
    main: Any = {"ingress": _ingress, "client": _client, "deaf": _deaf}.get(what)
    asyncio.run(main(*rest) if main else _engine(what, *rest))
