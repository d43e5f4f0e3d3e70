"""Unused TCP ports."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return an unused TCP port below the ephemeral ports of Linux and macOS.

    A starting engine opens many ephemeral ports, and its side channel's port last.
    """
    for port in random.sample(range(28000, 32768), 64):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("of 64 ports from 28000 to 32767 none is free")
