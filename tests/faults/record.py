"""The events of runs of the whole application: a file of JSON lines, and a table of their sums.

Lines are written as the events occur, so a run that is interrupted leaves what it has measured. Several runs
append to one file, and the table is that of all runs.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.results import column_notes

HANG_S = 15.0  # a request without a byte for this long hangs
NOTES = column_notes(
    "A request is counted with the last fault before its end.",
    {
        "own_connection": "Requests whose connection the killed proxy or ingress held itself, found by the "
        "client's port at the kill.",
        "behind_proxy": "Requests through Serve's proxy that the killed ingress had.",
        "dead_connections": "The sum of own_connection and behind_proxy.",
        "nobody_listened": "Requests that the port of Serve's only proxy refused while the proxy was down.",
        "gap": "Time between two chunks of a stream.",
        "recovery": "Time until as many processes run as before, all pairs of engines are warm and the proxy "
        "answers.",
        "processes": "Growth from 20 s of load to the end of a run, of the process that grew most.",
        "stalls": "Event loops that were blocked for 0.5 s, also because their process was stopped.",
    },
)
APART = ("own_connection", "behind_proxy", "nobody_listened")  # failures that a fault explains; see NOTES


class Record:
    """An append-only file of events. Each line is a JSON object with the event's kind as its only key.

    The kinds are `run` (a run begins), `sent` (a request has ended), `fault` (the application has recovered
    from a fault, or it took too long) and `end` (a run has ended).

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
        """Add an event, and write its line."""
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
    table = [_row("before any", [], [request for request in sent if request["fault"] is None])]
    for kind in sorted(kinds):
        of_kind = [fault for fault in faults if fault["fault"] == kind]
        table.append(_row(kind, of_kind, [request for request in sent if request["fault"] == kind]))
    counters = sum((Counter(end["counters"]) for end in ends), Counter[str]())
    table.append(
        _row("all", faults, sent)
        | {
            "runs": len(record.entries("run")),
            "runs_to_the_end": len(ends),
            "proxies": max((run.get("proxies", 1) for run in record.entries("run")), default=1),
            "resumed": counters["resumed"],
            "prefilled_by_decode": counters["prefilled_by_decode"],
            "settled_max_s": max((end["settled_s"] for end in ends), default=None),
            "left_behind": [what for end in ends for what in end["left_behind"]],
            "processes": _processes(row for end in ends for row in end["processes"]),
        }
    )
    return table


def _row(fault: str, faults: list[dict[str, Any]], sent: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for one kind of fault and the requests that ended after such a fault."""
    recoveries_s = [one["recovery_s"] for one in faults if one["recovery_s"] is not None]
    kinds = Counter(one["kind"] for one in sent)
    dead_connections = kinds["own_connection"] + kinds["behind_proxy"]
    return {
        "fault": fault,
        "times": len(faults),
        "requests": len(sent),
        "ok": kinds.pop("ok", 0),
        "left": kinds.pop("left", 0),
        **{kind: kinds.pop(kind, 0) for kind in APART},
        "dead_connections": dead_connections,
        "wrong_text": kinds.pop("wrong text", 0),
        "failed": sum(kinds.values()),
        "failures": dict(sorted(kinds.items())),
        "silent_over_15_s": sum(one["silence_s"] > HANG_S for one in sent),
        "longest_silence_s": max((one["silence_s"] for one in sent), default=0.0),
        "longest_gap_s": max((one["gap_s"] for one in sent if one["stream"]), default=0.0),
        "recovery_p50_s": float(np.median(recoveries_s)) if recoveries_s else None,
        "recovery_max_s": max(recoveries_s, default=None),
        "not_recovered": len(faults) - len(recoveries_s),
    }


def _processes(rows_of_runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each role: sums of counters and maxima of measurements."""
    by_role: dict[str, dict[str, Any]] = {}
    for row in rows_of_runs:
        total = by_role.get(row["process"])
        if total is None:
            by_role[row["process"]] = dict(row)
            continue
        for name, value in row.items():
            if name in ("stalls", "stops", "lived"):
                total[name] += value
            elif name != "process" and value is not None:
                total[name] = value if total[name] is None else max(total[name], value)
    return list(by_role.values())


def find_problems(record: Record) -> list[str]:
    """Return a sentence for each number of the table that no run may have."""
    total, problems = rows(record)[-1], []
    for name in ("wrong_text", "failed", "silent_over_15_s", "not_recovered"):
        if total[name]:
            problems.append(f"{name}: {total[name]} {total['failures'] if name == 'failed' else ''}".rstrip())
    if total["runs"] != total["runs_to_the_end"]:
        problems.append(f"{total['runs'] - total['runs_to_the_end']} runs did not finish")
    problems += [f"left behind: {what}" for what in total["left_behind"]]
    problems += [f"not steady: {what}" for end in record.entries("end") for what in end["unsteady"]]
    return problems
