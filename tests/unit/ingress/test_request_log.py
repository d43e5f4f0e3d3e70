"""A request that has ended is one line of JSON, under the name that its answer carries."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_fleet import answering, refusing
from ingress_app import App, running_app
from router_talk import settled

from eldr_serve.channel import ChannelLost
from eldr_serve.errors import Overloaded

COMPLETIONS = "/v1/completions"
HELLO = {"model": "m", "prompt": "hello", "max_tokens": 2}
STREAMED = HELLO | {"stream": True}
TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
streams = answering(TOKEN, TOKEN + b"data: [DONE]\n\n")
GONE = ChannelLost("it is gone")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines so far."""
    caplog.set_level(logging.WARNING)

    def lines() -> list[dict[str, Any]]:
        said = [record.getMessage() for record in caplog.records]
        return [json.loads(line.removeprefix("request ")) for line in said if line.startswith("request ")]

    return lines


def failing_once(*chunks: Any) -> Any:
    """The first call is answered so, later ones well."""
    calls = iter([answering(*chunks)])
    return lambda sent: next(calls, streams)(sent)


async def test_a_request_that_nothing_has_failed_is_logged_only_if_all_are(log: Any) -> None:
    async with running_app(decode=streams) as app:
        assert (await app.post(COMPLETIONS, STREAMED)).status_code == 200
    assert not log()
    async with running_app(decode=streams, log_requests="all") as app:
        answer = await app.post(COMPLETIONS, STREAMED)
    (line,) = log()
    seconds = line.pop("seconds")
    assert list(seconds) == ["prefill", "place", "first_token", "stream", "total"]
    total = seconds.pop("total")
    assert 0 < sum(seconds.values()) <= total + 1e-5  # one follows the other; rounded to 1e-6 s
    assert line.pop("prefill") in ("r0", "r1")
    assert line == {
        "request": answer.headers["x-eldr-request"],
        "trace": None,
        "path": COMPLETIONS,
        "tenant": "",
        "status": 200,
        "error": None,
        "left": False,
        "policy": answer.headers["x-eldr-policy"],
        "reason": line["reason"],
        "decode": answer.headers["x-eldr-decode-worker"],
        "prompt_tokens": 7,
        "tokens": 2,
        "failures": [],
    }
    assert line["reason"]


async def test_a_request_that_was_tried_again_says_what_has_failed_it(log: Any) -> None:
    async with running_app(decode=failing_once(GONE)) as app:
        answer = await app.post(COMPLETIONS, STREAMED)
    assert answer.status_code == 200
    (line,) = log()
    assert line["request"] == answer.headers["x-eldr-request"]
    assert (line["status"], line["error"]) == (200, None)
    (failure,) = line["failures"]
    assert failure.startswith("decode replica ")
    assert failure.endswith(" failed: it is gone")
    assert line["decode"] == answer.headers["x-eldr-decode-worker"]
    assert line["decode"] not in failure


async def test_a_request_without_an_answer_is_named_in_its_refusal(log: Any) -> None:
    async with running_app(prefill=answering(GONE)) as app:
        answer = await app.post(COMPLETIONS, HELLO)
    assert answer.status_code == 503
    (line,) = log()
    assert line["request"] == answer.headers["x-eldr-request"]
    assert line["status"] == 503
    assert line["error"] == answer.json()["error"]["message"]
    assert len(line["failures"]) == 3
    assert line["decode"] is line["policy"] is None
    assert set(line["seconds"]) == {"prefill", "total"}


async def test_a_stream_that_is_lost_has_its_status_and_its_error(log: Any) -> None:
    async with running_app(decode=answering(TOKEN, GONE)) as app:
        answer = await app.post(COMPLETIONS, STREAMED)
    assert "engine_lost" in answer.text
    (line,) = log()
    assert (line["status"], line["error"]) == (200, "engine_lost")
    assert line["failures"]


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("refused", [refusing(400, "wrong"), Overloaded("all are full")])
async def test_what_is_refused_and_was_not_failed_is_logged_only_if_all_are(
    log: Any, every: bool, refused: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(prefill=answering(refused), **({"log_requests": "all"} if every else {})) as app:
        if isinstance(refused, Overloaded):  # no replica has room

            async def full(run: Any) -> None:
                raise refused

            monkeypatch.setattr(app.ingress._path.prefill, "prefill", full)
        answer = await app.post(COMPLETIONS, HELLO)
    assert answer.status_code == refused.status  # type: ignore[attr-defined]
    assert "x-eldr-request" in answer.headers
    assert [(line["status"], line["failures"]) for line in log()] == [(answer.status_code, [])] * every


async def test_a_fault_of_ours_is_logged(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_app() as app:
        monkeypatch.setattr(app.ingress._client, "place", lambda *args, **kwargs: 1 / 0)
        answer = await app.post(COMPLETIONS, HELLO)
    assert answer.status_code == 500
    (line,) = log()
    assert line["request"] == answer.headers["x-eldr-request"]
    assert (line["status"], line["failures"]) == (500, ["division by zero"])


async def _ask_and_leave(app: App, chunks: int) -> None:
    """A client that goes after so many chunks."""
    seen = asyncio.Event()
    messages = 0
    received = [{"type": "http.request", "body": json.dumps(STREAMED).encode()}]

    async def receive() -> Any:
        if received:
            return received.pop()
        await seen.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > chunks:  # the first has the headers
            seen.set()

    if not chunks:
        asyncio.get_running_loop().call_later(0.05, seen.set)
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": []}
    with contextlib.suppress(asyncio.CancelledError):
        await app.http(scope, receive, send)


@pytest.mark.parametrize(("chunks", "status"), [(0, None), (1, 200)])
async def test_a_client_that_leaves_is_no_failure(log: Any, chunks: int, status: int | None) -> None:
    async def endless(sent: Any) -> AsyncIterator[bytes]:
        while True:
            if chunks:
                yield TOKEN
            await asyncio.sleep(0.001)

    for every in ("failed", "all"):
        async with running_app(decode=endless, log_requests=every) as app:
            await _ask_and_leave(app, chunks)
            await settled(lambda app=app: app.ingress.gate.in_flight == 0)
        assert len(log()) == (every == "all")
    (line,) = log()
    assert (line["status"], line["left"], line["error"], line["failures"]) == (status, True, None, [])
    assert ("stream" in line["seconds"]) == bool(chunks)
