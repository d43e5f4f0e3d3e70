"""A limit on simultaneous moves, so that the answers of a draining engine do not flood other engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.scheduling.worker_names import replica_of

MAX_MOVES = 3  # after this many moves an answer stays at its engine


class MoveLimiter:
    """Limits how many answers move at once; a move ends with the next engine's first token.

    An answer that may not move continues on its engine, so nothing waits for a move.

    Args:
        decode_starts: knows the free slots of the decode workers.
        outliers: lists the decode workers that may get calls.
        limit: maximum number of answers that move at the same time; 0 if no answer may move.
    """

    def __init__(self, decode_starts: DecodeStartEstimator, outliers: OutlierDetector, limit: int) -> None:
        self._decode_starts = decode_starts
        self._outliers = outliers
        self._limit = limit
        self._moving: set[str] = set()  # ids of requests

    def begin(self, context: RequestContext, worker: str) -> bool:
        """Begin to move an answer away from a worker, if it may move now; return whether it does.

        The caller then cancels the call to the worker, so this returns False unless some worker that
        placement may choose has a free slot. If all such workers are lost before the placement, the answer is
        lost too.
        """
        answer, drained_workers = context.answer, context.drained_workers
        if answer.is_complete or not answer.can_continue or len(drained_workers) >= MAX_MOVES:
            return False
        avoided_replicas = {*context.past_replicas, replica_of(worker)}
        targets = [name for name in self._outliers.usable_workers if replica_of(name) not in avoided_replicas]
        # Answers that are moving already will need a slot too.
        if len(self._moving) >= min(self._limit, sum(map(self._decode_starts.num_free_slots, targets))):
            return False
        drained_workers.append(worker)
        self._moving.add(context.request_id)
        return True

    def is_moving(self, request_id: str) -> bool:
        """Return whether the answer is moving, which ends when its next engine sends a token."""
        return request_id in self._moving

    def end(self, request_id: str) -> bool:
        """End the move of an answer; return whether there was one."""
        was_moving = self.is_moving(request_id)
        self._moving.discard(request_id)
        return was_moving

    @contextmanager
    def track(self, request_id: str) -> Iterator[None]:
        """End the move of an answer at the latest with its request."""
        try:
            yield
        finally:
            self.end(request_id)
