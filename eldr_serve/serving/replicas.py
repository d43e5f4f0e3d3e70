"""What the request routers of one process know about replicas, for the ingress beside them.

Ray Serve runs request routers in a thread of their own inside the process that holds the handle. They learn
first which replicas live; the ingress reads it here, with no call over the network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from eldr_serve.serving.budget import PrefillBudget
from eldr_serve.serving.prefill_queue import QUEUE

BLOCK_TOKENS = "eldr_block_tokens"  # in a replica's metadata: tokens of a block of its prefix cache
EXPERTS = "eldr_experts"  # field of a replica's report, see protocol.Engine.experts


class Replicas(Protocol):
    """Whoever knows which replicas of a deployment can be placed on."""

    @property
    def live(self) -> tuple[str, ...]:
        """Their ids, sorted."""


class ReplicaDirectory:
    """Replicas of one deployment as Serve tells of them, and what they told Serve of themselves."""

    def __init__(self) -> None:
        self._metadata: Mapping[str, Mapping[str, Any]] = {}
        self._live: tuple[str, ...] = ()
        self._changed: Callable[[], None] = lambda: None
        self.budget = PrefillBudget()  # the prefill fleet sets its bound
        self.reports: Mapping[str, Mapping[str, Any]] = {}  # on their queues, see prefill_queue.Report
        self.experts: Mapping[str, Mapping[str, Any]] = {}  # of replicas whose experts can be moved

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the replicas that Serve would send a request to now, sorted."""
        return self._live

    @property
    def metadata(self) -> Mapping[str, Mapping[str, Any]]:
        """What each live replica's `record_replica_metadata` returned."""
        return self._metadata

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the replicas' prefix caches; 0 if they have none, or are not known yet."""
        return max((found.get(BLOCK_TOKENS, 0) for found in self._metadata.values()), default=0)

    def sample(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Process the newest reports of all live replicas, by name."""
        self.budget.take(stats)
        self.reports = {name: found[QUEUE] for name, found in stats.items() if QUEUE in found}
        self.experts = {name: found[EXPERTS] for name, found in stats.items() if EXPERTS in found}

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called whenever the set changes, from whatever thread."""
        self._changed = changed
        changed()

    def publish(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Called by the request router with each new set."""
        self._metadata, self._live = dict(replicas), tuple(sorted(replicas))
        self._changed()

    def drop(self, replica: str) -> None:
        """Called by the request router when a replica has died, before Serve publishes a new set."""
        self.publish({name: found for name, found in self._metadata.items() if name != replica})


_directories: dict[str, ReplicaDirectory] = {}
_directories_lock = threading.Lock()


def directory(name: str) -> ReplicaDirectory:
    """The directory of this process for one deployment, by the name that its router was given."""
    with _directories_lock:
        return _directories.setdefault(name, ReplicaDirectory())
