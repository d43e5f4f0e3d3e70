"""Answers of the ingress to clients and operators, and the end of a request whose client disconnects."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import httpx
import pytest
from ray.exceptions import RayError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from eldr_serve.channel import ChannelLostError
from eldr_serve.errors import OverloadedError, RequestRefusedError, SwapRefusedError
from eldr_serve.ingress import deployment, openai_endpoints
from eldr_serve.limits.keys import Keys, add_key, write_keys
from eldr_serve.pipeline.path_options import PathOptions
from tests.support.fake_fleet import answer_with, refusal
from tests.support.fake_router import FakeActor, wait_until
from tests.support.ingress_app import COMPLETIONS, HELLO, KEY, TOKEN, running_app, stream_answer
from tests.support.tables import unit_table

HUGE_SLOTS = {"name": "balance-route", "parameters": {"slots": 2**62}}


@pytest.mark.parametrize(
    ("admin_key", "key", "status", "sentence"),
    [
        (KEY, None, 401, ""),
        (KEY, "wrong", 401, ""),
        (KEY, KEY, 400, "got 4611686018427387904"),
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


@pytest.mark.parametrize("prefix", ["", "/name", "/eldr"])
async def test_changes_need_the_admin_key_under_a_route_prefix(prefix: str) -> None:
    actor = FakeActor()
    before = actor.state.settings
    async with running_app(actor=actor) as app:
        transport = httpx.ASGITransport(app.http, root_path=prefix)  # Serve's proxy sets it so
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("policy", "shadow", "table", "refit", "predictor", "experts", "drain"):
                assert (await client.put(f"{prefix}/eldr/{path}", content=b"{}")).status_code == 401
            assert (await client.delete(f"{prefix}/eldr/shadow")).status_code == 401
            assert actor.state.settings is before
            headers = {"authorization": f"Bearer {KEY}"}
            answer = await client.put(f"{prefix}/eldr/policy", json={"name": "random"}, headers=headers)
            assert answer.json()["policy"] == "random"
            assert (await client.post(f"{prefix}{COMPLETIONS}", json=HELLO)).status_code == 200
            assert (await client.get(f"{prefix}/version")).status_code == 200


async def test_endpoints_of_operators_check_the_admin_key_themselves() -> None:
    """Admission may not know them by their path."""
    async with running_app() as app:
        routes = [route for route in app.http.routes if route.path.startswith("/eldr/")]
        public = {"/eldr/", "/eldr/status", "/eldr/ready"}
        guarded = [route for route in routes if route.path not in public]
        assert len(guarded) == len(routes) - len(public)
        for route in guarded:
            request = Request({"type": "http", "method": "PUT", "path": "/elsewhere", "headers": []})
            with pytest.raises(RequestRefusedError) as refused:
                await route.endpoint(request)
            assert refused.value.status == 401


async def test_a_table_that_is_not_live_is_not_found() -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for table, status in ((None, 404), (unit_table(2).to_bytes(), 200)):
        async with running_app(actor=FakeActor(table=table)) as app:
            assert (await app.client.get("/eldr/table", headers=headers)).status_code == status


async def test_the_ready_endpoint_answers_200_once_the_engines_are_warm() -> None:
    async with running_app() as app:
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
        assert app.ingress._warmup.num_warm_pairs == 4
        assert [(await app.status())["ingress"][key] for key in ("ready", "all_warm")] == [True, True]
        app.decode.directory.publish({})
        assert (await app.client.get("/eldr/ready")).status_code == 503
        for status in (await app.status(), (await app.client.get("/eldr/status")).json()):
            assert [status["ingress"][key] for key in ("ready", "all_warm")] == [False, False]


async def test_an_overloaded_service_answers_503_with_retry_after() -> None:
    async with running_app(prefill=answer_with(OverloadedError("all are full", retry_after_s=7))) as app:
        answer = await app.post(COMPLETIONS, HELLO)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "overloaded"


async def test_a_lost_engine_is_a_503_for_every_endpoint() -> None:
    options = PathOptions(retry_backoff_s=0.0, decode_attempts=2)
    async with running_app(decode=answer_with(ChannelLostError("gone")), path_options=options) as app:
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


async def endless(sent: Any) -> AsyncIterator[bytes]:
    while True:
        yield TOKEN
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("error", [HTTPException(404, "it is gone"), ValueError("odd")])
async def test_every_error_of_an_admitted_request_has_its_id(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_endpoints, "_placement_headers", Mock(side_effect=error))
    async with running_app() as app:
        answer = await app.post(COMPLETIONS, HELLO)
        assert answer.status_code == getattr(error, "status_code", 500)
        assert answer.headers["x-eldr-request"]


async def test_an_answer_whose_headers_fail_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_endpoints, "_placement_headers", Mock(side_effect=ValueError("odd")))
    async with running_app(decode=endless) as app:
        assert (await app.post(COMPLETIONS, HELLO | {"stream": True})).status_code == 500
        assert app.decode.requests[-1].cancelled
        assert app.ingress.gate.in_flight == 0


async def test_the_ttft_of_a_stream_begins_with_its_arrival() -> None:
    """The body arrives late here; a wait for a permit counts in the same way."""
    late_s = 0.2

    async def body() -> AsyncIterator[bytes]:
        await asyncio.sleep(late_s)
        yield json.dumps(HELLO | {"stream": True}).encode()

    async with running_app(decode=stream_answer) as app:
        with patch.object(app.ingress._router, "record_stream") as record:
            assert (await app.client.post(COMPLETIONS, content=body())).status_code == 200
        (latencies,) = record.call_args.args
        assert latencies.ttft_s > late_s / 2


@pytest.mark.parametrize("n", [1, 2])
async def test_only_a_stream_of_one_answer_has_a_tpot(n: int) -> None:
    async with running_app(decode=answer_with(TOKEN, TOKEN, TOKEN, b"data: [DONE]\n\n")) as app:
        with patch.object(app.ingress._router, "record_stream") as record:
            assert (await app.post(COMPLETIONS, HELLO | {"stream": True, "n": n})).status_code == 200
        (latencies,) = record.call_args.args
        assert (latencies.tpot_s is None) == (n > 1)


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
@pytest.mark.parametrize("chunks_sent", [0, 2])
async def test_a_client_that_disconnects_during_a_chunk_cancels_its_call(chunks_sent: int, how: str) -> None:
    """The generator of the answer is suspended then, and nothing else ends it, as in a reference cycle."""
    sending, disconnected = asyncio.Event(), asyncio.Event()
    messages = 0

    async def send(message: Any) -> None:
        nonlocal messages
        messages += 1
        if messages > 1 + chunks_sent:  # the first message has the headers
            sending.set()
            await asyncio.Event().wait()

    async with running_app(decode=endless) as app:
        streaming = asyncio.create_task(app.stream(send, disconnected))
        await sending.wait()
        assert app.ingress.gate.in_flight == 1
        _ = streaming.cancel() if how == "cancelled" else disconnected.set()
        with contextlib.suppress(asyncio.CancelledError):
            await streaming
        assert app.decode.requests[-1].cancelled
        assert app.ingress.gate.in_flight == 0


async def test_a_second_application_does_not_start_at_the_port_of_the_first() -> None:
    async with running_app(port=0) as first:
        number = first.ingress._port.number
        with pytest.raises(OSError, match=rf"port {number}; .*in use by application 'test-\d+'"):
            async with running_app(port=number):
                pass
        first.ingress._port.release()
        first.ingress._port.socket.close()


async def test_health_version_and_metrics_have_vllms_paths_and_need_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text('{"tenants": {}}')
    async with running_app(keys_file=keys) as app:
        endpoints = ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")
        for method, path in endpoints:
            assert (await app.client.request(method, path)).status_code == 503  # no engine is warm
        app.ingress._status._warmup = SimpleNamespace(not_ready_reason=None)
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


async def test_embeddings_count_towards_the_tokens_of_a_tenant_and_tokenizing_does_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.json"
    write_keys(file, add_key(Keys(), "a", "key", {"tokens_per_minute": 10}))
    async with running_app(keys_file=file) as app:
        statuses = [
            (await app.post(path, {"model": "m", "input": "x" * 60, "prompt": "x"}, "key")).status_code
            for path in ("/tokenize", "/tokenize", "/v1/embeddings", "/v1/embeddings", "/tokenize")
        ]
        assert statuses == [200, 200, 200, 429, 200]


@pytest.mark.parametrize("chunks", [[], [b""], [asyncio.Event()]])
async def test_an_empty_or_late_answer_without_tokens_is_a_503(chunks: list[Any]) -> None:
    async with running_app(
        decode=answer_with(*chunks), path_options=PathOptions(first_token_timeout_s=0.1)
    ) as app:
        answer = await app.post("/tokenize", HELLO)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_client_is_told_not_to_repeat_a_request_that_has_lost_too_many_engines() -> None:
    lost = answer_with(ChannelLostError("it is dead"))
    options = PathOptions(retry_backoff_s=0.0, max_lost_engines=2)
    async with running_app(prefill=lost, path_options=options) as app:
        answer = await app.post(COMPLETIONS, HELLO)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "engines_lost")
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert len(app.prefill.sent) == 2


async def test_an_ejected_replica_gets_no_requests_for_answers_without_tokens() -> None:
    async with running_app() as app:
        outliers = app.ingress._services.outliers
        for _ in range(3):
            outliers.record_failure("r0", refusal(500))
        for _ in range(8):
            assert (await app.post("/tokenize", HELLO)).status_code == 200
        assert {sent.replica for sent in app.decode.sent} == {"r1"}


async def test_an_ingress_whose_http_server_has_ended_is_unhealthy() -> None:
    async with running_app(port=0) as app:
        await app.ingress.check_health()
        await wait_until(lambda: app.ingress._http and app.ingress._http._server.started)
        await app.ingress.check_health()
        app.ingress._http._server.should_exit = True
        await wait_until(app.ingress._started.done)
        with pytest.raises(RuntimeError, match="HTTP server stopped unexpectedly"):
            await app.ingress.check_health()
        app.ingress._port.release()


async def test_an_ingress_whose_metrics_fail_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "IngressMetrics", Mock(side_effect=ValueError("no metrics")))
    actor = FakeActor()
    async with running_app(actor=actor) as app:
        await app.ingress.check_health()
        await wait_until(lambda: actor.state.counters["background_failures"] == 1)
        assert actor.state.counters["failed_work:the export of metrics"] == 1
        await app.ingress.check_health()


async def test_an_ingress_whose_settings_the_router_refuses_does_not_start() -> None:
    actor: Any = FakeActor()
    actor.configure = AsyncMock(side_effect=SwapRefusedError("the table is for another model"))
    async with running_app(actor=actor) as app:
        for _ in range(2):
            with pytest.raises(SwapRefusedError, match="for another model"):
                await app.ingress.check_health()


async def test_an_ingress_configures_a_router_that_is_up_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deployment, "_CONFIGURE_WAIT_S", 0.02)
    monkeypatch.setattr(deployment, "_CONFIGURE_RETRY_S", 0.001)
    actor: Any = FakeActor()
    actor.configure = AsyncMock(side_effect=RayError("dead"))
    async with running_app(actor=actor) as app:
        await app.ingress.check_health()
        await wait_until(lambda: actor.configure.await_count > 3)
        assert caplog.text.count("DecodeRouter is not up yet") == 1
        actor.configure.side_effect = None
        await wait_until(app.ingress._configuring.done)
        await app.ingress.check_health()


async def test_the_domain_of_a_request_is_percent_decoded() -> None:
    actor = FakeActor()
    async with running_app(actor=actor) as app:
        for domain in ("code", "m%C3%A4rchen%20x"):
            assert (await app.post(COMPLETIONS, HELLO, **{"x-eldr-domain": domain})).status_code == 200
        assert [request.domain for request in actor.requests] == ["code", "märchen x"]


async def test_labels_reach_the_policy_percent_decoded() -> None:
    actor = FakeActor()
    labels = {"x-eldr-label-team": "m%C3%A4rchen%20x", "X-Eldr-Label-Tier-2": ""}
    async with running_app(actor=actor) as app:
        assert (await app.post(COMPLETIONS, HELLO, **labels)).status_code == 200
        assert (await app.post(COMPLETIONS, HELLO)).status_code == 200
        assert [request.labels for request in actor.requests] == [{"team": "märchen x", "tier-2": ""}, {}]


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"x-eldr-label-": "x"}, "the header 'x-eldr-label-' does not name a label"),
        ({"x-eldr-label-a_b": "x"}, "the header 'x-eldr-label-a_b' does not name a label"),
        ({f"x-eldr-label-{'n' * 33}": "x"}, "does not name a label: use 1 to 32 of a-z, 0-9 and '-' after"),
        ({"x-eldr-label-a": "%20" * 129}, "the header x-eldr-label-a has 129 characters; at most 128 are"),
        ({f"x-eldr-label-{n}": "x" for n in range(9)}, "9 headers x-eldr-label-NAME were sent; at most 8"),
    ],
)
async def test_odd_labels_get_400_before_prefill(headers: dict[str, str], sentence: str) -> None:
    async with running_app() as app:
        answer = await app.post(COMPLETIONS, HELLO, **headers)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
        assert not app.prefill.sent


async def test_the_longest_labels_are_accepted() -> None:
    actor = FakeActor()
    headers = {f"x-eldr-label-{n}{'n' * 31}": "%C3%A4" * 128 for n in range(8)}
    async with running_app(actor=actor) as app:
        assert (await app.post(COMPLETIONS, HELLO, **headers)).status_code == 200
        assert {*actor.requests[0].labels.values()} == {"ä" * 128}
        assert len(actor.requests[0].labels) == 8
