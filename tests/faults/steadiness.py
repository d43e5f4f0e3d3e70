"""Measurements of the application's processes under load, and the limits that they must keep.

Memory, file descriptors and tasks may not grow from the end of the warm-up to the end of the run by more than
the limits below, and the event loops of ingresses and the router may be blocked only while they are stopped.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadgen import processes

WATCHED = ("ingress", "router", "prefill", "decode")
LOOPS = ("ingress", "router")  # roles whose event loops may never be blocked; engines block theirs to compile
MAX_GROWTH_MIB, MAX_GROWTH_SHARE = 64.0, 0.25  # allowed growth after warm-up; a violation exceeds both
MORE_DESCRIPTORS = 64
MORE_TASKS = 64
_SAMPLE = re.compile(r"^ray_eldr_loop_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Worker = tuple[str, str]  # role, Ray's id of the process


def samples(metrics: str) -> Iterator[tuple[str, Worker, float]]:
    """Yield (metric, worker, value) of each process's event loop, from Ray's metrics port."""
    for name, labels, value in _SAMPLE.findall(metrics):
        tags = dict(_LABEL.findall(labels))
        yield name, (tags.get("role", ""), tags.get("WorkerId", "")), float(value)


class Steadiness:
    """Measurements of the processes of each role.

    Args:
        resources: returns (pid, MiB of memory, file descriptors) of each live process of a role.
    """

    def __init__(
        self, resources: Callable[[str], list[tuple[int, float, int]]] = processes.resources
    ) -> None:
        self._resources = resources
        # (MiB of memory, descriptors) by role and pid, after warm-up and at the end
        self._warm: dict[str, dict[int, tuple[float, int]]] = {}
        self._last: dict[str, dict[int, tuple[float, int]]] = {}
        self._stalls: dict[Worker, float] = {}
        self._longest_s: dict[Worker, float] = {}
        self._tasks: dict[Worker, tuple[float, float]] = {}  # first and last value

    def begin(self) -> None:
        """Record what the processes hold after warm-up."""
        self._warm = self._measure()

    def take(self, metrics: str) -> None:
        """Record what processes report of their event loops."""
        for name, worker, value in samples(metrics):
            if name == "stalls_total":
                self._stalls[worker] = value
            elif name == "longest_stall_seconds":
                self._longest_s[worker] = value
            elif name == "tasks":
                self._tasks[worker] = (self._tasks.get(worker, (value,))[0], value)

    def end(self) -> None:
        """Record what the processes hold when they are idle again."""
        self._last = self._measure()

    def _measure(self) -> dict[str, dict[int, tuple[float, int]]]:
        return {role: {pid: amounts for pid, *amounts in self._resources(role)} for role in WATCHED}  # type: ignore[misc]

    def rows(self, stops: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return a row for each role. Growth is that of the process that grew most, among those still alive.

        Args:
            stops: number of stops by role. Each blocks an event loop.
        """
        return [self._row(role, stops.get(role, 0)) for role in WATCHED]

    def _row(self, role: str, stops: int) -> dict[str, Any]:
        warm, last = self._warm.get(role, {}), self._last.get(role, {})
        lived = [(warm[pid], last[pid]) for pid in warm.keys() & last.keys()]
        tasks = [counts for worker, counts in self._tasks.items() if worker[0] == role]
        growth = [after[0] - before[0] for before, after in lived]
        shares = [after[0] / before[0] - 1 for before, after in lived]
        longest_s = [seconds for worker, seconds in self._longest_s.items() if worker[0] == role]
        return {
            "process": role,
            "lived": len(lived),
            "memory_mib": max((memory for memory, _ in last.values()), default=None),
            "memory_growth_mib": max(growth, default=None),
            "memory_growth": max(shares, default=None),
            "descriptors": max((descriptors for _, descriptors in last.values()), default=None),
            "descriptors_growth": max((after[1] - before[1] for before, after in lived), default=None),
            "tasks": max((int(now) for _, now in tasks), default=None),
            "tasks_growth": max((int(now - first) for first, now in tasks), default=None),
            "stalls": sum(int(count) for worker, count in self._stalls.items() if worker[0] == role),
            "stops": stops,
            "longest_stall_s": max(longest_s, default=None),
        }


def find_problems(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each limit that a row exceeds."""
    problems = []
    for row in rows:
        role = row["process"]
        if (row["memory_growth_mib"] or 0) > MAX_GROWTH_MIB and row["memory_growth"] > MAX_GROWTH_SHARE:
            problems.append(f"{role}: {row['memory_growth_mib']:.0f} MiB of memory more than after warm-up")
        if (row["descriptors_growth"] or 0) > MORE_DESCRIPTORS:
            problems.append(f"{role}: {row['descriptors_growth']} descriptors more than after warm-up")
        if (row["tasks_growth"] or 0) > MORE_TASKS:
            problems.append(f"{role}: {row['tasks_growth']} tasks more than after warm-up")
        if role in LOOPS and row["stalls"] > row["stops"]:
            problems.append(
                f"{role}: its event loop was blocked {row['stalls']} times, stopped {row['stops']} times"
            )
    return problems
