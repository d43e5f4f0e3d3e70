"""Replacements for Ray and for files that the serving code reads, in simulated runs.

`world.patch_serving_code` puts these into the serving code: calls of actors (`Remote`), channels at addresses
without Ray's node, metrics that are dropped, a tokenizer, a routing table, and the keys of tenants.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayError

from eldr_serve.channel import ChannelServer
from eldr_serve.channel.address import Address
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import SignatureSpec
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.limits.keys import Key, Keys, Limits, digest
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.request import RequestFields
from tests.faults.greedy_model import EXPERTS, LAYERS, MODEL, VOCABULARY, prompt_of
from tests.faults.virtual_time import Process, current

# Each tenant's key is its name. The last one has a request limit and sends nothing by itself.
TENANTS, LIMITED, LIMIT = ("a", "b"), "limited", 3


def table(centroids: int, band: float = 0.1) -> RoutingTable:
    """Return a table whose centroid c points at expert c of layer 0."""
    spec = SignatureSpec(np.ones((LAYERS, EXPERTS), np.float32), np.arange(LAYERS))
    domains = [f"domain{c}" for c in range(centroids)]
    points = np.eye(centroids, spec.dim, dtype=np.float32)
    return RoutingTable(MODEL, spec, points, np.ones(centroids, np.int64), domains, band)


def predictor() -> SignaturePredictor:
    """Return a predictor that has seen no token."""
    directions = np.zeros((2, LAYERS, EXPERTS), np.float32)
    directions[[0, 1], 0, [0, 1]] = 1
    return SignaturePredictor(
        model=MODEL,
        tokenizer=FakePromptTokenizer.NAME,
        top_k=1,
        mean=np.full((LAYERS, EXPERTS), 1 / EXPERTS, np.float32),
        token_factors=np.zeros((VOCABULARY, 2), np.float32),
        expert_factors=directions,
        variance=np.full(VOCABULARY, 10, np.float32),
    )


def read_fake_keys(path: Path) -> Keys:
    """Return the keys without reading a file."""
    limits = {"a": Limits(), "b": Limits(priority=2.0), LIMITED: Limits(requests_per_minute=LIMIT)}
    return Keys(tenants=limits, keys=tuple(Key(sha256=digest(name), tenant=name) for name in limits))


class FakePromptTokenizer(PromptTokenizer):
    """A fake of the ingress replicas' tokenizer."""

    NAME = "words"

    async def fingerprint(self) -> str:
        return self.NAME

    async def tokenise(self, fields: RequestFields) -> NDArray[np.uint32]:
        return np.array(prompt_of(fields.model_dump(exclude_none=True)), np.uint32)


class Remote:
    """A fake of `handle.method.remote()` that runs the method in its process.

    Args:
        find: returns the process; None while it is dead.
        call: coroutine function to run there.
    """

    def __init__(
        self, find: Callable[[], Process | None], call: Callable[..., Coroutine[Any, Any, Any]]
    ) -> None:
        self._find = find
        self._call = call

    async def remote(self, *args: Any) -> Any:
        caller, process = current(), self._find()
        if process is None:
            raise RayError("the actor is unreachable")
        answer: asyncio.Future[Any] = caller.loop.create_future()

        def send_answer(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is None:
                caller.soon(receive_answer, task.result(), after_s=0.001)

        def receive_answer(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        process.soon(
            lambda: process.loop.create_task(self._call(process, *args)).add_done_callback(send_answer),
            after_s=0.001,
        )
        while not answer.done():
            await asyncio.wait([answer], timeout=0.5)
            if not process.alive and not answer.done():
                raise RayError("the actor died")
        return answer.result()


async def start_channel_server_without_ray(
    handler: Any, *, max_calls: int = 10**6, **options: Any
) -> tuple[Address, ChannelServer]:
    """Start a channel server as address.start_channel_server does, but without Ray."""
    host = current().name
    server = ChannelServer("secret", handler, max_calls=max_calls, full_error=RuntimeError, **options)
    return Address(host, await server.start(host), "secret"), server


class NoMetrics:
    """Metrics that do nothing, since Ray's need Ray."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None
