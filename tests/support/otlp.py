"""A collector of OpenTelemetry spans in this process, by OTLP over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class HttpCollector:
    """A context manager of a collector, which stores all received requests.

    Attributes:
        received: (path, request) of each received request.
        http_url: URL of the collector, as exporters expect it.
    """

    def __init__(self) -> None:
        self.received: list[tuple[str, ExportTraceServiceRequest]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.received))
        self.http_url = f"http://127.0.0.1:{self._http.server_port}/v1/traces"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _handler(received: list[tuple[str, ExportTraceServiceRequest]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    return Handler
