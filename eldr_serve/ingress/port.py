"""The listening port of an ingress replica.

Replicas of one application share it; a lock file names its owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import Literal

import ray

# taken: no process can listen there; shared: an ingress or Serve proxy of this user shares the port.
PortState = Literal["free", "shared", "taken"]


class PortTakenError(OSError):
    """The port belongs to another application or another process."""


class Port:
    """A socket that is bound to a port but does not listen yet.

    With SO_REUSEPORT the replicas of one application share the port of a node, but any other process of the
    same user could join them. Therefore every replica holds a shared lock on a file that names the owner of
    the port. The kernel releases the lock when the process ends, however it ends.

    Args:
        owner: name of the application. Replicas with the same owner share the port.

    Raises:
        PortTakenError: another owner or another program uses the port.
    """

    def __init__(self, host: str, port: int, owner: str) -> None:
        self.socket = _socket(host, share=True)
        self._lock: int | None = None
        try:
            self.socket.bind((host, port))
            self._lock = _lock_port(self.number, owner)
        except PortTakenError:
            self.socket.close()
            raise
        except OSError as error:
            self.socket.close()
            raise PortTakenError(error.errno, f"{_cannot_listen(port)}: {error.strerror} ({host})") from error

    @property
    def number(self) -> int:
        """Return the port number."""
        number: int = self.socket.getsockname()[1]
        return number

    def release(self) -> None:
        """Release the lock, so that another owner can take the port. The server closes the socket."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def port_state(host: str, port: int) -> PortState:
    """Return whether a process of this user could listen on a port.

    Raises:
        OSError: the host is not an address of this machine, or this user may not use the port.
    """
    tries: tuple[tuple[bool, PortState], ...] = ((False, "free"), (True, "shared"))
    for share, state in tries:
        with _socket(host, share=share) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return state
    return "taken"


def _socket(host: str, *, share: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    new = socket.socket(family, socket.SOCK_STREAM)
    new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
    return new


def owner_of_port(application: str) -> str:
    """Return a name for an application that is unique across Ray clusters."""
    cluster = ray.get_runtime_context().gcs_address if ray.is_initialized() else "none"
    return f"application {application!r} of the Ray cluster {cluster}"


def _lock_port(port: int, owner: str) -> int:
    path = Path(tempfile.gettempdir()) / f"eldr-serve-{os.getuid()}-port-{port}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PortTakenError(
            error.errno,
            f"the ingress cannot lock port {port} with the file {path}: {error.strerror}; "
            "make it writable, or set TMPDIR to a writable folder",
        ) from error
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this succeeds if no process holds the port
            os.ftruncate(file, 0)
            os.pwrite(file, owner.encode(), 0)
        # If several processes write their name, the last one before they get the shared lock owns the port.
        fcntl.flock(file, fcntl.LOCK_SH)
        actual_owner = os.pread(file, 4096, 0).decode(errors="replace")
        if actual_owner != owner:
            raise PortTakenError(f"{_cannot_listen(port)}: it is in use by {actual_owner}")
    except BaseException:
        os.close(file)
        raise
    return file


def _cannot_listen(port: int) -> str:
    return f"the ingress cannot listen on port {port}; set `ingress.port` to a free one"
