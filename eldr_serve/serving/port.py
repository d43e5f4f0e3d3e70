"""The port of an ingress replica, which replicas of one application share and no other application may."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import ray


class PortTaken(OSError):  # noqa: N818
    """The port belongs to another application or another process."""


class Port:
    """A bound socket, which does not listen yet.

    SO_REUSEPORT lets replicas of one application on one node share the port, and would let any other process
    of the same user join them. So every replica holds a shared lock on a file of the port, which says whose
    the port is. The kernel releases the lock when the process ends, however it ends.

    Args:
        owner: the application; replicas with the same owner share the port.

    Raises:
        PortTaken: another owner, or another program, has the port.
    """

    def __init__(self, host: str, port: int, owner: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self._lock: int | None = None
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.socket.bind((host, port))
            self._lock = _locked(self.number, owner)
        except PortTaken:
            self.socket.close()
            raise
        except OSError as error:
            self.socket.close()
            raise PortTaken(error.errno, f"{_cannot(port)}: {error.strerror} ({host})") from error

    @property
    def number(self) -> int:
        """Return the port's number."""
        number: int = self.socket.getsockname()[1]
        return number

    def release(self) -> None:
        """Give the port to whoever asks next; the server closes the socket."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def owner_of_port(application: str) -> str:
    """Return the name of an application that no application of another Ray cluster has."""
    cluster = ray.get_runtime_context().gcs_address if ray.is_initialized() else "none"
    return f"application {application!r} of the Ray cluster {cluster}"


def _locked(port: int, owner: str) -> int:
    path = Path(tempfile.gettempdir()) / f"eldr-serve-{os.getuid()}-port-{port}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # succeeds if nobody holds the port
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode(), 0)
    except BlockingIOError:
        pass
    # Whoever writes last before all hold the shared lock has the port, and all read its name.
    fcntl.flock(file, fcntl.LOCK_SH)
    found = os.pread(file, 4096, 0).decode()
    if found != owner:
        os.close(file)
        raise PortTaken(f"{_cannot(port)}: it is in use by {found}")
    return file


def _cannot(port: int) -> str:
    return f"the ingress cannot listen at port {port}; set `ingress.port` to a free one"
