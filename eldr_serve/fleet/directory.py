"""Replicas known to the request routers of one process, for the ingress in the same process.

Ray Serve runs request routers in their own thread inside the process that holds the handle. They are the
first to get the live replicas, so the ingress reads the replicas here without a network call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eldr_serve.engine.report_fields import BLOCK_TOKENS, EXPERTS, QUEUE, RANKS
from eldr_serve.fleet.kv_usage import KvUsage
from eldr_serve.queues.reports import QueueReport
from eldr_serve.scheduling.worker_names import worker_names


class ReplicaDirectory:
    """Replicas of one deployment as reported by Serve, with their metadata and newest status reports.

    If engines have data-parallel ranks (RANKS in their metadata), each rank is a worker (see worker_names);
    otherwise each replica is a worker.

    Attributes:
        kv_usage: KV cache usage of the workers.
        reports: newest report of each worker's queue.
        experts: experts of each replica whose experts can be moved.
    """

    def __init__(self) -> None:
        self._metadata: Mapping[str, Mapping[str, Any]] = {}
        self._known_workers: tuple[str, ...] = ()
        self._changed: Callable[[], None] = lambda: None
        self.kv_usage = KvUsage()
        self.reports: Mapping[str, QueueReport] = {}
        self.experts: Mapping[str, Mapping[str, Any]] = {}

    @property
    def known_workers(self) -> tuple[str, ...]:
        """Return the names of the workers of all replicas to which Serve would now send a request, sorted."""
        return self._known_workers

    @property
    def metadata(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the result of each live replica's `record_replica_metadata`."""
        return self._metadata

    @property
    def block_tokens(self) -> int:
        """Return the tokens in a block of the replicas' prefix caches; 0 if unknown or if there are none."""
        return max((metadata.get(BLOCK_TOKENS, 0) for metadata in self._metadata.values()), default=0)

    def set_max_kv_usage(self, max_usage: float) -> None:
        """Set the KV usage above which a prefill replica gets no new prompt; see KvUsage."""
        self.kv_usage.max_usage = max_usage

    def update_reports(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Process the newest reports of all live replicas, by name."""
        by_worker = dict(_split_by_worker(reports))
        self.kv_usage.update(by_worker)
        self.reports = {
            name: QueueReport.parse(report[QUEUE]) for name, report in by_worker.items() if QUEUE in report
        }
        self.experts = {name: report[EXPERTS] for name, report in reports.items() if EXPERTS in report}

    def watch(self, changed: Callable[[], None]) -> None:
        """Register a callback for changes of the set; any thread may call it."""
        self._changed = changed
        changed()

    def publish(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the set of replicas; the request router calls this."""
        self._metadata, self._known_workers = dict(replicas), tuple(sorted(workers_of(replicas)))
        self._changed()

    def drop(self, replica: str) -> None:
        """Remove a replica that has died; the request router calls this before Serve publishes a new set."""
        self.publish({name: metadata for name, metadata in self._metadata.items() if name != replica})


def workers_of(replicas: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the workers of replicas with this metadata."""
    return [worker for name in replicas for worker in worker_names(name, replicas[name].get(RANKS, 1))]


def _split_by_worker(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the report of each worker, taken from the report of its replica."""
    for name, report in reports.items():
        by_rank = report.get(RANKS, [report])
        yield from zip(worker_names(name, len(by_rank)), by_rank, strict=True)


_directories: dict[str, ReplicaDirectory] = {}
_directories_lock = threading.Lock()


def get_directory(name: str) -> ReplicaDirectory:
    """Return this process's directory with the name that the request router was given; create it if new."""
    with _directories_lock:
        return _directories.setdefault(name, ReplicaDirectory())
