"""Messages between the DecodeRouter actor and its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from eldr_serve.scheduling import Placement, PlacementRequest, reads_counts


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NamedPolicy:
    """Name and parameters of a policy in the settings."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Settings that an operator may change while requests run; the newest version wins."""

    version: int
    policy: str
    parameters: dict[str, Any]
    table: bytes | None  # a RoutingTable file
    table_version: int
    predictor: bytes | None = None  # a SignaturePredictor file
    predictor_version: int = 0
    deployed: str = ""  # fingerprint of the deployment settings that these are based on
    shadow: NamedPolicy | None = None  # policy to compare the live one with

    @property
    def read_counts(self) -> bool:
        """Return whether the policy or the comparison of placements reads a request's expert counts."""
        return self.shadow is not None or reads_counts(self.policy)


@dataclass(frozen=True)
class Answered:
    """Latencies of a finished stream as its client saw them, from the request's arrival at the ingress.

    Attributes:
        ttft_s: time to the first chunk, s.
        tpot_s: mean time between tokens, s; None with fewer than two.
    """

    ttft_s: float
    tpot_s: float | None


@dataclass(frozen=True)
class Exchange:
    """One message from a client: everything that happened since its last one."""

    client: str
    placements: tuple[PlacementRequest, ...] = ()
    released: tuple[str, ...] = ()
    progress: dict[str, int] = field(default_factory=dict)  # request id -> generated tokens
    held: tuple[Placement, ...] = ()  # leases that the client made or corrected itself
    counted: tuple[PlacementRequest, ...] = ()  # requests leased without true signatures, with them
    known_epoch: str = ""
    events: dict[str, int] = field(default_factory=dict)  # counters seen by the client, as increments
    answered: tuple[Answered, ...] = ()
    prediction: dict[str, Any] | None = None  # OnlinePredictor.status, where the client has one


@dataclass(frozen=True)
class Reply:
    """The actor's reply to an Exchange; `placements` are in the order of the exchange.

    Each is LEASED, QUEUED (fetch its lease with `granted`), or still SENT (score and send it again).
    """

    epoch: str  # a new value means that the actor has restarted
    settings_version: int
    placements: tuple[Placement, ...] = ()
    refused: str | None = None  # why nothing was placed; "unknown-client": call `restore` first


@dataclass(frozen=True)
class Restore:
    """A client's message to a new actor: workers, settings and leases that the old one knew."""

    client: str
    workers: tuple[str, ...]
    settings: Settings | None
    leases: tuple[Placement, ...]
    signature_shape: tuple[int, int] | None = None  # as engines report it, if known


@dataclass(frozen=True)
class Restored:
    """The actor's reply to a `Restore`: its incarnation and live settings."""

    epoch: str
    settings: Settings
