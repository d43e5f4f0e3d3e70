"""What a client of the DecodeRouter actor and the actor say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eldr_serve.routing import Placement, PlacementRequest


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
    held: tuple[Placement, ...] = ()  # LEASED ones that the client made or corrected itself
    known_epoch: str = ""
    events: dict[str, int] = field(default_factory=dict)  # counters seen by the client, as increments


@dataclass(frozen=True)
class Reply:
    """`placements` answers those of the exchange, in order.

    Each is LEASED, or QUEUED (its lease comes by `granted`), or still SENT: it must be scored and sent again.
    """

    epoch: str  # a new value means that the actor started anew
    settings_version: int
    placements: tuple[Placement, ...] = ()
    refused: str | None = None  # why nothing was placed: "unknown-client" asks for `restore`


@dataclass(frozen=True)
class Restore:
    """What a client gives a new actor: workers, settings and leases that the old one knew."""

    client: str
    workers: tuple[str, ...]
    settings: Settings | None
    leases: tuple[Placement, ...]


@dataclass(frozen=True)
class Restored:
    """The actor's incarnation and what is live in it after a `Restore`."""

    epoch: str
    settings: Settings
