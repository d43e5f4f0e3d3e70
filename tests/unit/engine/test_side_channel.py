"""The restart of vLLM's listener for NIXL handshakes after a malformed packet has ended it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

from eldr_serve.engine.vllm.compat.nixl import SideChannel


class Scheduler:
    """The part of NIXL's scheduler side that its listener needs, without an engine, at a free port."""

    _nixl_handshake_listener = staticmethod(NixlBaseConnectorScheduler._nixl_handshake_listener)

    def __init__(self) -> None:
        self._nixl_handshake_listener_t: Any = None
        self._stop_event = threading.Event()
        self.side_channel_host = "127.0.0.1"
        with socket.create_server((self.side_channel_host, 0)) as free:
            self.side_channel_port = free.getsockname()[1]

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        ours: Any = self
        NixlBaseConnectorScheduler.set_xfer_handshake_metadata(ours, {})

    def end(self) -> None:
        self._stop_event.set()
        self._nixl_handshake_listener_t.join()


def test_a_malformed_packet_stops_the_listener_and_the_next_request_starts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler()
    channel = SideChannel(scheduler)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    channel.reopen_if_stopped()  # it was never opened
    assert scheduler._nixl_handshake_listener_t is None
    channel.open({(0, 0): object()})
    first = scheduler._nixl_handshake_listener_t
    channel.reopen_if_stopped()
    assert scheduler._nixl_handshake_listener_t is first
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(f"tcp://127.0.0.1:{scheduler.side_channel_port}")
        client.send_multipart([b"", b"\xc1 garbage"])
        first.join(20)
        assert not first.is_alive()
        client.setsockopt(zmq.LINGER, 0)
    other_process = socket.create_server(("127.0.0.1", scheduler.side_channel_port), reuse_port=False)
    channel.reopen_if_stopped()  # another process has the port
    assert "does not start" in caplog.text
    other_process.close()
    deadline = time.monotonic() + 20
    while scheduler._nixl_handshake_listener_t is None and time.monotonic() < deadline:
        channel.reopen_if_stopped()
    assert scheduler._nixl_handshake_listener_t.is_alive()
    assert not channel.has_stopped()
    scheduler.end()
