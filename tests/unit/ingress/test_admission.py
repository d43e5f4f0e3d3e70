"""Admission: validation, the concurrency limit, and the release of the permit however a request ends."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.requests.request_parsing import parse_request
from eldr_serve.errors import OverloadedError
from eldr_serve.ingress import body as request_body
from eldr_serve.ingress import openai_endpoints
from eldr_serve.ingress.admission import AdmissionMiddleware, Gate
from eldr_serve.ingress.body import BodyShare, parse_json
from eldr_serve.ingress.endpoints import ENDPOINTS, PUBLIC_PATHS
from eldr_serve.ingress.options import IngressOptions
from tests.support.fake_fleet import answer_with
from tests.support.fake_router import wait_until
from tests.support.ingress_app import CHAT, COMPLETIONS, HELLO, TOKEN, running_app
from tests.support.request_path import RecordedCounters
from tests.support.shipped import ROOT


def chat(content: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


def is_one_sentence(answer: httpx.Response, status: int) -> bool:
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status, answer.text
    return 0 < len(error["message"]) <= 500 and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat([5])),
        (CHAT, chat([None])),
        (CHAT, chat([{"type": "image_url"}])),
        (CHAT, chat({"a": 1})),
        (CHAT, {"model": "m", "messages": [5]}),
        (CHAT, {"model": "m", "messages": [{"content": "x"}]}),
        (CHAT, {"model": "m", "messages": [{"author": {"role": "user"}, "content": []}]}),
        (CHAT, {"model": "m", "messages": [{"role": "assistant", "tool_calls": [7]}]}),
        (CHAT, {"model": "m", "messages": [{"role": "assistant", "tool_calls": 7}]}),
        (CHAT, chat("x") | {"structured_outputs": 5}),
        (CHAT, chat("x") | {"response_format": {"type": "structural_tag"}}),
        (COMPLETIONS, HELLO | {"structured_outputs": 5}),
        (COMPLETIONS, HELLO | {"repetition_detection": {"max_pattern_size": 488829119, "min_count": 65019}}),
        (CHAT, chat("x") | {"logprobs": True, "logprob_token_ids": [5]}),
        (CHAT, chat("x") | {"repetition_detection": {"max_pattern_size": 488829119, "min_count": 65019}}),
        (COMPLETIONS, '{"model": "m", "prompt": "x", "n": NaN}'),
        (COMPLETIONS, '{"model": "m", "prompt": "x", "temperature": Infinity}'),
        (COMPLETIONS, '{"model": "m", "prompt": "x", "temperature": 1e999}'),
        (COMPLETIONS, r'{"model": "m", "prompt": "a\ud800b"}'),
        (COMPLETIONS, b'{"model": "m", "prompt": "a\xed\xa0\x80b"}'),
        (COMPLETIONS, HELLO | {"max_tokens": 10**30}),
        (COMPLETIONS, HELLO | {"prompt": [2**63]}),
        (COMPLETIONS, "9" * 5000),
        (COMPLETIONS, "[" * 100_000),
        (COMPLETIONS, ""),
        (COMPLETIONS, "null"),
        (COMPLETIONS, "[]"),
        (COMPLETIONS, '{"model": "m", "prompt": "x'),
        (COMPLETIONS, '{"model": "m", "prompt": "x"} y'),
        ("/v1/embeddings", chat([5])),
        ("/tokenize", r'{"model": "m", "prompt": "\udfff"}'),
    ],
)
async def test_an_invalid_request_gets_400_and_releases_its_permit(path: str, body: Any) -> None:
    async with running_app() as app:
        assert is_one_sentence(await app.post(path, body), 400)
        assert app.ingress.gate.in_flight == 0
        assert not app.valid_calls
        assert (await app.post(COMPLETIONS, HELLO)).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("where", ["data_parallel_rank", "x-data-parallel-rank"])
async def test_a_client_cannot_choose_the_rank(path: str, where: str) -> None:
    field, headers = ({where: 1}, {}) if "_" in where else ({}, {"X-Data-Parallel-Rank": "1"})
    async with running_app() as app:
        answer = await app.post(path, HELLO | field, **headers)
        assert is_one_sentence(answer, 400)
        error = answer.json()["error"]
        assert error["message"] == (
            f"{where} '1' is not supported, because the router chooses the rank: leave it out"
        )
        assert error["param"] == where
        assert not app.valid_calls


async def test_the_limit_holds_for_requests_that_arrive_together() -> None:
    go_on = asyncio.Event()
    async with running_app(prefill=answer_with(go_on, OverloadedError("over")), max_in_flight=2) as app:
        posts = [asyncio.create_task(app.post(COMPLETIONS, HELLO)) for _ in range(5)]
        done, pending = await asyncio.wait(posts, timeout=0.5)
        assert sorted(task.result().status_code for task in done) == [429] * 3
        assert len(pending) == app.ingress.gate.in_flight == 2
        go_on.set()
        assert {(await task).status_code for task in pending} == {503}
        assert app.ingress.gate.in_flight == 0


@pytest.mark.parametrize(
    "path",
    [COMPLETIONS, CHAT, "/v1/embeddings", "/v1/score", "/v1/rerank", "/rerank", "/tokenize", "/detokenize"],
)
async def test_a_full_ingress_refuses_all_engine_endpoints(path: str) -> None:
    async with running_app(max_in_flight=1) as app:
        app.ingress.gate.limiter.in_flight = 1
        answer = await app.post(path, HELLO)
        assert is_one_sentence(answer, 429)
        assert answer.json()["error"]["type"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        # Operators reach a full service.
        assert (await app.put("/eldr/policy", json={"name": "random"})).status_code == 200
        assert (await app.client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_disconnects_releases_its_permit(leg: str) -> None:
    async with running_app(**{leg: answer_with(asyncio.Event())}) as app:
        post = asyncio.create_task(app.post(COMPLETIONS, HELLO))
        await wait_until(lambda: getattr(app, leg).requests)
        assert app.ingress.gate.in_flight == 1
        post.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await post
        assert app.ingress.gate.in_flight == 0


async def test_a_stream_holds_its_permit_until_its_end() -> None:
    more = asyncio.Event()
    async with running_app(decode=answer_with(TOKEN, more, b"data: [DONE]\n\n")) as app:
        post = asyncio.create_task(app.post(COMPLETIONS, HELLO | {"stream": True}))
        await wait_until(lambda: app.decode.requests)
        assert app.ingress.gate.in_flight == 1
        more.set()
        assert (await post).status_code == 200
        assert app.ingress.gate.in_flight == 0


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"n": 9}, 9),
        ({"prompt": ["a"] * 9}, 9),
        ({"prompt": [[1], [2], [3]], "n": 3}, 9),
        ({"n": 2**40}, 2**40),
    ],
)
async def test_one_request_has_a_limited_number_of_answers(fields: dict[str, Any], answers: int) -> None:
    async with running_app(max_sequences=8) as app:
        answer = await app.post(COMPLETIONS, HELLO | fields)
        assert is_one_sentence(answer, 400)
        assert f"{answers} answers" in answer.text
        assert not app.decode.requests
        assert (await app.post(COMPLETIONS, HELLO | {"n": 8})).status_code == 200


async def test_a_field_of_another_endpoint_is_not_validated() -> None:
    async with running_app() as app:
        for odd in (5, " ", {"x": 1}, [5], None):
            assert (await app.post(COMPLETIONS, HELLO | {"messages": odd})).status_code == 200


async def test_unknown_adapters_are_refused_without_an_engine_call() -> None:
    async with running_app() as app:
        for path in (COMPLETIONS, "/tokenize"):
            for number in range(3):
                assert is_one_sentence(await app.post(path, HELLO | {"model": f"m:{number}"}), 404)
        assert not app.prefill.sent + app.decode.sent


async def test_the_openapi_document_is_served() -> None:
    async with running_app() as app:
        paths = (await app.client.get("/openapi.json")).json()["paths"]
    assert paths.keys() == {endpoint.documented_path for endpoint in ENDPOINTS}
    assert paths["/eldr/shadow"].keys() == {"put", "delete"}
    assert [parameter["name"] for parameter in paths["/v1/models/{model}"]["get"]["parameters"]] == ["model"]
    headers = [parameter["name"] for parameter in paths[COMPLETIONS]["post"]["parameters"]]
    assert headers == [
        "x-eldr-ttft-ms",
        "x-eldr-tpot-ms",
        "x-eldr-domain",
        "x-eldr-label-NAME",
        "traceparent",
    ]


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
async def test_a_gzip_body_is_decompressed_before_the_engines(encoding: str) -> None:
    async with running_app() as app:
        body = json.dumps(HELLO).encode()
        packed = gzip.compress(body[:9]) + gzip.compress(body[9:])  # two members, as in concatenated files
        for path in (COMPLETIONS, "/tokenize"):
            answer = await app.client.post(path, content=packed, headers={"content-encoding": encoding})
            assert answer.status_code == 200
            sent = app.decode.sent[-1]
            assert sent.body == body
            assert "content-encoding" not in sent.header["headers"]


@pytest.mark.parametrize(
    ("body", "encoding", "status", "sentence"),
    [
        (b"{}", "br", 415, "content-encoding 'br' is not supported: send the body plain or as gzip"),
        (b"{}", "gzip, gzip", 415, "'gzip, gzip' is not supported"),
        (b"{}", "gzip", 400, "the body with content-encoding gzip is not gzip"),
        (gzip.compress(b"{}", mtime=0)[:-9], "gzip", 400, "it ends early"),
        (gzip.compress(b" " * 2**26, 1, mtime=0), "gzip", 413, "larger than 1 MiB"),
        (gzip.compress(b" " * 2**20, mtime=0) * 500, "gzip", 413, "larger than 1 MiB"),
        (gzip.compress(b"", mtime=0) * 50_000, "gzip", 400, "it has more than 64 members"),
    ],
)
async def test_unsupported_broken_and_oversized_encoded_bodies_are_refused(
    body: bytes, encoding: str, status: int, sentence: str
) -> None:
    async with running_app(max_body_mib=8 if status != 413 else 1) as app:
        headers = {"content-encoding": encoding}
        tracemalloc.start()
        answer = await app.client.post(COMPLETIONS, content=body, headers=headers)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert is_one_sentence(answer, status)
        assert sentence in answer.text
        assert peak < 32 * 2**20
        assert not app.decode.sent


PARTS = 3 * request_body._PART_BYTES


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"a" * request_body._PART_BYTES, b"b" * (PARTS + 1), random.Random(0).randbytes(PARTS + 1)],
    ids=["empty", "byte", "part", "parts", "random"],
)
@pytest.mark.parametrize("members", [1, 3])
def test_a_body_is_decompressed_in_bounded_parts(content: bytes, members: int) -> None:
    parts = list(request_body._decompressed_parts(gzip.compress(content, mtime=0) * members))
    assert b"".join(parts) == content * members
    assert max(map(len, parts)) <= request_body._PART_BYTES


async def test_the_decompression_of_a_body_that_has_arrived_has_no_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow_parts(content: bytes) -> Iterator[bytes]:
        time.sleep(2 * upload.gate.options.body_timeout_s)
        yield content + b"y"

    upload = Upload(b"x", content_encoding="gzip")
    monkeypatch.setattr(request_body, "_decompressed_parts", slow_parts)
    assert await upload.status() == 200
    assert upload.bodies == [b"xy"]


class Upload:
    """A client that sends `chunks` to admission around an application that answers 200."""

    def __init__(self, *chunks: bytes, path: str = COMPLETIONS, method: str = "POST", **headers: str) -> None:
        options = IngressOptions(max_body_mib=0.001, body_timeout_s=0.2)
        self.counters = RecordedCounters()
        self.gate = Gate(options, hashlib.sha256(b"key").hexdigest(), self.counters)
        self.chunks = chunks
        self.received = 0
        self.bodies: list[bytes] = []
        self.head = (method, path, {name.replace("_", "-"): value for name, value in headers.items()})

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append(await Request(scope, receive).body())
        assert self.bodies != [b"breaks"]
        await Response()(scope, receive, send)

    async def _body(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.received += 1
            yield chunk
            if chunk == b"slow":
                await asyncio.Event().wait()

    async def status(self) -> int:
        transport = httpx.ASGITransport(AdmissionMiddleware(self._app, lambda: self.gate, PUBLIC_PATHS))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            method, path, headers = self.head
            pending_bytes = self.gate.bodies.used
            try:
                request = client.request(method, path, headers=headers, content=self._body())
                return (await request).status_code
            finally:
                assert self.gate.in_flight == 0
                assert self.gate.bodies.used == pending_bytes


async def test_a_body_arrives_whole_and_a_failing_application_releases_the_permit() -> None:
    upload = Upload(b"ab", b"", b"cd")
    assert await upload.status() == 200
    assert upload.bodies == [b"abcd"]
    with pytest.raises(AssertionError, match="breaks"):
        await Upload(b"breaks").status()


async def test_bodies_that_wait_for_their_rest_have_a_bounded_total_size() -> None:
    upload = Upload(b"x")
    shares = [BodyShare(upload.gate.bodies) for _ in range(2)]
    for share in shares:
        share.add(upload.gate.bodies.max_bytes // 2)
    assert await upload.status() == 503
    assert upload.counters.events == ["refused_pending_bodies"]
    shares[0].reduce_to(0)
    assert await upload.status() == 200


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_body_counts_until_its_request_ends(encoding: str) -> None:
    go = asyncio.Event()
    body = json.dumps(HELLO).encode()
    sent = gzip.compress(body) if encoding == "gzip" else body
    async with running_app(prefill=answer_with(go, OverloadedError("over"))) as app:
        headers = {"content-encoding": encoding}
        post = asyncio.create_task(app.client.post(COMPLETIONS, content=sent, headers=headers))
        await wait_until(lambda: app.prefill.requests)
        assert app.ingress.gate.bodies.used == len(body)  # another engine may need it
        go.set()
        assert (await post).status_code == 503
        assert app.ingress.gate.bodies.used == 0


async def test_a_body_is_received_once_and_then_the_disconnection_is_awaited() -> None:
    upload = Upload()
    disconnected = asyncio.Event()
    sent = [{"type": "http.request", "body": b"x"}]
    received: list[asyncio.Task[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.extend(asyncio.create_task(receive()) for _ in range(2))
        await asyncio.sleep(60)

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    admission = AdmissionMiddleware(app, lambda: upload.gate, PUBLIC_PATHS)
    answering = asyncio.create_task(admission(scope, receive, Mock()))
    await wait_until(lambda: received and received[0].done())
    assert received[0].result()["body"] == b"x"
    await asyncio.sleep(0.01)
    assert not received[1].done()
    disconnected.set()
    assert (await received[1])["type"] == "http.disconnect"
    await answering


ORIGIN = "https://chat.example.com"


@pytest.mark.parametrize(
    ("cors_origins", "allowed"), [((), None), (("https://other",), None), ((ORIGIN,), ORIGIN), (("*",), "*")]
)
async def test_scripts_of_other_pages_read_answers_only_if_their_origin_is_named(
    cors_origins: tuple[str, ...], allowed: str | None
) -> None:
    async with running_app(cors_origins=cors_origins) as app:
        answer = await app.post(COMPLETIONS, HELLO, origin=ORIGIN)
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, allowed)
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        preflight = await app.client.options(COMPLETIONS, headers=headers)
        assert preflight.headers.get("access-control-allow-origin") == allowed
        assert preflight.is_success == (allowed is not None)


async def test_scripts_of_other_pages_read_the_documented_headers_and_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs/http_api.md").read_text()
    section = page.split("## Headers of answers\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`x-.*?) \|", section, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}
    assert len(documented) > 6
    async with running_app(cors_origins=(ORIGIN,)) as app:
        answer = await app.post(COMPLETIONS, HELLO, origin=ORIGIN)
        exposed = set(answer.headers["access-control-expose-headers"].split(", "))
        assert exposed == documented | {"Retry-After", "x-should-retry"}
        monkeypatch.setattr(openai_endpoints, "_placement_headers", Mock(side_effect=ValueError("odd")))
        answer = await app.post(COMPLETIONS, HELLO, origin=ORIGIN)
        assert is_one_sentence(answer, 500)
        assert answer.headers["x-eldr-request"]
        assert answer.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://a b", ""])
def test_an_origin_has_a_scheme_a_host_and_no_path(origin: str) -> None:
    with pytest.raises(ValidationError, match="is no origin: give a scheme"):
        IngressOptions(cors_origins=(origin,))


def test_pending_bodies_have_room_for_one_compressed_body() -> None:
    with pytest.raises(ValidationError, match="at least twice max_body_mib"):
        IngressOptions(max_body_mib=16, max_pending_mib=31)


ADMIN = [{"path": path, "method": "PUT"} for path in ("/eldr/table", "/eldr/policy")]


@pytest.mark.parametrize(
    ("chunks", "options", "status", "received"),
    [
        ([b"x"], {"content_length": "2000"}, 413, 0),
        ([b"x" * 500] * 100, {}, 413, 3),
        ([b"slow"], {}, 408, 1),
        *[([b"x"], o, 401, 0) for o in ADMIN],
        *[
            ([b"x"], o | {"authorization": key}, 401, 0)
            for o in ADMIN
            for key in ("Bearer wrong", "key", "Basic key", "Bearer")
        ],
        ([b"x"], ADMIN[0] | {"authorization": "bearer key"}, 200, 1),
        # A table may be larger than a request, but not of any size.
        ([b"x" * 2000], ADMIN[0] | {"authorization": "Bearer key"}, 200, 1),
        ([], ADMIN[0] | {"authorization": "Bearer key", "content_length": str(65 * 2**20)}, 413, 0),
    ],
)
async def test_a_body_is_read_no_further_than_its_limit(
    chunks: list[bytes], options: dict[str, str], status: int, received: int
) -> None:
    upload = Upload(*chunks, **options)
    assert (await upload.status(), upload.received) == (status, received)
    assert len(upload.bodies) == (status == 200)


def test_standard_json_is_parsed_unchanged() -> None:
    value = {"a": [1, -1.5e10, "\U0001f600 \\ud800 99999999999999999999", None, True], "b": {"c": 2**63 - 1}}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_message_parts_are_lists_after_validation() -> None:
    body = json.dumps(chat([{"type": "text", "text": "x"}])).encode()
    content = parse_request(EngineRequest("chat", body)).messages[0]["content"]
    assert content == [{"type": "text", "text": "x"}]


def test_clients_cannot_set_transfer_parameters_or_request_ids() -> None:
    body = json.dumps(HELLO | {"kv_transfer_params": {"remote_host": "x"}, "request_id": "theirs"}).encode()
    request = parse_request(EngineRequest("completions", body, "ours", kv_transfer_params={"a": 1}))
    assert (request.kv_transfer_params, request.request_id) == ({"a": 1}, "ours")
    assert parse_request(EngineRequest("completions", body)).kv_transfer_params is None
