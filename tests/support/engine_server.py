"""A replica of an engine deployment over a fake engine, and a channel to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from eldr_serve.channel import Call, Channel
from eldr_serve.channel.address import Address
from eldr_serve.engine.calls import split_expert_counts
from eldr_serve.engine.fake import FakeConfig, FakeEngine
from eldr_serve.engine.methods import GENERATE
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.report_fields import ADDRESS

COUNTS = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)


def generate(
    channel: Channel, name: str = "id", tokens: int = 1, *, stream: bool = True, kv: Any = None, **fields: Any
) -> Call:
    """Send a decode call to a replica."""
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": stream}).encode()
    params, counts = split_expert_counts(kv)
    request = EngineRequest(
        "completions", body, name, kv_transfer_params=params, expert_counts=counts, **fields
    )
    return channel.call(GENERATE, request)


def running_tasks() -> set[str]:
    """Return the names of the loop's unfinished tasks."""
    return {task.get_name() for task in asyncio.all_tasks()}


@asynccontextmanager
async def serving(
    kind: Any,
    *,
    start_engine: Any = FakeEngine.start,
    stall_timeout_s: float = 60.0,
    deployment_config: dict[str, Any] | None = None,
    ranks: int = 1,
    **arguments: Any,
) -> AsyncIterator[tuple[Any, Channel]]:
    """Run a server as Serve makes it, and yield it and an ingress's channel to it."""
    server = object.__new__(kind)
    with patch("ray.util.get_node_ip_address", lambda: "127.0.0.1"):
        await server.__init__(
            FakeConfig(COUNTS, step_s=0.001, ranks=ranks, deployment_config=deployment_config or {}),
            start_engine=start_engine,
            stall_timeout_s=stall_timeout_s,
            **arguments,
        )
    address = Address(**(await server.record_replica_metadata())[ADDRESS])
    channel = await address.connect()
    try:
        yield server, channel
    finally:
        channel.close("the test ends")
        await server.shut_down()
