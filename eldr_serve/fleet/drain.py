"""The drain of a decode replica: it takes no further calls, and its answers move away (see MoveLimiter)."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.engine.methods import DRAIN
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import BadRequestError, RequestRefusedError, one_line_message
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.scheduling.worker_names import replica_of


class Drain(BaseModel):
    """Body of PUT /eldr/drain."""

    model_config = ConfigDict(extra="forbid")

    replica: str = Field(description="decode replica, or one of its workers, as in the status")


async def drain(decode: Fleet, body: bytes) -> dict[str, Any]:
    """Drain a decode replica, or ask again how many calls a drained one has.

    All data-parallel ranks of its engine leave together.

    Returns:
        `replica`, and `in_flight`: the calls of all ingresses that still run there.

    Raises:
        RequestRefusedError: the replica cannot be reached (400), is the only one that takes calls (409),
            failed (the status that it gave) or was lost (503).
    """
    try:
        name = replica_of(Drain.model_validate_json(body).replica)
    except ValidationError as error:
        raise BadRequestError(one_line_message(error)) from error
    if set(map(replica_of, decode.live_names)) == {name}:
        raise RequestRefusedError(
            f"{name} is the only decode replica that takes calls: start another one first", status=409
        )
    if not decode.is_connected(name):
        raise BadRequestError(f"there is no decode replica {name!r}: `eldr status` shows their names")
    try:
        call = decode.call(name, DRAIN, EngineRequest())
        try:
            chunk = await call.read()
        finally:
            call.cancel()
    except CallFailedError as error:
        raise RequestRefusedError(f"decode replica {name}: {error}", status=error.status) from error
    except ChannelLostError as error:
        raise RequestRefusedError(
            f"decode replica {name} was lost: {one_line_message(error)}", status=503
        ) from error
    return {"replica": name, "in_flight": msgspec.msgpack.decode(chunk.payload) if chunk else 0}
