"""Connections between processes of a VirtualLoop that behave as those of TCP.

Bytes arrive in order and after a random latency. A connection can be stalled in one direction, cut so that
both ends notice or only one, or lost with its process, which may leave data in transit undelivered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.faults.virtual_time import Process, VirtualLoop, current

_NEVER_S = 1e6


class End(asyncio.Transport):
    """One end of a connection, in its process.

    Attributes:
        process: the process that reads and writes at this end.
        peer: the other end.
        protocol: asyncio's protocol at this end.
        open: whether this end is open. `close` ends that.
        lost: whether what is written here is dropped.
    """

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.process = process
        self.peer: End
        self.protocol: Any = None
        self.open = True
        self.lost = False
        self._network = network
        self._last_arrival_s = 0.0  # arrival time of the last write
        self._unread_bytes = 0

    def next_arrival_s(self) -> float:
        """Draw the arrival time of what is written now. It is not earlier than that of earlier data."""
        loop = self._network.loop
        self._last_arrival_s = max(self._last_arrival_s, loop.time() + self._network.latency_s())
        return self._last_arrival_s

    def stall(self, seconds: float) -> None:
        """Delay everything that is written later."""
        self._last_arrival_s = max(self._last_arrival_s, self._network.loop.time()) + seconds

    def write(self, data: Any) -> None:
        if self.open and not self.lost:
            self._unread_bytes += len(data)
            arrival_s = self.next_arrival_s()
            self._network.loop.call_at(
                arrival_s, self._arrive, bytes(data), context=self.peer.process.context.copy()
            )

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _arrive(self, data: bytes) -> None:
        self._unread_bytes -= len(data)
        if self.peer.open and not self.lost:
            self.peer.protocol.data_received(data)

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.peer.process.name, 0) if name == "peername" else default

    def is_closing(self) -> bool:
        return not self.open

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Close: this end is informed at once, the other later. Data in transit may be lost."""
        if self.open:
            self.open = False
            self.process.soon(self.protocol.connection_lost, None)
            self._reset()

    def _reset(self) -> None:
        if not self.lost:
            self._network.loop.call_at(
                self.next_arrival_s(), self.peer.connection_closed, context=self.peer.process.context.copy()
            )
            self.lost = self._network.rng.random() < 0.5

    def connection_closed(self) -> None:
        """Lose the connection because the other end, or the network, has closed it."""
        if self.open:
            self.open = False
            self.protocol.connection_lost(ConnectionResetError("connection reset by peer"))
            self._network.connections.discard_end(self)

    def die(self, *, silently: bool) -> None:
        """Close after a kill of the process.

        Args:
            silently: the process's machine is lost too, so the peer is not informed.
        """
        if self.open:
            self.open = False
            if silently:
                self.lost = True
            else:
                self._reset()


class _Connections(list[End]):
    """One end of each open connection."""

    def discard_end(self, end: End) -> None:
        self[:] = [other for other in self if other is not end and other.peer is not end]


class Network:
    """The network of one loop."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.connections = _Connections()
        self._listeners: dict[tuple[str, int], tuple[Callable[[], Any], Process]] = {}
        self._ports = 1

    def latency_s(self) -> float:
        """Draw a latency, mostly a short one."""
        return self.rng.uniform(0.0001, 0.002) if self.rng.random() < 0.95 else self.rng.uniform(0.002, 0.05)

    def listen(self, factory: Callable[[], Any], host: str) -> Any:
        """Do the work of `loop.create_server`."""
        self._ports += 1
        key = (host, self._ports)
        self._listeners[key] = (factory, current())
        return SimpleNamespace(
            sockets=[SimpleNamespace(getsockname=lambda: key)], close=lambda: self._listeners.pop(key, None)
        )

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[End, Any]:
        """Do the work of `loop.create_connection`."""
        await asyncio.sleep(self.latency_s())
        listener = self._listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        make_protocol, server = listener
        if not server.alive:  # its machine is gone
            await asyncio.sleep(_NEVER_S)
        client_end, server_end = End(self, current()), End(self, server)
        client_end.peer, server_end.peer = server_end, client_end
        client_end.protocol = factory()
        self.connections.append(client_end)
        # Data that is written at once arrives after this call, in order.
        self.loop.call_at(
            client_end.next_arrival_s(),
            self._accept,
            server_end,
            make_protocol,
            context=server.context.copy(),
        )
        client_end.protocol.connection_made(client_end)
        return client_end, client_end.protocol

    def _accept(self, end: End, make_protocol: Callable[[], Any]) -> None:
        end.protocol = make_protocol()
        end.protocol.connection_made(end)

    def ends_of(self, process: Process) -> list[End]:
        """Return the open ends of a process."""
        ends = [end for connection in self.connections for end in (connection, connection.peer)]
        return [end for end in ends if end.process is process and end.protocol is not None and end.open]

    def cut(self, end: End, *, half: bool) -> None:
        """Lose the connection.

        Args:
            end: one of its ends, which is informed.
            half: the other end is not informed, and receives nothing more.
        """
        for side in (end, end.peer):
            side.lost = True
        end.process.soon(end.connection_closed)
        if not half:
            end.peer.process.soon(end.peer.connection_closed, after_s=self.latency_s())

    def kill(self, process: Process, *, silently: bool = False) -> None:
        """Close the connections of a dead process."""
        for end in self.ends_of(process):
            end.die(silently=silently)
        if not silently:
            self._listeners = {
                key: listener for key, listener in self._listeners.items() if listener[1] is not process
            }
        self.connections[:] = [e for e in self.connections if e.open or e.peer.open]
