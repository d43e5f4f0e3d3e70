"""Times normalised for CPU speed, and loadgen's measurements in them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.errors import UserInputError
from loadgen.trial import Trial

NORMALISED = "normalised"  # value of `clock` in stored rows whose times are normalised
_WINDOW_S = 5.0  # window in which speed is assumed constant
_SPARE_TRIALS = 4  # trials beyond one per group, to fit a slope


class NormalisedTime:
    """Clock that measures time by the work that the cores could do in it.

    One of its seconds is a second at the mean speed of the records.

    Args:
        records: float64[n, 4] of each core: Unix and CPU time of the probe in seconds, stolen and all ticks.
        sensitivity: exponent s of `fit_sensitivity`. Where the probe takes x times as long, the work takes
            x**s times as long.
    """

    def __init__(self, records: Sequence[np.ndarray], sensitivity: float = 1.0) -> None:
        self._records = records
        begin, end = min(r[0, 0] for r in records), max(r[-1, 0] for r in records)
        edges = np.linspace(begin, end, 1 + max(1, round((end - begin) / _WINDOW_S)))
        speed, own_share = np.mean([_speed(r, edges, sensitivity) for r in records], axis=0)
        self._edges, self._slowdown = edges, np.mean(speed) / speed
        work = speed * own_share
        self._work_s = np.concatenate([[0.0], np.cumsum(work / np.mean(work) * np.diff(edges))])

    @classmethod
    def read(cls, folder: Path) -> NormalisedTime:
        """Read the records of `record_cpu_speed`. Raise UserInputError if the folder has none."""
        files = sorted(folder.glob("cpu_speed_*.jsonl"))
        records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        if not any(records):
            raise UserInputError(f"{folder} has no records of the cores' speed")
        return cls([np.array(core_records, float) for core_records in records if core_records])

    def change_sensitivity(self, sensitivity: float) -> NormalisedTime:
        """Return a clock from the same records, for work with this sensitivity to the probe."""
        return NormalisedTime(self._records, sensitivity)

    def seconds(self, start: float, end: float) -> float:
        """Return the normalised time from one Unix time to another."""
        if start < self._edges[0] - _WINDOW_S or end > self._edges[-1] + _WINDOW_S:
            raise UserInputError(f"no speed record covers {start} to {end}: record during the whole trial")
        return float(np.interp(end, self._edges, self._work_s) - np.interp(start, self._edges, self._work_s))

    def slowdown(self, start: float, end: float) -> float:
        """Return how much more CPU time than at the mean speed the same work took between two Unix times."""
        inside = (self._edges[1:] > start) & (self._edges[:-1] < end)
        return float(np.mean(self._slowdown[inside]))


def fit_engine_sensitivity(trials: Sequence[Trial], clock: NormalisedTime, alike: Collection[str]) -> float:
    """Fit the sensitivity of engine time per request. All policies in `alike` are one group.

    Args:
        clock: a clock with sensitivity 1.
    """
    groups, slowdowns, seconds = [], [], []
    for trial in trials:
        if trial.requests and trial.engines and trial.engines["requests"]:
            groups.append("" if trial.policy in alike else trial.policy)
            slowdowns.append(clock.slowdown(*_span(trial)))
            seconds.append(trial.engines["seconds"] / trial.engines["requests"])
    return fit_sensitivity(groups, slowdowns, seconds)


def fit_sensitivity(groups: Sequence[str], slowdowns: Sequence[float], seconds: Sequence[float]) -> float:
    """Fit how sensitive some work is to the slowdown of the probe: 0 not at all, 1 equally, 2 as its square.

    All trials of a group do the same work. The sensitivity is the slope, by least squares, of the logarithm
    of the work's seconds over the logarithm of the slowdown, within the groups. Too few trials give 1.

    Args:
        groups: name of each trial's group.
        slowdowns: slowdown of each trial, from a clock with sensitivity 1.
        seconds: time of each trial's work in seconds.
    """
    if len(groups) - len(set(groups)) < _SPARE_TRIALS:
        return 1.0
    points = np.log([slowdowns, seconds])
    for group in set(groups):
        inside = [g == group for g in groups]
        points[:, inside] -= points[:, inside].mean(axis=1, keepdims=True)
    log_slowdown, log_seconds = points
    if not log_slowdown.any():
        return 1.0
    return float(np.clip(log_slowdown @ log_seconds / (log_slowdown @ log_slowdown), 0.0, 2.0))


def normalise_trial(trial: Trial, clock: NormalisedTime) -> Trial:
    """Return the trial with all times measured by the clock. Each request still ends at the same time.

    Token gaps and the hand-over, whose own start is unknown, are scaled like the whole request.
    """
    requests = [_normalise_request(record, clock) for record in trial.requests]
    engines = trial.engines
    if engines is not None and requests:
        slowdown = clock.slowdown(*_span(trial))
        engines = engines | {key: engines[key] / slowdown for key in ("seconds", "token_seconds")}
    return replace(trial, requests=requests, engines=engines)


def _span(trial: Trial) -> tuple[float, float]:
    """Return the Unix times at which the first request was sent and the last one ended."""
    ends = [r["sent_unix_s"] + (r.get("end_s") or 0.0) for r in trial.requests]
    return min(r["sent_unix_s"] for r in trial.requests), max(ends)


def _normalise_request(record: dict[str, Any], clock: NormalisedTime) -> dict[str, Any]:
    if record.get("ttft_s") is None or record.get("end_s") is None:
        return record
    sent, end_s = record["sent_unix_s"], record["end_s"]
    ttft_s, whole_s = (clock.seconds(sent, sent + record[name]) for name in ("ttft_s", "end_s"))
    rate = whole_s / end_s
    decode_s = end_s - record["ttft_s"]
    decode_rate = (whole_s - ttft_s) / decode_s if decode_s else 1.0
    times: dict[str, Any] = {"sent_s": record["sent_s"] + end_s - whole_s, "ttft_s": ttft_s, "end_s": whole_s}
    times["itl_s"] = [rate * gap for gap in record["itl_s"]]
    for name, factor in (("tpot_s", decode_rate), ("handover_s", rate)):
        if record[name] is not None:
            times[name] = factor * record[name]
    return record | times


def _speed(records: np.ndarray, edges: np.ndarray, sensitivity: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a core's speed in each window, s**-sensitivity, and the share of time that was not stolen."""
    windows = len(edges) - 1
    # An interrupted record can be many times as long, or 0: hence the median of the positive ones.
    timed = records[records[:, 1] > 0]
    window = np.clip(np.searchsorted(edges, timed[:, 0], side="right") - 1, 0, windows - 1)
    windows_with_records = np.unique(window)
    seconds = [np.median(timed[window == w, 1]) for w in windows_with_records]
    stolen, ticks = (np.diff(np.interp(edges, records[:, 0], records[:, column])) for column in (2, 3))
    return np.interp(
        np.arange(windows), windows_with_records, seconds
    ) ** -sensitivity, 1 - stolen / np.maximum(ticks, 1)
