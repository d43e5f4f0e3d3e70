"""The processes of an application that this process has started, to be killed and stopped."""

from __future__ import annotations

import os
import signal
import time

import psutil

# What Ray calls them; a stop of `gcs` stops Ray's store of who and where.
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
_DYING_S = 5.0  # that a large process may take to end
_WAITING = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)  # of one that no process has taken: to be taken


def of(role: str) -> list[psutil.Process]:
    """Those of the application `eldr` that live, oldest first."""
    return named(_TITLES[role])


def named(name: str) -> list[psutil.Process]:
    """Those whose command has it in it; children of this process alone, so nobody else's."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if name in title and lives(process):
                found.append((process.create_time(), process.pid, process))
        except psutil.NoSuchProcess:
            continue
    return [process for *_, process in sorted(found, key=lambda entry: entry[:2])]


def kill(process: psutil.Process) -> set[int]:
    """As kill -9; returns the ports of those whose connections it held, or would have taken next.

    Only once it is dead: until then its socket goes on taking connections, which die with it.
    """
    stop(process)  # so that it takes no more of them meanwhile
    held = set()
    for connection in psutil.net_connections("tcp"):
        taken = connection.pid == process.pid
        if connection.raddr and (taken or (connection.pid is None and connection.status in _WAITING)):
            held.add(connection.raddr.port)
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + _DYING_S
    while lives(process) and time.monotonic() < until:
        time.sleep(0.001)
    return held


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended, be it that nobody has asked how."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stop(process: psutil.Process) -> None:
    """As SIGSTOP."""
    os.kill(process.pid, signal.SIGSTOP)


def go_on(process: psutil.Process) -> None:
    """As SIGCONT."""
    if process.is_running():
        os.kill(process.pid, signal.SIGCONT)


def resources(role: str) -> list[tuple[int, float, int]]:
    """(pid, MiB of memory, descriptors) of each."""
    found = []
    for process in of(role):
        try:
            found.append((process.pid, process.memory_info().rss / 2**20, process.num_fds()))
        except psutil.NoSuchProcess:
            continue
    return found
