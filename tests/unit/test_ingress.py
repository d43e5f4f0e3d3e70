"""What the ingress refuses, and how it says so."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from eldr_serve.serving.errors import Overloaded, SwapRefused
from eldr_serve.serving.ingress import EldrIngress, IngressOptions
from eldr_serve.serving.messages import Lease


class Client:
    """A RouterClient that refuses every change."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def start(self) -> None:
        pass

    def count(self, event: str) -> None:
        self.called.append(event)

    async def call(self, method: str, *args: Any) -> Any:
        self.called.append(method)
        raise SwapRefused("it does not fit")


def ingress(key: str | None = "key", in_flight: int = 0) -> Any:
    """An ingress without Ray around it."""
    made = object.__new__(EldrIngress)
    made._admin_key_sha256 = hashlib.sha256(key.encode()).hexdigest() if key else None
    made._client = Client()
    made._options = IngressOptions(max_in_flight=4)
    made._in_flight = in_flight
    made._closing = set()
    return made


def request(key: str | None = None) -> Any:
    return SimpleNamespace(headers={"authorization": f"Bearer {key}"} if key else {}, state=SimpleNamespace())


@pytest.mark.parametrize(
    ("configured", "given", "status"),
    [(None, None, 403), (None, "key", 403), ("key", None, 401), ("key", "wrong", 401), ("key", "key", 400)],
)
async def test_changes_need_the_key(configured: str | None, given: str | None, status: int) -> None:
    made = ingress(configured)
    answer = await made._administer(request(given), "swap_table", b"")
    assert answer.status_code == status
    error = json.loads(answer.body)["error"]
    assert error["code"] == status
    assert "\n" not in error["message"]
    assert made._client.called == (["swap_table"] if status == 400 else [])


async def test_too_many_requests_are_refused_before_prefill() -> None:
    made = ingress(in_flight=4)

    async def endpoint(*_: Any) -> Any:
        raise AssertionError("the request was let in")

    answer = await made._admitted(endpoint, None, request())
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert made._client.called == ["refused_overload"]


async def test_no_capacity_is_a_503_that_says_when_to_come_again() -> None:
    async def endpoint(*_: Any) -> Any:
        raise Overloaded("3 decode replicas failed this request", retry_after_s=7)

    answer = await ingress()._admitted(endpoint, None, request())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "7"
    assert json.loads(answer.body)["error"]["type"] == "overloaded"


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_names_its_policy_and_a_stream_its_hand_over(streamed: bool) -> None:
    asked = request()
    asked.state.eldr_lease = Lease("r", "decode-a", 3, band=2, policy="random")
    asked.state.eldr_handover_s = 0.0125

    async def endpoint(*_: Any) -> Any:
        return StreamingResponse(iter(())) if streamed else JSONResponse({})

    headers = (await ingress()._admitted(endpoint, None, asked)).headers
    assert headers["x-eldr-decode-worker"] == "decode-a"
    assert (headers["x-eldr-band"], headers["x-eldr-policy"]) == ("2", "random")
    assert headers.get("x-eldr-handover-ms") == ("12.500" if streamed else None)


@pytest.mark.parametrize("chunks_sent", [0, 2])
async def test_a_client_that_goes_while_a_chunk_is_on_its_way_leaves_the_engines(chunks_sent: int) -> None:
    """Its generator is suspended then, and here, as in a reference cycle, nothing else ends it."""
    left = asyncio.Event()
    sending = asyncio.Event()

    async def run() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: x"
        finally:
            left.set()

    asked = request()
    asked.state.eldr_run = run()

    async def endpoint(*_: Any) -> Any:
        return StreamingResponse(asked.state.eldr_run)

    messages = 0

    async def send(message: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > 1 + chunks_sent:  # the first message has the headers
            sending.set()
            await asyncio.Event().wait()

    response = await ingress()._admitted(endpoint, None, asked)
    streaming = asyncio.create_task(response({"type": "http"}, asyncio.Event().wait, send))
    await sending.wait()
    streaming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await streaming
    await asyncio.wait_for(left.wait(), 5)


async def test_an_error_answer_leaves_the_engines() -> None:
    left = asyncio.Event()

    async def run() -> AsyncGenerator[str, None]:
        try:
            yield "error"
        finally:
            left.set()

    asked = request()
    asked.state.eldr_run = run()

    async def endpoint(*_: Any) -> Any:
        await anext(asked.state.eldr_run)
        raise Overloaded("the engine is full")

    await ingress()._admitted(endpoint, None, asked)
    await asyncio.wait_for(left.wait(), 5)
