"""What a client of the DecodeRouter actor and the actor say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from eldr_serve.routing import Placement, PlacementRequest, reads_counts


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NamedPolicy:
    """A policy as settings name it."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """What an operator may change while requests run; the newest version wins."""

    version: int
    policy: str
    parameters: dict[str, Any]
    table: bytes | None  # a RoutingTable file
    table_version: int
    predictor: bytes | None = None  # a SignaturePredictor file
    predictor_version: int = 0
    deployed: str = ""  # fingerprint of the deployment's own settings that these go back to
    shadow: NamedPolicy | None = None  # what the live policy is compared with

    @property
    def read_counts(self) -> bool:
        """Whether a request's expert counts are read: by the policy, or to price both placements."""
        return self.shadow is not None or reads_counts(self.policy)


@dataclass(frozen=True)
class Answered:
    """A stream that has ended; from the request's arrival at the ingress, as its client saw it.

    Attributes:
        ttft_s: to the first chunk.
        tpot_s: between tokens, mean; None with fewer than two.
    """

    ttft_s: float
    tpot_s: float | None


@dataclass(frozen=True)
class Exchange:
    """One round trip from a client: everything that happened since its last one."""

    client: str
    placements: tuple[PlacementRequest, ...] = ()
    released: tuple[str, ...] = ()
    progress: dict[str, int] = field(default_factory=dict)  # request id -> generated tokens
    held: tuple[Placement, ...] = ()  # LEASED ones that the client made or corrected itself
    counted: tuple[PlacementRequest, ...] = ()  # with true signatures, of such as were LEASED without
    known_epoch: str = ""
    events: dict[str, int] = field(default_factory=dict)  # counters seen by the client, as increments
    answered: tuple[Answered, ...] = ()
    prediction: dict[str, Any] | None = None  # OnlinePredictor.status, where the client has one


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
    signature_shape: tuple[int, int] | None = None  # that engines report, if the client knows it


@dataclass(frozen=True)
class Restored:
    """The actor's incarnation and what is live in it after a `Restore`."""

    epoch: str
    settings: Settings
