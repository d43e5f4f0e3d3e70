"""The load of one process of the load generator: its share of the arrivals, its clock and its record."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from eldr_serve.errors import UserInputError
from loadgen.arrivals import Arrival, closed_loop, open_loop, share
from loadgen.statistics import LatencyObjective
from loadgen.traces import read_arrival_trace, replay
from loadgen.workload import read_prompts

# If the p99 of lateness is above this, s, users ran out and the load was lower than requested.
LATE_S = 0.1


class Load:
    """The arrivals for the users, which are greenlets of one process, and the record of their requests.

    Args:
        options: the parsed command line, see loadgen.locustfile.
        index, processes: the share of the arrivals to send.
        horizon_s: requests that are due later are not sent, nor requests without a due time that are taken
            later.

    Raises:
        UserInputError: an unusable workload, trace or value.
    """

    def __init__(
        self, options: Any, *, index: int = 0, processes: int = 1, horizon_s: float | None = None
    ) -> None:
        self.options = options
        self.objective = LatencyObjective(options.slo_ttft_ms, options.slo_tpot_ms)
        self.good = 0  # requests that met the objective
        self._in_flight = 0
        self._ended = False  # whether the arrivals are exhausted
        self._reported_end = False
        self._lock = threading.Lock()
        self._arrivals = share(self._stream(processes), index, processes)
        self._horizon_s = math.inf if horizon_s is None else horizon_s
        self._file: TextIO | None = None
        if options.record:
            path = Path(options.record)
            if processes > 1:
                path = path.with_name(f"{path.stem}.{index}{path.suffix}")
            try:
                self._file = path.open("w")
            except OSError as error:
                raise UserInputError(f"the record cannot be written: {error}") from error
        self._start: float | None = None
        self._began = threading.Event()

    def _stream(self, processes: int) -> Iterator[Arrival]:
        options = self.options
        if options.max_tokens < (0 if options.trace else 1):
            raise UserInputError(f"--max-tokens must be above 0, got {options.max_tokens}")
        prompts = read_prompts([Path(options.prompts)])
        if options.trace:
            if options.min_tokens:
                raise UserInputError("--min-tokens and --trace exclude each other: a trace has lengths")
            if options.rate:
                raise UserInputError("--rate and --trace exclude each other: a trace has its own arrivals")
            return replay(
                read_arrival_trace(Path(options.trace)),
                prompts,
                speed=options.trace_speed,
                max_prompt_tokens=options.max_prompt_tokens or None,
                max_tokens=options.max_tokens or None,
                chars_per_token=options.chars_per_token,
                seed=options.seed,
            )
        shape = {
            "max_tokens": options.max_tokens,
            "min_tokens": options.min_tokens or None,
            "seed": options.seed,
            "processes": processes,
        }
        if options.rate:
            return open_loop(prompts, options.rate, **shape)
        return closed_loop(prompts, **shape)

    def begin(self) -> None:
        """Start the clock, for which users wait, so that their own start delays no request."""
        if self._start is None:
            self._start = time.perf_counter()
            self._began.set()

    def now_s(self) -> float:
        """Return the time since the load began, s."""
        return 0.0 if self._start is None else time.perf_counter() - self._start

    def take(self) -> Arrival | None:
        """Wait until the next arrival is due and return it. It is late if no user was free before."""
        self._began.wait()
        with self._lock:
            arrival = None if self._ended else next(self._arrivals, None)
            if arrival is None or self._due_s(arrival) >= self._horizon_s:
                self._ended = True
                return None
            self._in_flight += 1
        if arrival.due_s is not None:
            time.sleep(max(0.0, arrival.due_s - self.now_s()))
        return arrival

    def _due_s(self, arrival: Arrival) -> float:
        return self.now_s() if arrival.due_s is None else arrival.due_s

    def record_end(self, line: dict[str, Any]) -> None:
        """Record a request that has ended, even if it failed."""
        with self._lock:
            self._in_flight -= 1
            self.good += self.objective.is_met_by(line)
            if self._file is not None and not self._file.closed:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()

    def report_end_once(self) -> bool:
        """Return whether every arrival was sent and answered. After the first True always return False."""
        with self._lock:
            is_first = self._ended and self._in_flight == 0 and not self._reported_end
            self._reported_end = self._reported_end or is_first
            return is_first

    def close(self) -> None:
        """Close the record."""
        if self._file is not None:
            self._file.close()


def describe_run(*, requests: int, failed: int, late_p99_s: float | None) -> str:
    """Return a line on whether the requested load was sent, and whether it was answered."""
    parts = [f"{requests} requests"]
    parts.append(f"{failed} FAILED" if failed else "none failed")
    if late_p99_s is not None and not math.isnan(late_p99_s):
        late = f"p99 of lateness {1000 * late_p99_s:.0f} ms"
        parts.append(f"USERS RAN OUT ({late}; give more)" if late_p99_s > LATE_S else late)
    return ", ".join(parts)
