"""What the ingress, the request routers and the DecodeRouter actor say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing import PlacementRequest


@dataclass(frozen=True)
class Lease:
    """A decode replica holds `request_id` until the lease is released."""

    request_id: str
    replica: str
    prompt_tokens: int
    max_new_tokens: int = 0  # 0: not known
    prompt_key: str | None = None  # equal for equal prompts
    worker: int = -1  # slot of the replica in the router; -1 where the ingress placed by itself
    band: int = 0  # workers that the policy chose among
    similarity: float | None = None
    best: bool = False  # the worker is the one most similar to the signature
    reason: str = ""
    policy: str = ""
    generated_tokens: int = 0
    waited_s: float = 0.0  # in the pool
    counts: NDArray[np.unsignedinteger[Any]] | None = None  # from a client to a new actor


@dataclass(frozen=True)
class Settings:
    """What an operator may change while requests run; the newest version wins."""

    version: int
    policy: str
    parameters: dict[str, Any]
    table: bytes | None  # a RoutingTable file
    table_version: int


@dataclass(frozen=True)
class Exchange:
    """One round trip from a client: everything that happened since its last one."""

    client: str
    placements: tuple[PlacementRequest, ...] = ()
    released: tuple[str, ...] = ()
    progress: dict[str, int] = field(default_factory=dict)  # request id -> generated tokens
    held: tuple[Lease, ...] = ()  # leases that the client made or corrected itself
    known_epoch: str = ""
    events: dict[str, int] = field(default_factory=dict)  # counters seen by the client, as increments


@dataclass(frozen=True)
class Reply:
    """`leases` answers `placements` in order.

    None stands where the request waits in the pool (its lease comes by `granted`), or else must be
    scored again.
    """

    epoch: str  # a new value means that the actor started anew
    settings_version: int
    leases: tuple[Lease | None, ...] = ()
    pooled: frozenset[str] = frozenset()  # ids of those `placements` that wait in the pool
    refused: str | None = None  # why nothing was placed: "unknown-client" asks for `restore`


@dataclass(frozen=True)
class Restore:
    """What a client gives a new actor: workers, settings and leases that the old one knew."""

    client: str
    workers: tuple[str, ...]
    settings: Settings | None
    leases: tuple[Lease, ...]


@dataclass(frozen=True)
class Restored:
    """The actor's incarnation and what is live in it after a `Restore`."""

    epoch: str
    settings: Settings
