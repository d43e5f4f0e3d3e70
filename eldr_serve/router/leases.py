"""The router's leases: how requests are placed, adopted and ended, and the counters of placement."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any

from numpy.typing import NDArray

from eldr_serve.metrics import NamedCounter, RouterEvent
from eldr_serve.router.live_view import LiveView
from eldr_serve.router.settings_check import SettingsCheck
from eldr_serve.router_protocol.messages import LOCAL_FALLBACK
from eldr_serve.scheduling import PlacementRequest
from eldr_serve.scheduling.decode_loads import CachedShare
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.types import Lease, LeaseState

_MAX_RECENT_COUNTS = 1024


class Leases:
    """The leases of all ingresses' requests, in any state.

    Changes of load take effect with the next `place` or `dispatch`. Ingresses limit the wait of requests in
    the decode queue, and release requests that have waited too long.

    Args:
        placer: the placer that keeps the leases.
        table_version: returns the version of the live table.
        check: validation with the shape of the engines' expert counts.
        counters: counters of the status.
        view: data of the live page.
        clock: monotonic clock, s.

    Attributes:
        on_granted: called with leases of new and of queued requests when they are granted.
        cached_share: share of recent prompts that was in the workers' prefix caches.
        recent_counts: expert counts of the newest placed prompts, for forecasts of the experts' next load
            while no request decodes or waits.
    """

    def __init__(
        self,
        placer: Placer,
        table_version: Callable[[], int],
        check: SettingsCheck,
        counters: Counter[str],
        view: LiveView,
        clock: Callable[[], float],
    ) -> None:
        self._placer, self._table_version, self._check = placer, table_version, check
        self._counters, self._view, self._clock = counters, view, clock
        self.on_granted: Callable[[list[Lease]], None] = lambda leases: None
        self.cached_share = CachedShare()
        self.recent_counts: deque[NDArray[Any]] = deque(maxlen=_MAX_RECENT_COUNTS)

    @property
    def queue_size(self) -> int:
        """Return the number of requests that wait for a worker."""
        return len(self._placer.queue.leases)

    @property
    def oldest_wait_s(self) -> float:
        """Return the longest current wait for a worker, s; 0 if no request waits."""
        queued_at_s = min((lease.queued_at_s for lease in self._placer.queue.leases.values()), default=None)
        return 0.0 if queued_at_s is None else self._clock() - queued_at_s

    def is_running(self, request_id: str) -> bool:
        """Return whether the request holds a worker."""
        return request_id in self._placer.running

    def is_stale(self, request: PlacementRequest) -> bool:
        """Return whether a request was scored with another table; its ingress will score it again."""
        return request.similarity is not None and request.table_version != self._table_version()

    def place(self, leases: list[Lease]) -> None:
        """Place or queue requests in state SENT, and dispatch the queue; stale requests stay SENT."""
        for lease in leases:
            lease.request = self._check.remove_unusable_prediction(lease.request)
        current_leases = [lease for lease in leases if not self.is_stale(lease.request)]
        # Ingresses send waiting requests again when the settings change.
        queue = self._placer.queue.leases
        new_leases = [lease for lease in current_leases if lease.request_id not in queue]
        granted_leases = self._placer.submit(current_leases)
        self._counters[RouterEvent.QUEUED] += sum(lease.state is LeaseState.QUEUED for lease in new_leases)
        self._grant(granted_leases)

    def dispatch(self) -> None:
        """Let the policy assign workers to queued requests."""
        self._grant(self._placer.dispatch())

    def adopt_lease(self, lease: Lease) -> None:
        """Add a lease that its ingress has made, or received from this actor before a restart."""
        lease.request = self._check.remove_unusable_prediction(lease.request)
        current = self._placer.running.get(lease.request_id)
        new_counts = lease.request.expert_counts is not None and not lease.request.predicted
        if current is not None and (current.worker, current.policy) == (lease.worker, lease.policy):
            current.ingress = lease.ingress
            self._placer.set_generated_tokens({lease.request_id: lease.generated_tokens})
            if current.request.predicted and new_counts:
                self._placer.set_measured_counts(lease.request)
            return
        current = current or self._placer.queue.leases.get(lease.request_id)
        if current is not None and not new_counts:
            lease.request = current.request
        self._placer.adopt_lease(lease)
        is_fallback = lease.policy == LOCAL_FALLBACK
        self._counters[RouterEvent.PLACED_BY_INGRESS if is_fallback else RouterEvent.LEASES_RESTORED] += 1

    def set_generated_tokens(self, generated_tokens: dict[str, int]) -> None:
        """Set the totals of generated tokens by request id."""
        self._placer.set_generated_tokens(generated_tokens)

    def set_measured_counts(self, request: PlacementRequest) -> None:
        """Set the measured counts and length of a request that holds a lease."""
        self._placer.set_measured_counts(request)
        self._counters[RouterEvent.COUNTS_MEASURED] += 1
        self._record_counts(request)

    def remove_unusable_predictions(self) -> None:
        """Remove predicted counts whose shape differs from the engines'."""
        for lease in (*self._placer.running.values(), *self._placer.queue.leases.values()):
            lease.request = self._check.remove_unusable_prediction(lease.request)

    def finish(self, request_id: str, generated_tokens: int = 0, *, is_complete: bool = True) -> None:
        """End a request's lease in any state; policies learn the length of a complete answer."""
        self._placer.set_generated_tokens({request_id: generated_tokens})
        self._placer.finish(request_id, is_complete=is_complete)

    def finish_requests_of(self, ingress: str, *, keep: Collection[str] = ()) -> tuple[int, int]:
        """End an ingress's requests except the ids in `keep`; return how many decoded and how many waited."""
        running_ids, queued_ids = (
            [
                request_id
                for request_id, lease in leases.items()
                if lease.ingress == ingress and request_id not in keep
            ]
            for leases in (self._placer.running, self._placer.queue.leases)
        )
        for request_id in running_ids + queued_ids:
            self._placer.finish(request_id, is_complete=False)
        return len(running_ids), len(queued_ids)

    def _record_counts(self, request: PlacementRequest) -> None:
        if request.expert_counts is not None and not request.predicted:
            self.recent_counts.append(request.expert_counts)

    def _grant(self, leases: list[Lease]) -> None:
        self._view.add_leases(leases)
        for lease in leases:
            self._record_counts(lease.request)
            self._counters[RouterEvent.PLACED] += 1
            self._counters[NamedCounter.REASON.key(lease.reason)] += 1
            self._counters[RouterEvent.MOST_SIMILAR_WORKER] += lease.is_most_similar
            self._counters[RouterEvent.COUNTS_MISSING] += lease.request.counts_missing
            self._counters[RouterEvent.COUNTS_PREDICTED] += lease.request.predicted
            self._counters[RouterEvent.REROUTED] += lease.request.worker_failed
            if lease.request.blocks is not None:
                self._counters[RouterEvent.PREFILL_TOKENS] += lease.request.prompt_tokens
                self._counters[RouterEvent.PREFILL_TOKENS_CACHED] += lease.cached_tokens
                self.cached_share.record(lease.cached_tokens, lease.request.prompt_tokens)
        if leases:
            self.on_granted(leases)
