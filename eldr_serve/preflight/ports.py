"""Find out whether a port of this machine is in use."""

from __future__ import annotations

import errno
import socket
from typing import Literal

# taken: no process can listen there; shared: an ingress or Serve proxy of this user shares the port.
State = Literal["free", "shared", "taken"]


def state(host: str, port: int) -> State:
    """Return whether a process of this user could listen on a port.

    Raises:
        OSError: the host is not an address of this machine, or this user may not use the port.
    """
    tries: tuple[tuple[bool, State], ...] = ((False, "free"), (True, "shared"))
    for shared, found in tries:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return found
    return "taken"
