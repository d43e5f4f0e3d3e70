"""CPU time of serving processes, by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import psutil

# The first of these marks in a process's title or command names its part. Processes without one count as Ray.
PARTS: Mapping[str, str] = {
    "EngineCore": "engines",
    "Fake": "engines",
    "EldrIngress": "ingress",
    "DecodeRouter": "router",
    "vllm::router": "router",
    "Proxy": "proxy",
    "haproxy": "proxy",
    "ServeReplica": "engine servers",
    "vllm.entrypoints": "engine servers",
}


def cpu_s() -> Counter[str]:
    """Return the CPU time so far of all live descendants of this process in seconds, by part."""
    spent: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times, command = process.cpu_times(), " ".join(process.cmdline())
            part = next((part for mark, part in PARTS.items() if mark in command), "ray")
            spent[part] += times.user + times.system
    return spent
