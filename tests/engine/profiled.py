"""Find calls that wait for the device in a trace of torch's profiler with stacks."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.engine.operators import WAITING

# An operator ("aten::item"), or a tensor method that calls no operator on a CPU.
_NAME = re.compile(
    r"aten::(?P<operator>\w+)$|<(?:built-in )?method (?P<method>\w+) of (?:Tensor|type) object"
)


def called(trace: Path, ours: str, excluded: str) -> tuple[set[str], set[str]]:
    """Return the operators and tensor methods that our functions call, and those that anything calls.

    Args:
        trace: profiler output of one process.
        ours: string in the name of each of our functions; the name includes the file.
        excluded: string in the names of our functions whose calls are ignored.
    """
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "python_function"):
            threads[event["pid"], event["tid"]].append(event)
    found, everything = set(), set()
    for events in threads.values():
        under: list[tuple[float, bool, bool]] = []  # callers: (end, whether ours, whether excluded)
        for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            while under and under[-1][0] <= start:
                under.pop()
            inside, aside = under[-1][1:] if under else (False, False)
            if named := _NAME.search(event["name"]):
                name = named["operator"] or named["method"]
                everything.add(name)
                if inside and not aside:
                    found.add(name)
            under.append((end, inside or ours in event["name"], aside or excluded in event["name"]))
    return found, everything


def waiting(names: set[str]) -> set[str]:
    """Return the names of those that wait."""
    return names & WAITING
