"""Data of the live page besides the status: newest requests, steps of each worker, latencies over time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eldr_serve.router.signature_plane import CentroidPlane, CountsPlane, Point
from eldr_serve.router_protocol.messages import StreamLatencies
from eldr_serve.scheduling import CentroidTable
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.types import Lease, LeaseState

_POINTS = 400  # newest requests shown in the signature space
_MAX_SPANNING_REQUESTS = 64  # requests whose counts span the plane if there is no table
_RUNNING = 200  # requests shown with their worker
_ANSWERS = 8192  # newest answers whose latencies are kept
_BIN_S, _BINS = 5.0, 120  # bins of latencies: ten minutes
_STEPS = 120  # newest reports of each worker, one per second


@dataclass(eq=False)
class _DrawnRequest:
    """A placed request in the signature space."""

    number: int
    lease: Lease
    point: Point | None = field(default=None)
    plane: object = None  # the plane of `point`


class LiveView:
    """Recent events of one router. They are kept as references; only `snapshot` computes with them.

    Args:
        clock: monotonic clock, s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._number = 0
        self._drawn: deque[_DrawnRequest] = deque(maxlen=_POINTS)
        self._plane: CentroidPlane | CountsPlane | None = None
        self._num_spanning_requests = 0  # number of requests that define `_plane`; 0: a table does
        self._table: tuple[CentroidTable, int] | None = None
        self._answers: deque[tuple[float, StreamLatencies]] = deque(maxlen=_ANSWERS)
        self._reports: dict[str, deque[tuple[float, StepSums]]] = {}
        self._changes: deque[tuple[float, str]] = deque(maxlen=20)

    # -- events of the router ------------------------------------------------------------------------

    def add_leases(self, leases: Iterable[Lease]) -> None:
        """Add requests that have been placed."""
        for lease in leases:
            self._number += 1
            self._drawn.append(_DrawnRequest(self._number, lease))

    def add_answers(self, answers: Iterable[StreamLatencies]) -> None:
        """Add streams that have ended."""
        now_s = self._clock()
        self._answers.extend((now_s, answer) for answer in answers)

    def observe_steps(self, worker: str, steps: StepSums) -> None:
        """Add the decode steps of a worker since its last report, if there were any."""
        if steps.steps:
            self._reports.setdefault(worker, deque(maxlen=_STEPS)).append((self._clock(), steps))

    def discard_other_workers(self, workers: Collection[str]) -> None:
        """Discard the steps of all workers except these."""
        self._reports = {name: reports for name, reports in self._reports.items() if name in workers}

    def record_change(self, policy: str, table: CentroidTable | None, table_version: int) -> None:
        """Record new settings."""
        self._changes.append((self._clock(), policy))
        self._table = None if table is None else (table, table_version)
        self._plane, self._num_spanning_requests = None, 0

    # -- data of the page ----------------------------------------------------------------------------

    def snapshot(self, placer: Placer, layers: int | None) -> dict[str, Any]:
        """Return the data as JSON-able values; times are s before now, latencies ms.

        Args:
            layers: number of MoE layers, by which active experts are divided; None: unknown so far.
        """
        now_s = self._clock()
        return {
            "requests": self._requests(placer),
            "space": self._space(),
            "steps": {name: self._series(reports, now_s, layers) for name, reports in self._reports.items()},
            "latency": self._latencies(now_s),
            "changes": [
                {"ago_s": round(now_s - changed_s, 1), "policy": name} for changed_s, name in self._changes
            ],
        }

    def _requests(self, placer: Placer) -> dict[str, Any]:
        leases = [*placer.queue.leases.values(), *placer.running.values()]
        shown = leases[-_RUNNING:]
        return {
            "not_shown": len(leases) - len(shown),
            "columns": ["id", "position", "generated", "max_new", "prompt", "domain", "reason"],
            "rows": [
                [
                    lease.request_id[:8],
                    lease.position if lease.state is LeaseState.GRANTED else None,
                    lease.generated_tokens,
                    lease.request.max_new_tokens,
                    lease.request.prompt_tokens,
                    lease.request.domain,
                    lease.reason,
                ]
                for lease in shown
            ],
        }

    def _space(self) -> dict[str, Any]:
        plane = self._current_plane()
        points = []
        for drawn in self._drawn:
            lease = drawn.lease
            if plane is not None and drawn.plane is not plane:
                drawn.plane, drawn.point = plane, plane.point_of(lease.request)
            if plane is not None and drawn.point is not None:
                points.append([drawn.number, *drawn.point, lease.position, lease.request.domain])
        return {
            "axes": None if plane is None else "centroids" if self._table is not None else "first signatures",
            "centroids": [] if plane is None else list(plane.centroids),
            "columns": ["number", "x", "y", "position", "domain"],
            "points": points,
        }

    def _current_plane(self) -> CentroidPlane | CountsPlane | None:
        if self._table is not None:
            self._plane = self._plane or CentroidPlane(*self._table)
        elif self._num_spanning_requests < _MAX_SPANNING_REQUESTS:
            all_counts = [drawn.lease.request.expert_counts for drawn in self._drawn]
            counts = [c for c in all_counts if c is not None and c.ndim == 2 and c.any()][
                :_MAX_SPANNING_REQUESTS
            ]
            counts = [c for c in counts if c.shape == counts[0].shape]
            if len(counts) > max(self._num_spanning_requests, 2):
                self._plane, self._num_spanning_requests = CountsPlane(counts), len(counts)
        return self._plane

    def _latencies(self, now_s: float) -> dict[str, Any]:
        bins: dict[int, list[StreamLatencies]] = {}
        for ended_at_s, answer in self._answers:
            if (ago := int((now_s - ended_at_s) / _BIN_S)) < _BINS:
                bins.setdefault(ago, []).append(answer)
        rows = []
        for ago, answers in sorted(bins.items(), reverse=True):
            row: list[float | None] = [(ago + 0.5) * _BIN_S, len(answers)]
            for values in ([a.tpot_s for a in answers], [a.ttft_s for a in answers]):
                measured = [value for value in values if value is not None]
                percentiles = 1e3 * np.percentile(measured, [50, 99]) if measured else (None, None)
                row += [None if ms is None else round(float(ms), 3) for ms in percentiles]
            rows.append(row)
        columns = ["ago_s", "answers", "tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p99_ms"]
        return {"columns": columns, "rows": rows}

    def _series(
        self, reports: Iterable[tuple[float, StepSums]], now_s: float, layers: int | None
    ) -> dict[str, Any]:
        rows = []
        for reported_at_s, steps in reports:
            n = steps.steps
            experts = None if not layers else round(steps.active_experts / n / layers, 2)
            rows.append(
                [
                    round(now_s - reported_at_s, 1),
                    round(steps.requests / n, 2),
                    experts,
                    round(1e3 * steps.seconds / n, 3),
                ]
            )
        return {"columns": ["ago_s", "batch", "active_experts", "step_ms"], "rows": rows}
