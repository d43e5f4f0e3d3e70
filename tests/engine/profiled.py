"""What a trace of torch's profiler, with stacks, says of calls that wait for the device."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from operators import WAITING

# An operator ("aten::item"), or a method of a tensor that on a CPU comes down to none.
_NAME = re.compile(
    r"aten::(?P<operator>\w+)$|<(?:built-in )?method (?P<method>\w+) of (?:Tensor|type) object"
)


def called(trace: Path, ours: str, apart: str) -> tuple[set[str], set[str]]:
    """Names of operators and tensors' methods that our functions call, and all that were called.

    Args:
        trace: of one process, as the profiler wrote it.
        ours: what the name of each of our functions has; it names the file, too.
        apart: the same of our functions whose calls are not looked at.
    """
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "python_function"):
            threads[event["pid"], event["tid"]].append(event)
    found, everything = set(), set()
    for events in threads.values():
        under: list[tuple[float, bool, bool]] = []  # of callers: until when, whether ours, whether apart
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
            under.append((end, inside or ours in event["name"], aside or apart in event["name"]))
    return found, everything


def waiting(names: set[str]) -> set[str]:
    """Those of them that wait."""
    return names & WAITING
