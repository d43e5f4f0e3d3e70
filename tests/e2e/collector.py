"""A collector of OpenTelemetry's spans in this process, by OTLP over gRPC and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class Received:
    """A span; ids are hexadecimal.

    Attributes:
        parent: the span's id; "" of a root.
        source: attributes of the process that has made it.
        start_ns: since 1970.
    """

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    source: dict[str, Any]
    start_ns: int
    end_ns: int


class Collector(TraceServiceServicer):
    """A context; keeps what it is sent.

    Attributes:
        grpc, http: where it listens, as an exporter wants it.
    """

    def __init__(self) -> None:
        self._received: list[Received] = []
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._grpc)
        self.grpc = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http = f"http://127.0.0.1:{self._http.server_port}/v1/traces"

    def spans(self, trace: str) -> list[Received]:
        """Those of a trace that have come so far."""
        return [span for span in list(self._received) if span.trace == trace]

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        """Take what an exporter sends."""
        for of_process in request.resource_spans:
            source = _attributes(of_process.resource.attributes)
            self._received += [
                Received(
                    span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    _attributes(span.attributes), source, span.start_time_unix_nano, span.end_time_unix_nano,
                )
                for scope in of_process.scope_spans
                for span in scope.spans
            ]  # fmt: skip
        return ExportTraceServiceResponse()

    def __enter__(self) -> Collector:
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(1).wait()
        self._http.shutdown()
        self._http.server_close()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.Export(ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    return Handler


def _attributes(given: Iterable[Any]) -> dict[str, Any]:
    """By name, of OTLP's list of them."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value") for one in given}
