"""Ports of this machine that other processes listen at."""

from __future__ import annotations

import errno
import socket
from typing import Literal

# taken: nobody may listen there; shared: an ingress or a Serve proxy of this user does, and lets others.
State = Literal["free", "shared", "taken"]


def state(host: str, port: int) -> State:
    """Return whether a process of this user could listen at a port.

    Raises:
        OSError: the host is no address of this machine, or the port is not for this user.
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
