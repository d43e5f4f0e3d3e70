"""What the ingress says to clients and operators, and that nothing of a request outlives its answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from ingress_app import KEY, running_app
from one_path import answering
from ray.exceptions import RayActorError
from router_talk import FakeActor, settled

from eldr_serve.serving.errors import Overloaded

HELLO = {"model": "m", "prompt": "hello", "max_tokens": 2}
COMPLETIONS = "/v1/completions"
TOKEN = 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
streams = answering(TOKEN, "data: [DONE]\n\n")


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), (KEY, 400)])
async def test_changes_need_the_key(key: str | None, status: int) -> None:
    actor = FakeActor()
    async with running_app(actor=actor) as app:
        answer = await app.put("/eldr/table", key, content=b"no table")
        assert answer.status_code == answer.json()["error"]["code"] == status
        assert "\n" not in answer.json()["error"]["message"]
        assert actor.state.counters["table_swaps"] == 0


async def test_without_a_key_nothing_can_be_changed() -> None:
    async with running_app(admin_key=None) as app:
        assert (await app.put("/eldr/policy", json={"name": "random"})).status_code == 403


async def test_no_capacity_is_a_503_that_says_when_to_come_again() -> None:
    async with running_app(prefill=answering(Overloaded("all are full", retry_after_s=7))) as app:
        answer = await app.post(COMPLETIONS, HELLO)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["type"] == "overloaded"


async def test_an_engine_that_is_lost_is_a_503_for_every_endpoint() -> None:
    async with running_app(decode=answering(RayActorError())) as app:
        for path in (COMPLETIONS, "/tokenize"):
            assert (await app.post(path, HELLO)).status_code == 503


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_names_its_policy_and_a_stream_its_hand_over(streamed: bool) -> None:
    async with running_app(**({"decode": streams} if streamed else {})) as app:
        answer = await app.post(COMPLETIONS, HELLO | {"stream": streamed})
        assert answer.status_code == 200
        assert answer.headers["x-eldr-decode-worker"] in ("r0", "r1")
        assert answer.headers["x-eldr-policy"] == "locality-band"
        assert int(answer.headers["x-eldr-band"]) >= 1
        assert ("x-eldr-handover-ms" in answer.headers) == streamed


@pytest.mark.parametrize("chunks_sent", [0, 2])
async def test_a_client_that_goes_while_a_chunk_is_on_its_way_leaves_the_engines(chunks_sent: int) -> None:
    """Its generator is suspended then, and here, as in a reference cycle, nothing else ends it."""
    sending = asyncio.Event()
    endless = answering(*[TOKEN] * 99)
    messages = 0

    async def send(message: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > 1 + chunks_sent:  # the first message has the headers
            sending.set()
            await asyncio.Event().wait()

    body = b'{"model": "m", "prompt": "hello", "stream": true}'
    received = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if received:
            return received.pop()
        await asyncio.Event().wait()

    async with running_app(decode=endless) as app:
        scope = {
            "type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        streaming = asyncio.create_task(app.ingress.app(scope, receive, send))
        await sending.wait()
        assert app.ingress.gate.in_flight == 1
        streaming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await streaming
        await settled(lambda: app.decode.streams[-1].cancelled)
        assert app.ingress.gate.in_flight == 0
