"""The requests of an ingress that wait for the router: for its answer, and then in its decode queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eldr_serve.errors import OverloadedError
from eldr_serve.queues.wait_estimate import WaitEstimator
from eldr_serve.scheduling.types import Lease, LeaseState


@dataclass(eq=False, slots=True)
class _WaitingRequest:
    """A request that waits.

    Attributes:
        deadline_s: latest end of the wait in the decode queue, on the event loop's clock.
        outcome: done when the wait is over; its result is that of `WaitingRequests.wait`, and it fails if the
            request is refused.
        unanswered_since_s: time at which the wait for an answer last began, on the event loop's clock.
        expiry: end of the wait in the decode queue, once it has begun.
    """

    lease: Lease
    deadline_s: float
    outcome: asyncio.Future[str]
    unanswered_since_s: float
    expiry: asyncio.TimerHandle | None = None


class WaitingRequests:
    """Waits of requests: at most `timeout_s` for an answer, and as long as the request allows in the queue.

    Args:
        timeout_s: maximum time for an answer, s.
        on_late: called with a TimeoutError when a request has had no answer for `timeout_s`.
        on_expired: called when a request is refused since no worker is free in time.
    """

    def __init__(
        self, timeout_s: float, on_late: Callable[[Exception], None], on_expired: Callable[[], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._on_late, self._on_expired = on_late, on_expired
        self._waiting: dict[str, _WaitingRequest] = {}
        self._in_queue = 0
        self._estimator = WaitEstimator(clock=lambda: asyncio.get_running_loop().time())
        self._timer: asyncio.TimerHandle | None = None  # fires when the oldest unanswered request is late

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the leases that are not granted yet."""
        return iter([entry.lease for entry in self._waiting.values() if not entry.outcome.done()])

    @property
    def queue_wait_s(self) -> float:
        """Estimate the wait of a new request in the decode queue, s; 0 if none waits there."""
        return self._estimator.estimate_wait_s(self._in_queue + 1) if self._in_queue else 0.0

    async def wait(self, lease: Lease, wait_s: float) -> str:
        """Wait until `resume` is called for the request.

        Args:
            wait_s: maximum time from now until a wait in the decode queue ends, s.

        Returns:
            Why the router did not place the request; "" if it did.

        Raises:
            OverloadedError: no worker was free in time, or none would be.
            CancelledError: `cancel` was called.
        """
        loop, request_id = asyncio.get_running_loop(), lease.request_id
        now_s = loop.time()
        entry = _WaitingRequest(lease, now_s + wait_s, loop.create_future(), now_s)
        self._waiting[request_id] = entry
        self._start_timer()
        try:
            # wait_for of Python 3.11 would swallow a cancellation that meets a finished answer, and the
            # request of a disconnected client would keep running.
            return await entry.outcome
        finally:
            if self._waiting.get(request_id) is entry:
                del self._waiting[request_id]
            if entry.expiry is not None:
                entry.expiry.cancel()
                self._in_queue -= 1
                self._estimator.record_departure(empty=not self._in_queue)

    def resume(self, request_id: str, unplaced_reason: str = "") -> None:
        """End the wait of a request that waits.

        Args:
            unplaced_reason: why the router did not place the request; "" if it did.
        """
        entry = self._waiting.get(request_id)
        if entry is not None and not entry.outcome.done():
            entry.outcome.set_result(unplaced_reason)

    def cancel(self, request_id: str) -> None:
        """Cancel the wait of a request that waits."""
        if request_id in self._waiting:
            self._waiting[request_id].outcome.cancel()

    def queue_or_refuse(self, request_id: str) -> None:
        """Make a request wait in the decode queue until its deadline; refuse it if it would wait longer."""
        entry = self._waiting.get(request_id)
        if entry is None or entry.expiry is not None:  # it was released, or queued again by another router
            return
        loop, deadline_s = asyncio.get_running_loop(), entry.deadline_s
        if loop.time() + self._estimator.estimate_wait_s(self._in_queue + 1) > deadline_s:
            self._expire(entry)
        else:
            entry.expiry = loop.call_at(deadline_s, self._expire, entry)
            self._in_queue += 1

    def wait_again(self) -> None:
        """Make all requests wait for an answer again, including those that were in the decode queue."""
        now_s = asyncio.get_running_loop().time()
        for entry in self._waiting.values():
            if entry.lease.state is LeaseState.QUEUED:
                entry.unanswered_since_s = now_s
            if entry.lease.state in (LeaseState.SENT, LeaseState.QUEUED):
                entry.lease.become(LeaseState.UNSENT)
        if self._waiting:
            self._start_timer()

    def stop(self) -> None:
        """Stop watching the router."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, entry: _WaitingRequest) -> None:
        if not entry.outcome.done():
            self._on_expired()
            retry_after_s = self._estimator.retry_after_s(self._in_queue + 1)
            reason = "no decode worker is free for this request in time"
            entry.outcome.set_exception(OverloadedError(reason, retry_after_s=retry_after_s))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        unanswered = [
            entry.unanswered_since_s
            for entry in self._waiting.values()
            if entry.lease.state in (LeaseState.UNSENT, LeaseState.SENT) and not entry.outcome.done()
        ]
        if not unanswered:
            return
        loop, due_s = asyncio.get_running_loop(), min(unanswered) + self._timeout_s
        if due_s > loop.time():
            self._timer = loop.call_at(due_s, self._check_time)
        else:
            self._on_late(TimeoutError(f"no answer for {self._timeout_s:g} s"))
