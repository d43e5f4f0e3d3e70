"""The events of chaos runs: a file of JSON lines, written as they occur, and their sums."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

HANG_S = 15.0  # a request without a byte for this long hangs
NOTES = (
    "requests are counted with the last fault before their end. own_connection: the killed proxy or ingress "
    "itself held their connection, found by the client's port at the kill; behind_proxy: requests through "
    "Serve's proxy that the killed ingress had; nobody_listened: requests refused by the port of Serve's "
    "only proxy while it is away. gap: between two chunks of a stream; recovery: until there are as many "
    "processes as before, all pairs of engines are warm and the proxy answers; processes: growth from 20 s "
    "of load to the end of a run, of the process that grew most; stalls: event loops that were blocked for "
    "0.5 s, also because their process was stopped"
)
APART = ("own_connection", "behind_proxy", "nobody_listened")


class Record:
    """An append-only file of JSON lines of kind `run`, `sent`, `fault` or `end`, one key per line.

    Args:
        path: the file, whose lines are kept; None: nothing is written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._file = None
        if path is not None:
            if path.exists():
                self.lines = [json.loads(line) for line in path.read_text().splitlines()]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")

    def add(self, kind: str, /, **fields: Any) -> None:
        self.lines.append({kind: fields})
        if self._file is not None:
            self._file.write(json.dumps({kind: fields}) + "\n")
            self._file.flush()

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Return all lines of a kind."""
        return [line[kind] for line in self.lines if kind in line]


def rows(record: Record) -> list[dict[str, Any]]:
    """Return a row for each kind of fault, with the requests that ended before the next one, and a total."""
    sent, faults, ends = record.entries("sent"), record.entries("fault"), record.entries("end")
    kinds = dict.fromkeys(fault["fault"] for fault in faults)
    found = [_row("before any", [], [one for one in sent if one["fault"] is None])]
    for kind in sorted(kinds):
        mine = [fault for fault in faults if fault["fault"] == kind]
        found.append(_row(kind, mine, [one for one in sent if one["fault"] == kind]))
    counters = sum((Counter(end["counters"]) for end in ends), Counter[str]())
    left = [what for end in ends for what in end["left_behind"]]
    found.append(
        _row("all", faults, sent)
        | {
            "runs": len(record.entries("run")),
            "runs_to_the_end": len(ends),
            "resumed": counters["resumed"],
            "whole_without_prefill": counters["whole_without_prefill"],
            "settled_max_s": max((end["settled_s"] for end in ends), default=None),
            "left_behind": left,
            "processes": _processes(row for end in ends for row in end["processes"]),
        }
    )
    return found


def _row(fault: str, happened: list[dict[str, Any]], sent: list[dict[str, Any]]) -> dict[str, Any]:
    recoveries = [one["recovery_s"] for one in happened]
    known = [seconds for seconds in recoveries if seconds is not None]
    kinds = Counter(one["kind"] for one in sent)
    return {
        "fault": fault,
        "times": len(happened),
        "requests": len(sent),
        "ok": kinds.pop("ok", 0),
        "left": kinds.pop("left", 0),
        **{kind: kinds.pop(kind, 0) for kind in APART},
        "wrong_text": kinds.pop("wrong text", 0),
        "failed": sum(kinds.values()),
        "failures": dict(sorted(kinds.items())),
        "silent_over_15_s": sum(one["silence_s"] > HANG_S for one in sent),
        "longest_silence_s": max((one["silence_s"] for one in sent), default=0.0),
        "longest_gap_s": max((one["gap_s"] for one in sent if one["stream"]), default=0.0),
        "recovery_p50_s": float(np.median(known)) if known else None,
        "recovery_max_s": max(known, default=None),
        "not_recovered": len(recoveries) - len(known),
    }


def _processes(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each role: sums of counters and maxima of measurements."""
    by_role: dict[str, dict[str, Any]] = {}
    for row in found:
        known = by_role.get(row["process"])
        if known is None:
            by_role[row["process"]] = dict(row)
            continue
        for name, value in row.items():
            if name in ("stalls", "stops", "lived"):
                known[name] += value
            elif name != "process" and value is not None:
                known[name] = value if known[name] is None else max(known[name], value)
    return list(by_role.values())


def find_problems(record: Record) -> list[str]:
    """Return what no run may show, one sentence each."""
    total, found = rows(record)[-1], []
    for name in ("wrong_text", "failed", "silent_over_15_s", "not_recovered"):
        if total[name]:
            found.append(f"{name}: {total[name]} {total['failures'] if name == 'failed' else ''}".rstrip())
    if total["runs"] != total["runs_to_the_end"]:
        found.append(f"{total['runs'] - total['runs_to_the_end']} runs did not finish")
    found += [f"left behind: {what}" for what in total["left_behind"]]
    found += [f"not steady: {what}" for end in record.entries("end") for what in end["unsteady"]]
    return found
