"""OpenTelemetry traces: one span for each request, with a child for each of its stages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from eldr_serve.ingress.options import TracingOptions
from eldr_serve.pipeline.context.request_context import RequestContext

_EXPORT_S = 5.0  # time limit of an export with its retries
_STOP_S = 3.0  # time limit of the last export when the ingress ends
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The spans of one ingress replica's requests.

    Requests do not wait for the export, because a thread of OpenTelemetry exports the spans in batches and
    drops them if the collector is unavailable.
    """

    def __init__(self, options: TracingOptions) -> None:
        # Ray sets the provider of the process, so the ingress has its own.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "eldr-serve"}),
            sampler=ParentBasedTraceIdRatio(options.sample),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(str(options.endpoint), timeout=_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("eldr_serve")

    def begin(self, path: str, headers: Mapping[str, str]) -> Trace:
        """Return the trace of a new request.

        Args:
            headers: the request's headers, with names in lower case; malformed trace headers are ignored.
        """
        return Trace(self._tracer, path, headers)

    async def stop(self) -> None:
        """Export the remaining spans, for at most `_STOP_S`."""
        stopping = threading.Thread(target=self._provider.shutdown, daemon=True)
        stopping.start()
        await asyncio.to_thread(stopping.join, _STOP_S)


class Trace:
    """The trace of one request, sampled or not.

    Attributes:
        id: id of the whole trace, 32 hexadecimal digits.
        headers: headers with which engines join the trace.
    """

    def __init__(self, tracer: Tracer, path: str, headers: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._since_epoch_ns = time.time_ns() - time.monotonic_ns()
        self._root = tracer.start_span(f"POST {path}", _PROPAGATOR.extract(headers), SpanKind.SERVER)
        self._context = set_span_in_context(self._root)
        self.id = format_trace_id(self._root.get_span_context().trace_id)
        self.headers: dict[str, str] = {}
        _PROPAGATOR.inject(self.headers, self._context)

    def end(self, context: RequestContext) -> None:
        """Create the spans."""
        if not self._root.is_recording():
            return
        record = context.record
        for stage in record.stages:
            start_ns = self._time_ns(stage.started_at_s)
            span = self._tracer.start_span(stage.name, self._context, start_time=start_ns)
            if stage.worker:
                span.set_attribute("eldr.worker", stage.worker)
            _set_error(span, stage.error)
            span.end(self._time_ns(stage.ended_at_s))
        self._root.set_attributes(_attributes(context))
        if record.status is None or not 400 <= record.status < 500:  # 4xx are the client's errors
            _set_error(self._root, record.error)
        self._root.end(self._time_ns(record.ended_at_s))

    def _time_ns(self, monotonic_s: float) -> int:
        """Convert a monotonic time to nanoseconds since 1970."""
        return self._since_epoch_ns + int(1e9 * monotonic_s)


def _set_error(span: Span, error: str) -> None:
    if error:
        span.set_status(StatusCode.ERROR, error)


def _attributes(context: RequestContext) -> dict[str, Any]:
    """Return the known attributes of the request's span."""
    line = context.log_line()
    attributes = {
        "http.response.status_code": line["status"],
        "gen_ai.usage.input_tokens": line["prompt_tokens"],
        "gen_ai.usage.output_tokens": line["tokens"],
        **{
            f"eldr.{key}": line[key]
            for key in ("request", "tenant", "policy", "reason", "disconnected", "failures")
        },
    }
    return {key: value for key, value in attributes.items() if value not in (None, "", [])}
