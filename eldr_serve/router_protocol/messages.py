"""Messages between the DecodeRouter actor and its ingresses, and their encoding.

An ingress's `subscribe` call opens with Restore. The router answers with LiveSettings and WorkerPositions, at
once and after each change; the ingress's notes are Workers and IngressReport. A `place` call opens with
Place. The router answers with Queued, Granted or Unplaced; the notes are a further Place, Counted, or the
number of generated tokens.

All messages are MessagePack, encoded from msgspec structs and dataclasses. An array consists of its dtype,
shape and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from eldr_serve.scheduling import PlacementRequest
from eldr_serve.scheduling.policies.registry import reads_counts
from eldr_serve.scheduling.types import Lease, LeaseState

LOCAL_FALLBACK = "local-fallback"  # `Granted.policy` of a lease that its ingress has made

# `Granted.reason` of such a lease: why the router did not place the request
NO_WORKER = "no-worker"  # the router knows no decode worker
ROUTER_ERROR = "router-error"  # an exception in the router
ROUTER_UNREACHABLE = "router-unreachable"  # no answer in time, or settings that the ingress cannot use


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NamedPolicy:
    """Name and parameters of a policy in the settings."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveSettings:
    """The settings that an operator may change while requests run; the newest version wins."""

    version: int
    policy: str
    parameters: dict[str, Any]
    table: bytes | None  # a RoutingTable file
    table_version: int
    predictor: bytes | None = None  # a SignaturePredictor file
    predictor_version: int = 0
    deployed_fingerprint: str = ""  # of the deployed settings that an operator may have changed
    shadow: NamedPolicy | None = None  # policy to compare the live one with

    @property
    def reads_counts(self) -> bool:
        """Return whether the policy or the comparison of placements reads a request's expert counts."""
        return self.shadow is not None or reads_counts(self.policy)


class Restore(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """The state that an ingress sends after it has connected; a `place` call for each lease follows.

    Attributes:
        ingress: id of the ingress.
        workers: decode workers that the ingress can reach; None until it has found the first one.
        leases: ids of the requests that hold a lease; all other requests of the ingress have ended or wait.
        settings: newest settings that the ingress knows, which a restarted router adopts.
        counts_shape: (MoE layers, experts) as engines report it, if known.
        positions: newest WorkerPositions.workers that the ingress knows, which a restarted router adopts;
            None: an ingress of an older version, which cannot read WorkerPositions.
    """

    ingress: str
    workers: tuple[str, ...] | None = None
    leases: tuple[str, ...] = ()
    settings: LiveSettings | None = None
    counts_shape: tuple[int, int] | None = None
    positions: tuple[str | None, ...] | None = None


class WorkerPositions(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The decode worker in each position; None: the position is vacant."""

    workers: tuple[str | None, ...]


class Workers(msgspec.Struct, tag=True, frozen=True):
    """The decode workers that the ingress can reach; a later list replaces this one."""

    workers: tuple[str, ...]


class StreamLatencies(msgspec.Struct, frozen=True):
    """Latencies of a finished stream at its client, from the request's arrival at the ingress.

    Attributes:
        ttft_s: time to the first chunk, s.
        tpot_s: mean time between tokens, s; None with fewer than two tokens, or with several answers.
    """

    ttft_s: float
    tpot_s: float | None


class IngressReport(msgspec.Struct, tag=True, frozen=True):
    """Counts of an ingress since its last report.

    Attributes:
        events: increments of the status's counters.
        streams: streams that have ended.
        prediction: OnlinePredictor.status of an ingress that has a predictor.
    """

    events: dict[str, int] = {}
    streams: tuple[StreamLatencies, ...] = ()
    prediction: dict[str, Any] | None = None


class Granted(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The content of a granted lease, see Lease."""

    worker: str
    position: int = -1
    num_candidates: int = 0
    similarity: float | None = None
    is_most_similar: bool = False
    reason: str = ""
    policy: str = ""
    waited_s: float = 0.0
    generated_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def from_lease(cls, lease: Lease) -> Granted:
        """Return the content of a lease."""
        return cls(*(getattr(lease, name) for name in cls.__struct_fields__))

    def copy_to(self, lease: Lease) -> None:
        """Grant the lease with this content."""
        lease.become(LeaseState.GRANTED)
        for name in self.__struct_fields__:
            setattr(lease, name, getattr(self, name))


class Queued(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The answer that a request waits in the decode queue."""


class Unplaced(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The answer that the router cannot place the request, so the ingress places it.

    Attributes:
        reason: NO_WORKER or ROUTER_ERROR.
    """

    reason: str = NO_WORKER


class Place(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A request for a lease. As a note, it has new scores or a lease that its ingress made.

    Attributes:
        lease: the lease that the ingress holds already, from local fallback or from an earlier connection.
        generated_tokens: number of tokens that the answer has already, if it is resumed.
    """

    request: PlacementRequest
    lease: Granted | None = None
    generated_tokens: int = 0


class Counted(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A request that holds a lease, with its measured counts and length."""

    request: PlacementRequest


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _array(kind: Any, encoded: Any) -> NDArray[Any]:
    name, shape, content = encoded
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of type {name} cannot be received")
    return np.frombuffer(content, dtype).reshape(shape)


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes messages of this type; it raises msgspec.DecodeError for others."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_array).decode


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
