"""The processes of an application that this process has started, and ways to kill, stop and resume them."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import psutil

# Ray's process titles; `gcs` is Ray's metadata store.
_TITLES = {
    "prefill": "ray::ServeReplica:eldr:Prefill",
    "decode": "ray::ServeReplica:eldr:Decode",
    "ingress": "ray::ServeReplica:eldr:EldrIngress",
    "router": "ray::DecodeRouter",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "gcs": "gcs_server",
}
ROLES = tuple(_TITLES)
_MAX_EXIT_S = 5.0  # maximum time until a large process has ended
_UNACCEPTED = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)  # states of unaccepted connections


def find_role(role: str) -> list[psutil.Process]:
    """Return the live processes of a role of the application `eldr`, oldest first."""
    return find_processes(_TITLES[role])


def find_processes(name: str) -> list[psutil.Process]:
    """Return live children of this process whose command contains `name`."""
    started = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if name in title and is_alive(process):
                started.append((process.create_time(), process.pid, process))
        except psutil.NoSuchProcess:
            continue
    return [process for *_, process in sorted(started, key=lambda entry: entry[:2])]


def kill(process: psutil.Process) -> set[int]:
    """Kill the process and return the client ports of connections that it held or could still accept.

    Return after its death: until then its socket accepts connections, which die with it.
    """
    stop(process)  # a stopped process accepts no more connections
    ports = set()
    for connection in psutil.net_connections("tcp"):
        is_own = connection.pid == process.pid
        if connection.raddr and (is_own or (connection.pid is None and connection.status in _UNACCEPTED)):
            ports.add(connection.raddr.port)
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + _MAX_EXIT_S
    while is_alive(process) and time.monotonic() < until:
        time.sleep(0.001)
    return ports


def listeners() -> Counter[int]:
    """Return how many processes listen at each TCP port of this machine."""
    connections = psutil.net_connections("tcp")
    listening = {(c.laddr.port, c.pid) for c in connections if c.laddr and c.status == psutil.CONN_LISTEN}
    return Counter(port for port, _ in listening)


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended. A zombie has ended."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stop(process: psutil.Process) -> None:
    """Send SIGSTOP."""
    os.kill(process.pid, signal.SIGSTOP)


def resume(process: psutil.Process) -> None:
    """Send SIGCONT."""
    if process.is_running():
        os.kill(process.pid, signal.SIGCONT)


def resources(role: str) -> list[tuple[int, float, int]]:
    """Return (pid, MiB of memory, file descriptors) of each process of a role."""
    usage = []
    for process in find_role(role):
        try:
            usage.append((process.pid, process.memory_info().rss / 2**20, process.num_fds()))
        except psutil.NoSuchProcess:
            continue
    return usage
