"""Replicas known to the request routers of one process, for the ingress in the same process.

Ray Serve runs request routers in their own thread inside the process that holds the handle. They learn first
which replicas are live; the ingress reads it here without a network call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from eldr_serve.queues.reports import QUEUE, QueueReport
from eldr_serve.replicas.kv_usage import KvUsage

BLOCK_TOKENS = "eldr_block_tokens"  # in a replica's metadata: tokens of a block of its prefix cache
EXPERTS = "eldr_experts"  # field of a replica's report, see protocol.Engine.experts


class ReplicaDirectory:
    """Replicas of one deployment as reported by Serve, with their metadata and newest status reports."""

    def __init__(self) -> None:
        self._metadata: Mapping[str, Mapping[str, Any]] = {}
        self._live: tuple[str, ...] = ()
        self._changed: Callable[[], None] = lambda: None
        self.kv_usage = KvUsage()  # the prefill fleet sets its bound
        self.reports: Mapping[str, QueueReport] = {}  # of their queues
        self.experts: Mapping[str, Mapping[str, Any]] = {}  # of replicas whose experts can be moved

    @property
    def live(self) -> tuple[str, ...]:
        """Return the ids of the replicas that Serve would send a request to now, sorted."""
        return self._live

    @property
    def metadata(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the result of each live replica's `record_replica_metadata`."""
        return self._metadata

    @property
    def block_tokens(self) -> int:
        """Return the tokens in a block of the replicas' prefix caches; 0 without one or if unknown yet."""
        return max((metadata.get(BLOCK_TOKENS, 0) for metadata in self._metadata.values()), default=0)

    def sample(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Process the newest reports of all live replicas, by name."""
        self.kv_usage.take(stats)
        self.reports = {
            name: QueueReport.parse(report[QUEUE]) for name, report in stats.items() if QUEUE in report
        }
        self.experts = {name: report[EXPERTS] for name, report in stats.items() if EXPERTS in report}

    def watch(self, changed: Callable[[], None]) -> None:
        """Register a callback for changes of the set; it is called from any thread."""
        self._changed = changed
        changed()

    def publish(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the set of replicas; the request router calls this."""
        self._metadata, self._live = dict(replicas), tuple(sorted(replicas))
        self._changed()

    def drop(self, replica: str) -> None:
        """Remove a replica that has died; the request router calls this before Serve publishes a new set."""
        self.publish({name: metadata for name, metadata in self._metadata.items() if name != replica})


_directories: dict[str, ReplicaDirectory] = {}
_directories_lock = threading.Lock()


def directory(name: str) -> ReplicaDirectory:
    """Return this process's directory with the name that the request router was given; create it if new."""
    with _directories_lock:
        return _directories.setdefault(name, ReplicaDirectory())
