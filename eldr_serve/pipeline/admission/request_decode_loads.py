"""The loads of the decode workers, from which an ingress predicts latencies."""

from __future__ import annotations

import asyncio

from eldr_serve.actors import ACTOR_UNAVAILABLE
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling.decode_loads import DecodeLoads

_ROUTER_TIMEOUT_S = 0.1  # without the router's answer in this time, nothing is predicted from loads


async def request_decode_loads(
    router_client: RouterClient, context: RequestContext, decode: Fleet
) -> DecodeLoads | None:
    """Return the loads of the decode workers from the router; None if it does not answer in time."""
    if router_client.router_unreachable:
        return None
    blocks = None
    if context.prompt_ids is not None:
        blocks = context.blocks(context.prompt_ids, decode.directory.block_tokens)
    try:
        async with asyncio.timeout(_ROUTER_TIMEOUT_S):
            return await router_client.decode_loads(blocks)
    except ACTOR_UNAVAILABLE:
        return None
