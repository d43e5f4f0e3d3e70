"""A collector of OpenTelemetry spans in this process, by OTLP over gRPC and HTTP."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.support.otlp import HttpCollector


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span. Ids are hexadecimal.

    Attributes:
        parent: id of the parent span; "" for a root.
        source: resource attributes of the process that created it.
        start_ns: Unix time.
    """

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    source: dict[str, Any]
    start_ns: int


class Collector(HttpCollector, TraceServiceServicer):
    """An HttpCollector that also accepts gRPC.

    Attributes:
        grpc_url: its gRPC address, in an exporter's format.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._grpc)
        self.grpc_url = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"

    def spans(self, trace: str) -> list[ReceivedSpan]:
        """Return the spans of a trace received so far."""
        return [
            ReceivedSpan(
                span.name,
                trace,
                span.span_id.hex(),
                span.parent_span_id.hex(),
                _attributes(span.attributes),
                _attributes(process_spans.resource.attributes),
                span.start_time_unix_nano,
            )
            for _, request in list(self.received)
            for process_spans in request.resource_spans
            for scope in process_spans.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace
        ]

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.received.append(("grpc", request))
        return ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._grpc.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(1).wait()
        super().__exit__(*_)


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    """Return OTLP's list of attributes as a dictionary."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}
