"""Calls that wait for the device, in a trace of torch's profiler with stacks."""

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


def operators_called(trace: Path, our_names: str, excluded: str) -> tuple[set[str], set[str]]:
    """Return the operators and tensor methods that our functions call, and those that anything calls.

    Args:
        trace: profiler output of one process.
        our_names: string in the name of each of our functions. The name includes the file.
        excluded: string in the names of our functions whose calls are ignored.
    """
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "python_function"):
            threads[event["pid"], event["tid"]].append(event)
    by_ours, by_all = set(), set()
    for events in threads.values():
        # Calls that have not ended, outermost first: the end, and whether the call or a caller of it is ours,
        # or excluded.
        callers: list[tuple[float, bool, bool]] = []
        for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            while callers and callers[-1][0] <= start:
                callers.pop()
            is_ours, is_excluded = callers[-1][1:] if callers else (False, False)
            if named := _NAME.search(event["name"]):
                name = named["operator"] or named["method"]
                by_all.add(name)
                if is_ours and not is_excluded:
                    by_ours.add(name)
            callers.append(
                (end, is_ours or our_names in event["name"], is_excluded or excluded in event["name"])
            )
    return by_ours, by_all


def waiting_names(names: set[str]) -> set[str]:
    """Return the names of those that wait."""
    return names & WAITING
