"""The expert placement of a replica's engine, set by calls of PLACE_EXPERTS."""

from __future__ import annotations

import msgspec

from eldr_serve.engine.methods import ExpertsChange
from eldr_serve.engine.protocol import MovesExperts


async def place_experts(engine: MovesExperts, body: bytes) -> bytes:
    """Apply the placement of the body to the engine; return the cost of the swap, as msgpack."""
    change, placement = ExpertsChange.parse(body)
    load = placement.expected_tokens if change.load is None else change.load
    return msgspec.msgpack.encode(await engine.place_experts(placement, load))
