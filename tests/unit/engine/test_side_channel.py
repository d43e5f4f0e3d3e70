"""The restart of vLLM's listener for NIXL handshakes after a malformed packet has ended it."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

from eldr_serve.engine.vllm.compat.nixl import side_channel_stopped
from eldr_serve.engine.vllm.connector import EldrConnector


class Scheduler(SimpleNamespace):
    """The part of vLLM's scheduler half that its listener needs, without an engine."""

    set_xfer_handshake_metadata = NixlBaseConnectorScheduler.set_xfer_handshake_metadata
    _nixl_handshake_listener = staticmethod(NixlBaseConnectorScheduler._nixl_handshake_listener)


class Connector(EldrConnector):
    """Our connector without an engine, at a free port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._handshake = {}
        self.connector_scheduler: Any = Scheduler(
            _nixl_handshake_listener_t=None, _stop_event=threading.Event(),
            side_channel_host="127.0.0.1", side_channel_port=port,
        )  # fmt: skip

    def end(self) -> None:
        self.connector_scheduler._stop_event.set()
        self.connector_scheduler._nixl_handshake_listener_t.join()


def test_a_malformed_packet_stops_the_listener_and_the_next_request_starts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connector = Connector()
    scheduler = connector.connector_scheduler
    monkeypatch.setattr(
        EldrConnector.__mro__[1],
        "set_xfer_handshake_metadata_pp_aware",
        lambda self, metadata: self.connector_scheduler.set_xfer_handshake_metadata({}),
    )
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    connector._watch_side_channel()  # the listener was never started
    assert scheduler._nixl_handshake_listener_t is None
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    first = scheduler._nixl_handshake_listener_t
    connector._watch_side_channel()
    assert scheduler._nixl_handshake_listener_t is first
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(f"tcp://127.0.0.1:{scheduler.side_channel_port}")
        client.send_multipart([b"", b"\xc1 garbage"])
        first.join(20)
        assert not first.is_alive()
        client.setsockopt(zmq.LINGER, 0)
    taken = socket.create_server(("127.0.0.1", scheduler.side_channel_port), reuse_port=False)
    connector._watch_side_channel()  # another process has the port
    assert "does not start" in caplog.text
    taken.close()
    deadline = time.monotonic() + 20
    while scheduler._nixl_handshake_listener_t is None and time.monotonic() < deadline:
        connector._watch_side_channel()
    assert scheduler._nixl_handshake_listener_t.is_alive()
    assert not side_channel_stopped(scheduler)
    connector.end()
