"""The Responses API at the ingress: the path of a request, and what placement reads of it."""

from __future__ import annotations

from typing import Any

import pytest

from eldr_serve.channel import ChannelLostError
from eldr_serve.engine.calls import error_event
from eldr_serve.request import RequestFields, conversation, max_new_tokens, prompt_head, prompt_key
from tests.support.fake_fleet import answer_with
from tests.support.ingress_app import running_app

PATH = "/v1/responses"
HI: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 2}
CREATED = b"event: response.created\ndata: {}\n\n"
COMPLETED = b"event: response.completed\ndata: {}\n\n"


async def test_a_response_is_prefilled_placed_and_decoded() -> None:
    async with running_app(decode=answer_with(b'{"object":"response"}')) as app:
        answer = await app.post(PATH, HI)
        assert (answer.status_code, answer.content) == (200, b'{"object":"response"}')
        assert [sent.method for sent in app.prefill.sent + app.decode.sent] == ["prefill", "generate"]


@pytest.mark.parametrize("field", ["background", "previous_response_id"])
async def test_what_needs_stored_responses_reaches_no_decode_engine(field: str) -> None:
    async with running_app() as app:
        answer = await app.post(PATH, HI | {field: {"background": True}.get(field, "resp_1")})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert not app.decode.sent


async def test_a_lost_stream_ends_with_an_error_event_unless_it_is_complete() -> None:
    async with running_app(decode=answer_with(CREATED, ChannelLostError("dead"))) as app:
        answer = await app.post(PATH, HI | {"stream": True})
        why = f"decode worker {answer.headers['x-eldr-decode-worker']} failed: dead"
        message = f"this answer is incomplete: {why}; send the request again"
        assert answer.content == CREATED + error_event("engine_lost", message, "responses")
    async with running_app(decode=answer_with(CREATED, COMPLETED, ChannelLostError("late"))) as app:
        assert (await app.post(PATH, HI | {"stream": True})).content == CREATED + COMPLETED


def test_placement_reads_input_and_instructions() -> None:
    text = RequestFields(**HI)
    turns = RequestFields(**HI | {"input": [{"role": "user", "content": "hi"}]})
    assert conversation(text) == conversation(turns) == [{"role": "user", "content": "hi"}]
    assert prompt_key(text) == prompt_key(turns)
    brief = RequestFields(**HI, instructions="be brief")
    assert prompt_head(brief).startswith(b"system:be brief\nuser:hi")
    assert max_new_tokens(text) == 2
