"""The log has one JSON line for a request that has ended, with the request id of its answer."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eldr_serve.channel import ChannelLostError
from eldr_serve.errors import OverloadedError
from eldr_serve.ingress.request_log import RequestLog
from tests.support.fake_fleet import answer_with, in_turn, refusal
from tests.support.fake_router import wait_until
from tests.support.ingress_app import COMPLETIONS, HELLO, TOKEN, App, running_app

STREAMED = HELLO | {"stream": True}
two_tokens = answer_with(TOKEN, TOKEN + b"data: [DONE]\n\n")
GONE = ChannelLostError("it is gone")
LOGGER = logging.getLogger("eldr_serve.ingress.request_log")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that returns the logged records."""

    def records() -> list[dict[str, Any]]:
        logged = [record for record in caplog.records if record.name == LOGGER.name]
        assert {record.levelno for record in logged} <= {logging.INFO}
        return [json.loads(record.getMessage().removeprefix("request ")) for record in logged]

    return records


async def test_a_request_without_failures_is_logged_only_if_all_are(log: Any) -> None:
    async with running_app(decode=two_tokens) as app:
        assert (await app.post(COMPLETIONS, STREAMED)).status_code == 200
    assert not log()
    async with running_app(decode=two_tokens, log_requests="all") as app:
        answer = await app.post(COMPLETIONS, STREAMED)
    (line,) = log()
    seconds = line.pop("seconds")
    assert list(seconds) == ["prefill", "place", "first_token", "stream", "total"]
    total = seconds.pop("total")
    assert 0 < sum(seconds.values()) <= total + 1e-5  # consecutive stages; rounded to 1e-6 s
    assert line.pop("prefill") in ("r0", "r1")
    assert line.pop("reason")
    headers = {"request": "request", "policy": "policy", "decode": "decode-worker"}
    assert line == {name: answer.headers[f"x-eldr-{header}"] for name, header in headers.items()} | {
        "trace": None,
        "path": COMPLETIONS,
        "tenant": "",
        "status": 200,
        "error": None,
        "disconnected": False,
        "local_prefill": False,
        "prompt_tokens": 7,
        "tokens": 2,
        "failures": [],
    }


async def test_lines_reach_stderr_though_no_logger_above_has_a_handler_as_in_a_replica(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])  # pytest's
        patch.setattr(LOGGER, "handlers", [])
        for _ in range(2):  # a second log in the process writes no line twice
            async with running_app(log_requests="all") as app:
                assert (await app.post(COMPLETIONS, HELLO)).status_code == 200
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("request ")]
    assert [json.loads(line.removeprefix("request "))["status"] for line in lines] == [200, 200]


def test_a_log_itself_changes_no_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "level", logging.NOTSET)
    RequestLog(every=True)
    assert (LOGGER.handlers, LOGGER.level) == ([], logging.NOTSET)


async def test_a_retried_request_is_logged_with_its_failures(log: Any) -> None:
    async with running_app(decode=in_turn(answer_with(GONE), two_tokens)) as app:
        answer = await app.post(COMPLETIONS, STREAMED)
    assert answer.status_code == 200
    (line,) = log()
    assert line["request"] == answer.headers["x-eldr-request"]
    assert (line["status"], line["error"]) == (200, None)
    (failure,) = line["failures"]
    assert re.fullmatch("decode worker .* failed: it is gone", failure)
    assert line["decode"] == answer.headers["x-eldr-decode-worker"]
    assert line["decode"] not in failure


async def test_a_failed_request_is_logged_with_the_id_of_its_error_response(log: Any) -> None:
    async with running_app(prefill=answer_with(GONE)) as app:
        answer = await app.post(COMPLETIONS, HELLO)
    assert answer.status_code == 500
    (line,) = log()
    assert line["request"] == answer.headers["x-eldr-request"]
    assert line["status"] == 500
    assert line["error"] == answer.json()["error"]["message"]
    assert len(line["failures"]) == 3
    assert line["decode"] is line["policy"] is None
    assert set(line["seconds"]) == {"prefill", "total"}


async def test_a_lost_stream_is_logged_with_status_and_error(log: Any) -> None:
    async with running_app(decode=answer_with(TOKEN, GONE)) as app:
        answer = await app.post(COMPLETIONS, STREAMED)
    assert "engine_lost" in answer.text
    (line,) = log()
    assert (line["status"], line["error"]) == (200, "engine_lost")
    assert line["failures"]


@pytest.mark.parametrize("log_requests", ["failed", "all"])
@pytest.mark.parametrize("refused", [refusal(400, "wrong"), OverloadedError("all are full")])
async def test_a_refused_request_is_logged_only_if_all_are(
    log: Any, log_requests: str, refused: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_app(prefill=answer_with(refused), log_requests=log_requests) as app:
        if isinstance(refused, OverloadedError):  # no replica has room

            async def full(*_: Any) -> None:
                raise refused

            monkeypatch.setattr(app.ingress._services.prefill, "_prefill", full)
        answer = await app.post(COMPLETIONS, HELLO)
    assert answer.status_code == refused.status  # type: ignore[attr-defined]
    assert "x-eldr-request" in answer.headers
    logged = [(line["status"], line["failures"]) for line in log()]
    assert logged == [(answer.status_code, [])] * (log_requests == "all")


async def test_an_internal_error_is_logged(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_app() as app:
        monkeypatch.setattr(app.ingress._router, "place", lambda *args, **kwargs: 1 / 0)
        answer = await app.post(COMPLETIONS, HELLO)
    assert answer.status_code == 500
    (line,) = log()
    assert line["request"] == answer.headers["x-eldr-request"]
    assert (line["status"], line["failures"]) == (500, ["division by zero"])


async def stream_and_leave(app: App, chunks: int) -> None:
    """Request a stream and disconnect after this number of chunks."""
    disconnected = asyncio.Event()
    messages = 0

    async def send(message: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > chunks:  # the first message has the headers
            disconnected.set()

    if not chunks:
        asyncio.get_running_loop().call_later(0.05, disconnected.set)
    with contextlib.suppress(asyncio.CancelledError):
        await app.stream(send, disconnected)


@pytest.mark.parametrize(("chunks", "status"), [(0, None), (1, 200)])
async def test_a_client_that_disconnects_is_no_failure(log: Any, chunks: int, status: int | None) -> None:
    async def endless(sent: Any) -> AsyncIterator[bytes]:
        while True:
            if chunks:
                yield TOKEN
            await asyncio.sleep(0.001)

    for log_requests in ("failed", "all"):
        async with running_app(decode=endless, log_requests=log_requests) as app:
            await stream_and_leave(app, chunks)
            await wait_until(lambda app=app: app.ingress.gate.in_flight == 0)
        assert len(log()) == (log_requests == "all")
    (line,) = log()
    assert (line["status"], line["disconnected"], line["error"], line["failures"]) == (status, True, None, [])
    assert ("stream" in line["seconds"]) == bool(chunks)
