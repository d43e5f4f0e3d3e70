"""A traced request is one span with a child for each stage, in the client's trace if it has one."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from pydantic import ValidationError

from eldr_serve.channel import ChannelLostError
from eldr_serve.ingress import tracing
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.replicas import servers
from tests.support.engine_server import serving
from tests.support.fake_fleet import answer_with, in_turn, refusal
from tests.support.ingress_app import COMPLETIONS, HELLO, TOKEN, App, running_app
from tests.support.otlp import HttpCollector
from tests.support.request_path import END

HELLO = HELLO | {"max_tokens": 3}
STREAMED = HELLO | {"stream": True}
STAGES = ["prefill", "place", "transport", "first_token", "stream"]
GONE = ChannelLostError("it is gone")
ENDPOINT = "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = ({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} for flags in ("01", "00"))


class Traced:
    """A running ingress and its exported spans."""

    def __init__(self, app: App, exporter: InMemorySpanExporter) -> None:
        self.app = app
        self._exporter = exporter

    async def post(self, body: dict[str, Any] = STREAMED, **headers: str) -> Any:
        return await self.app.client.post(COMPLETIONS, json=body, headers=headers)

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """Return the root and its children, in order of their start."""
        spans = self.all()
        (root,) = (span for span in spans if span.kind is SpanKind.SERVER)
        children = [span for span in spans if span is not root]
        assert all(child.parent == root.context for child in children)
        return root, sorted(children, key=lambda span: span.start_time or 0)

    def all(self) -> tuple[ReadableSpan, ...]:
        self.app.ingress._tracing._provider.force_flush()
        return self._exporter.get_finished_spans()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context manager that runs a traced ingress."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint, timeout: exporter)

    @asynccontextmanager
    async def run_app(sample: float = 1.0, **answers: Any) -> AsyncIterator[Traced]:
        async with running_app(tracing={"endpoint": ENDPOINT, "sample": sample}, **answers) as app:
            yield Traced(app, exporter)

    return run_app


def over(channel: Any) -> Any:
    """Return an engine that forwards calls to the replica at the other end of the channel."""

    async def answer(sent: Any) -> AsyncIterator[Any]:
        call = channel.call(sent.method, sent.header | {"body": sent.body})
        while (chunk := await call.read()) is not None:
            yield chunk.payload, chunk.num_tokens, chunk.ids
        yield call.engine_report

    return answer


@pytest.mark.parametrize("body", [HELLO, STREAMED])
async def test_a_request_is_one_span_with_a_child_for_each_stage(traced: Any, body: dict[str, Any]) -> None:
    async with (
        serving(servers.PrefillServer) as (_, prefill),
        serving(servers.DecodeServer, router_name="router") as (_, decode),
        traced(prefill=over(prefill), decode=over(decode)) as service,
    ):
        answer = await service.post(body)
        root, children = service.spans()
    assert answer.status_code == 200
    assert [child.name for child in children] == STAGES
    ends = [root.start_time, *(child.end_time for child in children)]
    begins = [*(child.start_time for child in children), root.end_time]
    assert all(end <= begin + 1e6 for end, begin in zip(ends, begins, strict=True))  # two clocks: within 1 ms
    worker = answer.headers["x-eldr-decode-worker"]
    workers = [(child.attributes or {}).get("eldr.worker") for child in children]
    assert workers[1:] == [None, worker, worker, worker]
    assert workers[0] in ("r0", "r1")
    assert root.name == f"POST {COMPLETIONS}"
    assert root.parent is None
    assert root.resource.attributes["service.name"] == "eldr-serve"
    assert root.status.status_code is StatusCode.UNSET
    attributes = dict(root.attributes or {})
    assert attributes.pop("eldr.reason")
    assert attributes == {
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "eldr.request": answer.headers["x-eldr-request"],
        "eldr.policy": answer.headers["x-eldr-policy"],
        "eldr.disconnected": False,
    }
    assert answer.headers["x-eldr-trace"] == format_trace_id(root.context.trace_id)


async def test_a_stage_that_no_engine_reports_is_part_of_the_next(traced: Any) -> None:
    async with traced(decode=answer_with(TOKEN)) as service:
        await service.post()
        _, children = service.spans()
    assert [child.name for child in children] == ["prefill", "place", "first_token", "stream"]


async def test_an_incoming_trace_continues_in_the_ingress_and_the_engines(traced: Any) -> None:
    async with traced(sample=0.0) as service:
        answer = await service.post(HELLO, tracestate="them=1", **SAMPLED)
        root, children = service.spans()
        app = service.app
    assert root.parent is not None
    assert (format_trace_id(root.context.trace_id), format_span_id(root.parent.span_id)) == (TRACE, PARENT)
    assert len(children) == 4
    assert answer.headers["x-eldr-trace"] == TRACE
    for sent in (*app.prefill.requests, *app.decode.requests):
        headers = sent.header["headers"]
        assert headers["traceparent"] == f"00-{TRACE}-{format_span_id(root.context.span_id)}-01"
        assert headers["tracestate"] == "them=1"


async def test_the_request_log_has_the_trace(traced: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with traced(log_requests="all") as service:
        await service.post(**SAMPLED)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "eldr_serve.ingress.request_log"]
    assert json.loads(line.removeprefix("request "))["trace"] == TRACE


@pytest.mark.parametrize(("sample", "headers"), [(0.0, {}), (1.0, UNSAMPLED)])
async def test_an_unsampled_request_has_no_span_in_the_ingress_or_the_engines(
    traced: Any, sample: float, headers: dict[str, str]
) -> None:
    async with traced(sample) as service:
        answer = await service.post(HELLO, **headers)
        assert answer.status_code == 200
        assert not service.all()
        (sent,) = service.app.decode.requests
    version, trace, _, flags = sent.header["headers"]["traceparent"].split("-")
    assert version == "00"
    assert not int(flags, 16) & 1  # the sampled bit
    assert trace == answer.headers["x-eldr-trace"] == (TRACE if headers else trace)


async def test_a_malformed_trace_is_ignored(traced: Any) -> None:
    async with traced() as service:
        await service.post(HELLO, traceparent=f"00-{TRACE}-{'0' * 16}-01")
        root, _ = service.spans()
    assert root.parent is None
    assert format_trace_id(root.context.trace_id) != TRACE


async def test_a_failed_attempt_is_a_failed_child_of_a_successful_request(traced: Any) -> None:
    async with traced(decode=in_turn(answer_with(GONE), answer_with(TOKEN, END))) as service:
        answer = await service.post()
        root, children = service.spans()
    assert answer.status_code == 200
    assert root.status.status_code is StatusCode.UNSET
    (failure,) = (root.attributes or {})["eldr.failures"]  # type: ignore[misc]
    assert "it is gone" in failure
    attempt = ["prefill", "place", "first_token"]
    assert [child.name for child in children] == [*attempt, *attempt, "stream"]
    failed = [child for child in children if child.status.status_code is StatusCode.ERROR]
    assert failed == [children[2]]
    assert "it is gone" in (failed[0].status.description or "")


@pytest.mark.parametrize(
    ("answers", "status", "error", "failed_children"),
    [
        ({"prefill": answer_with(GONE)}, 500, StatusCode.ERROR, 3),
        ({"decode": answer_with(TOKEN, GONE)}, 200, StatusCode.ERROR, 1),
        ({"prefill": answer_with(refusal(400, "wrong"))}, 400, StatusCode.UNSET, 1),
    ],
)
async def test_an_incomplete_answer_is_a_failed_span_unless_the_client_is_at_fault(
    traced: Any, answers: Any, status: int, error: StatusCode, failed_children: int
) -> None:
    async with traced(**answers) as service:
        answer = await service.post()
        root, children = service.spans()
    assert answer.status_code == status == (root.attributes or {})["http.response.status_code"]
    assert answer.headers["x-eldr-trace"] == format_trace_id(root.context.trace_id)
    assert root.status.status_code is error
    failed = [child for child in children if child.status.status_code is StatusCode.ERROR]
    assert len(failed) == failed_children


async def test_without_tracing_a_clients_trace_passes_to_the_engines_unchanged() -> None:
    async with running_app() as app:
        answer = await app.client.post(COMPLETIONS, json=HELLO, headers=SAMPLED)
    assert "x-eldr-trace" not in answer.headers
    (sent,) = app.decode.requests
    assert sent.header["headers"]["traceparent"] == SAMPLED["traceparent"]


class StuckExporter(SpanExporter):
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.exported = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.go_on.wait()
        self.exported += len(spans)
        return SpanExportResult.FAILURE


async def test_a_stuck_exporter_loses_only_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = StuckExporter()
    for name in ("QUEUE_SIZE", "EXPORT_BATCH_SIZE"):
        monkeypatch.setenv(f"OTEL_BSP_MAX_{name}", "4")
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint, timeout: exporter)
    monkeypatch.setattr(tracing, "_STOP_S", 0.01)
    async with running_app(tracing={"endpoint": ENDPOINT}) as app:
        answers = await asyncio.gather(*(app.post(COMPLETIONS, HELLO) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
    assert not exporter.exported  # the ingress has stopped without it
    exporter.go_on.set()


async def test_spans_are_sent_to_the_endpoint() -> None:
    with HttpCollector() as collector:
        async with running_app(tracing={"endpoint": collector.http_url}) as app:
            await app.post(COMPLETIONS, HELLO)
        # The remaining spans are sent when the ingress stops.
    ((path, request),) = collector.received
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    (scope,) = resource.scope_spans
    assert {span.name for span in scope.spans} == {f"POST {COMPLETIONS}", *STAGES} - {"transport"}


@pytest.mark.parametrize(
    "options",
    [{}, {"endpoint": "host:4318"}, {"endpoint": ENDPOINT, "sample": 1.5}, {"endpoint": ENDPOINT, "x": 1}],
)
def test_invalid_tracing_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="tracing"):
        IngressOptions(tracing=options)  # type: ignore[arg-type]
