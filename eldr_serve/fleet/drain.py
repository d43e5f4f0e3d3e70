"""The drain of a decode replica: it takes no further calls, and its answers move away (see MoveLimiter)."""

from __future__ import annotations

import msgspec

from eldr_serve.engine.methods import DRAIN
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.scheduling.worker_names import replica_of


class LastReplicaError(RuntimeError):
    """The decode replica is the only one that takes calls."""


class UnknownReplicaError(LookupError):
    """There is no channel to a decode replica of that name."""


async def drain(decode: Fleet, replica: str) -> int:
    """Drain a decode replica, or ask again how many calls a drained one has.

    All data-parallel ranks of its engine leave together.

    Returns:
        The number of calls of all ingresses that still run there.

    Raises:
        LastReplicaError, UnknownReplicaError: the replica is not drained.
        CallFailedError: the replica failed.
        ChannelLostError: the replica was lost.
    """
    if set(map(replica_of, decode.live_workers)) == {replica}:
        raise LastReplicaError(
            f"{replica} is the only decode replica that takes calls: start another one first"
        )
    if not decode.is_connected(replica):
        raise UnknownReplicaError(f"there is no decode replica {replica!r}: `eldr status` shows their names")
    call = decode.call(replica, DRAIN, EngineRequest())
    try:
        chunk = await call.read()
    finally:
        call.cancel()
    return msgspec.msgpack.decode(chunk.payload, type=int) if chunk else 0
