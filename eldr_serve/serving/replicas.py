"""What the request routers of one process know about replicas, for the ingress beside them.

Ray Serve runs request routers in a thread of their own inside the process that holds the handle.
They learn first which replicas live and they decide last which replica serves a request; the
ingress reads both here, with no call over the network.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from eldr_serve.serving.budget import PrefillBudget

_MAX_ROUTED = 65536  # requests whose caller never asked; the oldest are forgotten first


class ReplicaDirectory:
    """Live replicas of one deployment, and the replica that each recent request was sent to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: tuple[str, ...] = ()
        self._routed: OrderedDict[str, tuple[str, int]] = OrderedDict()  # with the replica's losses then
        self._losses: Counter[str] = Counter()
        self.budget = PrefillBudget()  # a prefill deployment's request router sets its bound

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the replicas that Serve would send a request to now, sorted."""
        return self._live

    @property
    def has_room(self) -> bool:
        """Some replica may take a prompt, or none is known yet."""
        return not self._live or bool(self.budget.with_room(self._live))

    def publish(self, replicas: Iterable[str]) -> None:
        """Called by the request router whenever Serve tells it of a new set."""
        self._live = tuple(sorted(replicas))

    def sent(self, request_id: str, replica: str) -> None:
        """Called by the request router when it has decided on a replica."""
        with self._lock:
            self._routed[request_id] = replica, self._losses[replica]
            self._routed.move_to_end(request_id)
            while len(self._routed) > _MAX_ROUTED:
                self._routed.popitem(last=False)

    def take_routed(self, request_id: str) -> str | None:
        """The replica that the request was sent to last, forgotten by this call."""
        with self._lock:
            replica, _ = self._routed.pop(request_id, (None, 0))
            return replica

    def lose(self, replica: str) -> None:
        """Called by the request router when a replica has died or cannot be reached."""
        with self._lock:
            self._losses[replica] += 1

    def in_doubt(self, request_id: str) -> bool:
        """The replica that the request was sent to has been lost since: it may have begun with it."""
        with self._lock:
            replica, losses = self._routed.get(request_id, ("", 0))
            return self._losses[replica] != losses


@dataclass(frozen=True)
class Engines:
    """The two deployments of an application: handles to call, and what is known of their replicas."""

    prefill: DeploymentHandle
    decode: DeploymentHandle
    prefill_replicas: ReplicaDirectory
    decode_replicas: ReplicaDirectory


_directories: dict[str, ReplicaDirectory] = {}
_directories_lock = threading.Lock()


def directory(name: str) -> ReplicaDirectory:
    """The directory of this process for one deployment, by the name that its router was given."""
    with _directories_lock:
        return _directories.setdefault(name, ReplicaDirectory())
