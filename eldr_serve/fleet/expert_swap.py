"""Changes of the expert placement of decode engines while they serve."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.engine.experts_change import ExpertsChange
from eldr_serve.engine.methods import PLACE_EXPERTS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import BadRequestError, OverloadedError, RequestRefusedError, one_line_message
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.scheduling.worker_names import replica_of


async def place_on_replicas(decode: Fleet, body: bytes) -> dict[str, Any]:
    """Apply a placement to the decode engines one after the other, so that only one at a time slows down.

    Returns:
        The cost of each replica's swap, as its Engine.place_experts returns it.

    Raises:
        RequestRefusedError: the body is invalid, or an engine refuses it; engines that were changed before
            keep the new placement.
    """
    change, _ = ExpertsChange.parse(body)
    live_replicas = dict.fromkeys(map(replica_of, decode.live_workers))
    names = list(live_replicas if change.replicas is None else dict.fromkeys(change.replicas))
    if unknown_names := set(names).difference(live_replicas):
        raise BadRequestError(
            f"there is no decode replica {min(unknown_names)!r}: `eldr status` shows their names"
        )
    if not names:
        raise OverloadedError("no decode replica can be reached")
    swaps: dict[str, Any] = {}
    for name in names:
        try:
            swaps[name] = await _place_on(decode, name, body)
        except (CallFailedError, ChannelLostError) as error:
            suffix = f"; already changed: {', '.join(swaps)}" if swaps else ""
            raise RequestRefusedError(
                f"decode replica {name}: {_reason(error)}{suffix}",
                status=error.status if isinstance(error, CallFailedError) else 503,
            ) from error
    return swaps


async def _place_on(decode: Fleet, name: str, body: bytes) -> Any:
    call = decode.call(name, PLACE_EXPERTS, EngineRequest(body=body))
    try:
        chunk = await call.read()
    finally:
        call.cancel()
    return msgspec.msgpack.decode(chunk.payload if chunk else b"\xc0")


def _reason(error: CallFailedError | ChannelLostError) -> str:
    if isinstance(error, ChannelLostError):
        return f"it was lost: {one_line_message(error)}"
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answered {error.status}"
