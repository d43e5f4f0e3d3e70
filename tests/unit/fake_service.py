"""A service that answers like ours, with delays that a test knows; real HTTP, no engines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "fake-key"
REPLICAS = ("decode-a", "decode-b")
_POLICIES = ("shortest-queue", "random", "locality-band")


class FakeService(ThreadingHTTPServer):
    """Counts and times what it is sent.

    Attributes:
        first_s, gap_s: delay of the first token and of each further one.
        fail_every: each so-manieth request gets a 503; 0: none.
        reports_steps: whether its engines' steps are in the status.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.first_s, self.gap_s, self.fail_every = 0.05, 0.01, 0
        self.reports_steps = False
        self.policy: dict[str, Any] = {"name": "locality-band", "parameters": {"band": 0.2}}
        self.policies_set: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.arrived_s: list[float] = []
        self.in_flight = 0
        self.steps = 0
        self.lock = threading.Lock()

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        service = self.server
        status = {
            "policy": service.policy["name"], "parameters": service.policy["parameters"],
            "workers": [{"replica": r, "in_flight": service.in_flight // 2} for r in REPLICAS],
            "leases": service.in_flight, "counters": {"placed": len(service.bodies)},
            "decode_totals": self._totals() if service.reports_steps else None,
        }  # fmt: skip
        if self.path == "/eldr/status":
            self._answer(200, status)
        else:
            self._refuse(404, "no such path")

    def do_PUT(self) -> None:
        change = json.loads(self._body())
        if self.headers.get("authorization") != f"Bearer {KEY}":
            self._refuse(401, "the admin key is missing or wrong")
        elif change["name"] not in _POLICIES:
            self._refuse(400, f"unknown policy {change['name']!r}")
        else:
            self.server.policy = change
            self.server.policies_set.append(change["name"])
            self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self._body())
        service = self.server
        with service.lock:
            service.bodies.append(body)
            service.arrived_s.append(time.perf_counter())
            number = len(service.bodies)
            service.in_flight += 1
            service.steps += body["max_tokens"]
        try:
            if service.fail_every and number % service.fail_every == 0:
                self._refuse(503, "overloaded")
            else:
                self._stream(body["max_tokens"])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client went away
        finally:
            with service.lock:
                service.in_flight -= 1

    def _stream(self, tokens: int) -> None:
        time.sleep(self.server.first_s)
        self.send_response(200)
        for name, value in {
            "content-type": "text/event-stream", "transfer-encoding": "chunked",
            "x-eldr-decode-worker": REPLICAS[0], "x-eldr-policy": self.server.policy["name"],
            "x-eldr-handover-ms": "12.5",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(tokens):
            if number:
                time.sleep(self.server.gap_s)
            self._event({"choices": [{"delta": {"content": "x"}}]})
        self._event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": 3}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _totals(self) -> dict[str, float]:
        """Every step: 2 requests, 20 active experts, 10 ms."""
        steps = self.server.steps
        return {"steps": steps, "requests": 2 * steps, "active_experts": 20 * steps, "seconds": 0.01 * steps}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message}})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def fake_service() -> Iterator[FakeService]:
    """Runs until the end of the block."""
    service = FakeService()
    threading.Thread(target=service.serve_forever, daemon=True).start()
    try:
        yield service
    finally:
        service.shutdown()
        service.server_close()
