"""What each pair of engines has done before users come."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ingress_app import Handle, answers
from test_path import good_prefill

from eldr_serve.serving.replicas import Engines, ReplicaDirectory
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.wire import REPLICA


class Engine(Handle):
    """A deployment that is up."""

    def __getattr__(self, method: str) -> Any:
        called = super().__getattr__(method)
        if method == "check_health":

            async def healthy() -> None:
                pass

            called.remote = healthy
        return called


class Client:
    """A RouterClient that takes everything."""

    async def call(self, *_: Any) -> None:
        pass


async def test_every_pair_hands_over_and_compiles_its_samplers() -> None:
    prefill, decode = Engine(good_prefill), Engine(answers)
    directories = ReplicaDirectory(), ReplicaDirectory()
    directories[0].publish(["p0"])
    directories[1].publish(["d0", "d1"])
    engines = Engines(prefill, decode, *directories)  # type: ignore[arg-type]
    warmup = Warmup(engines=engines, client=Client(), model_id="m")  # type: ignore[arg-type]
    running = asyncio.create_task(warmup.run())
    async with asyncio.timeout(5):
        while not warmup.ready:
            await asyncio.sleep(0.01)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert warmup.pairs == 2
    for name in ("d0", "d1"):
        sent = [r for r in decode.requests if r.kv_transfer_params[REPLICA] == name]
        assert [(r.n, r.logprobs, r.temperature) for r in sent] == [(1, 0, 1.0), (2, 0, 1.0)]
        assert "do_remote_prefill" in sent[0].kv_transfer_params
        assert "do_remote_prefill" not in sent[1].kv_transfer_params
