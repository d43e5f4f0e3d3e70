"""The Messages API at the ingress: the path of a request, keys, and the form of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eldr_serve.channel import ChannelLostError
from eldr_serve.engine.calls import error_event
from eldr_serve.limits.keys import Keys, add_key, write_keys
from eldr_serve.request import RequestFields, prompt_head, prompt_key
from tests.support.fake_fleet import answer_with
from tests.support.ingress_app import running_app

PATH = "/v1/messages"
HI: dict[str, Any] = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


async def test_a_message_is_prefilled_placed_and_decoded() -> None:
    async with running_app(decode=answer_with(b'{"type":"message"}')) as app:
        answer = await app.post(PATH, HI)
        assert (answer.status_code, answer.content) == (200, b'{"type":"message"}')
        assert answer.headers["x-eldr-decode-worker"] in ("r0", "r1")
        methods = [sent.method for sent in app.prefill.sent + app.decode.sent]
        assert methods == ["prefill", "generate"]
        assert {sent.header["method"] for sent in app.valid_calls} == {"messages"}


async def test_a_stream_ends_with_its_stop_event() -> None:
    start = b"event: message_start\ndata: {}\n\n"
    async with running_app(decode=answer_with(start, STOP, ChannelLostError("late"))) as app:
        assert (await app.post(PATH, HI | {"stream": True})).content == start + STOP


async def test_a_stream_whose_engine_is_lost_ends_with_an_error_event() -> None:
    start = b"event: message_start\ndata: {}\n\n"
    async with running_app(decode=answer_with(start, ChannelLostError("dead"))) as app:
        answer = await app.post(PATH, HI | {"stream": True})
    why = f"decode worker {answer.headers['x-eldr-decode-worker']} failed: dead"
    message = f"this answer is incomplete: {why}; send the request again"
    assert answer.content == start + error_event("engine_lost", message, "messages")


@pytest.mark.parametrize(
    ("body", "status"), [({"model": "other"}, 404), ({"max_tokens": 0}, 400), ({"messages": 1}, 400)]
)
async def test_errors_have_anthropics_form(body: dict[str, Any], status: int) -> None:
    async with running_app() as app:
        answer = await app.post(PATH, HI | body)
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["message"]
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert (await app.client.get(PATH)).json()["type"] == "error"


async def test_anthropics_clients_send_their_key_in_a_header_of_its_own(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json", add_key(Keys(), "a", "secret", {}))
    async with running_app(keys_file=tmp_path / "keys.json") as app:
        refused = await app.post(PATH, HI)
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert (await app.post(PATH, HI, **{"x-api-key": "wrong"})).status_code == 401
        assert (await app.post(PATH, HI, **{"x-api-key": "secret"})).status_code == 200
        assert all("x-api-key" not in sent.header["headers"] for sent in app.prefill.sent)


def test_the_system_prompt_is_part_of_the_prompt() -> None:
    first, second = (RequestFields(**HI, system=system) for system in ("x", "y"))
    assert prompt_key(first) != prompt_key(second)
    assert prompt_head(first) != prompt_head(second)
    assert prompt_head(first).startswith(b"system:x\nuser:hi")
