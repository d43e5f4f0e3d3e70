"""A collector of OpenTelemetry's spans, in this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """One that came; ids in hexadecimal digits, `parent` empty where it has none."""

    service: str
    name: str
    trace: str
    id: str
    parent: str


class Collector:
    """Takes OTLP over HTTP at `url` while it is a context."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        spans = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    said = {a.key: a.value.string_value for a in of_resource.resource.attributes}
                    spans.extend(
                        Span(
                            said.get("service.name", ""),
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                        )
                        for of_scope in of_resource.scope_spans
                        for span in of_scope.spans
                    )
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def of(self, trace: str) -> list[Span]:
        """What came of one trace so far."""
        return [span for span in list(self._spans) if span.trace == trace]

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
