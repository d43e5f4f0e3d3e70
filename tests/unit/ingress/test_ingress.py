"""Answers of the ingress to clients and operators, and the end of a request whose client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_fleet import answer_with
from fake_router import FakeActor, wait_until
from ingress_app import COMPLETIONS, HELLO, KEY, TOKEN, running_app, stream_answer

from eldr_serve.channel import ChannelLost
from eldr_serve.errors import Overloaded
from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.options import IngressOptions

HUGE_SLOTS = {"name": "balance-route", "parameters": {"slots": 2**62}}


@pytest.mark.parametrize(
    ("admin_key", "key", "status", "sentence"),
    [
        (KEY, None, 401, ""),
        (KEY, "wrong", 401, ""),
        (KEY, KEY, 400, "slots is 4611686018427387904"),
        (None, KEY, 403, ""),
    ],
)
async def test_changes_need_the_admin_key_and_invalid_ones_change_nothing(
    admin_key: str | None, key: str | None, status: int, sentence: str
) -> None:
    actor = FakeActor()
    before = actor.state.settings
    async with running_app(actor=actor, admin_key=admin_key) as app:
        for path, body in (("table", {"content": b"no table"}), ("policy", {"json": HUGE_SLOTS})):
            answer = await app.put(f"/eldr/{path}", key, **body)
            assert answer.status_code == answer.json()["error"]["code"] == status
            assert "\n" not in answer.json()["error"]["message"]
        assert sentence in answer.json()["error"]["message"]
        assert actor.state.settings is before


async def test_the_ready_endpoint_answers_200_once_the_engines_are_warm() -> None:
    async with running_app(admin_key=None) as app:
        answer = await app.client.get("/eldr/ready")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the engines are not up yet"
        assert int(answer.headers["retry-after"]) >= 1
        await app.ingress.check_health()  # the first call starts the warm-up
        async with asyncio.timeout(10):
            while (answer := await app.client.get("/eldr/ready")).status_code == 503:
                assert "pairs of engines are warm" in answer.text or "not up yet" in answer.text
                await asyncio.sleep(0.01)
        assert (answer.status_code, answer.json()) == (200, {"ready": True})
        assert app.ingress._warmup.pairs == 4
        app.decode.directory.publish({})
        assert (await app.client.get("/eldr/ready")).status_code == 503


async def test_an_overloaded_service_answers_503_with_retry_after() -> None:
    async with running_app(prefill=answer_with(Overloaded("all are full", retry_after_s=7))) as app:
        answer = await app.post(COMPLETIONS, HELLO)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "overloaded"


async def test_a_lost_engine_is_a_503_for_every_endpoint() -> None:
    async with running_app(decode=answer_with(ChannelLost("gone"))) as app:
        for path in (COMPLETIONS, "/tokenize"):
            assert (await app.post(path, HELLO)).status_code == 503


@pytest.mark.parametrize("streamed", [True, False])
async def test_headers_name_the_policy_and_a_streams_handover_time(streamed: bool) -> None:
    async with running_app(**({"decode": stream_answer} if streamed else {})) as app:
        answer = await app.post(COMPLETIONS, HELLO | {"stream": streamed})
        assert answer.status_code == 200
        assert answer.headers["x-eldr-decode-worker"] in ("r0", "r1")
        assert answer.headers["x-eldr-policy"] == "locality-band"
        assert int(answer.headers["x-eldr-candidates"]) >= 1
        assert ("x-eldr-handover-ms" in answer.headers) == streamed


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
@pytest.mark.parametrize("chunks_sent", [0, 2])
async def test_a_client_that_disconnects_during_a_chunk_cancels_its_call(chunks_sent: int, how: str) -> None:
    """Its generator is suspended then, and nothing else ends it, as in a reference cycle."""
    sending, left = asyncio.Event(), asyncio.Event()
    messages = 0

    async def endless(sent: Any) -> AsyncIterator[bytes]:
        while True:
            yield TOKEN
            await asyncio.sleep(0.001)

    async def send(message: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > 1 + chunks_sent:  # the first message has the headers
            sending.set()
            await asyncio.Event().wait()

    async with running_app(decode=endless) as app:
        streaming = asyncio.create_task(app.stream(send, left))
        await sending.wait()
        assert app.ingress.gate.in_flight == 1
        _ = streaming.cancel() if how == "cancelled" else left.set()
        with contextlib.suppress(asyncio.CancelledError):
            await streaming
        assert app.decode.requests[-1].cancelled
        assert app.ingress.gate.in_flight == 0


async def test_a_client_that_reads_nothing_is_disconnected_and_disturbs_no_other() -> None:
    async def decode(sent: Any) -> AsyncIterator[bytes]:
        """Stream without end, or answer a request for a few tokens at once."""
        if sent.fields["max_tokens"] <= 5:
            yield b'{"choices": []}'
            return
        while True:
            yield b"data: " + b"x" * 1016 + b"\n\n"
            await asyncio.sleep(0)

    async with running_app(decode=decode) as app:
        server = HttpServer(app.http, IngressOptions(port=0))
        await wait_until(lambda: server._server.started)
        host, port = "127.0.0.1", server.port
        body = json.dumps(HELLO | {"max_tokens": 99, "stream": True}).encode()
        silent = socket.create_connection((host, port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        silent.sendall(head.encode() + body)
        await wait_until(lambda: app.decode.requests and app.decode.requests[-1].cancelled)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            assert (await client.post(COMPLETIONS, json=HELLO)).status_code == 200
        silent.close()
        await wait_until(lambda: app.ingress.gate.in_flight == 0)
        await server.drain()


async def test_an_ingress_does_not_start_at_a_used_port() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        async with running_app(port=server.sockets[0].getsockname()[1]):
            pass
    server.close()


async def test_a_second_application_does_not_start_at_the_port_of_the_first() -> None:
    async with running_app(port=0) as first:
        number = first.ingress._port.number
        with pytest.raises(OSError, match=rf"port {number}; .*in use by application 'test-\d+'"):
            async with running_app(port=number):
                pass
        first.ingress._port.release()
        first.ingress._port.socket.close()


# -- like vLLM's own server -------------------------------------------------------------------------


async def test_health_version_and_metrics_have_vllms_paths_and_need_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text('{"tenants": {}}')
    async with running_app(keys_file=keys) as app:
        endpoints = ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")
        for method, path in endpoints:
            assert (await app.client.request(method, path)).status_code == 503  # no engine is warm
        app.ingress.admin._warmup = SimpleNamespace(awaited=None)
        for method, path in endpoints:
            answer = await app.client.request(method, path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert (await app.client.get("/version")).json() == {"version": "0.0-test"}
        answer = await app.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "process_cpu_seconds_total" in answer.text
        assert answer.text.startswith("# One ingress process.")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", COMPLETIONS), ("DELETE", "/v1/models"), ("PUT", "/health")]
)
async def test_a_405_names_the_allowed_methods(method: str, path: str) -> None:
    async with running_app() as app:
        answer = await app.client.request(method, path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) & {"GET", "POST"}
        assert answer.json()["error"]["code"] == 405


async def test_an_empty_model_name_means_the_served_model() -> None:
    async with running_app() as app:
        for path in (COMPLETIONS, "/tokenize"):
            assert (await app.post(path, HELLO | {"model": ""})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (COMPLETIONS, {"model": "unknown"}, 404, "model"),
        (COMPLETIONS, {"n": "many"}, 400, "body.n"),
        (COMPLETIONS, {"temperature": "hot"}, 400, "body.temperature"),
        ("/tokenize", {"prompt": 5}, 400, "body.prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "body.tokens.0"),
    ],
)
async def test_errors_name_the_field(path: str, fields: dict[str, Any], status: int, param: str) -> None:
    async with running_app() as app:
        answer = await app.post(path, HELLO | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
