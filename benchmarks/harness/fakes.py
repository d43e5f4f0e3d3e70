"""Engines that compute nothing: what is left is the serving layer."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application

from benchmarks.harness.synthetic import prompt_counts, random_spec, table_near
from eldr_serve.channel import Answer
from eldr_serve.engine.keys import SIGNATURE
from eldr_serve.serving.address import open_channel
from eldr_serve.serving.admission import IngressOptions
from eldr_serve.serving.engine_calls import describe
from eldr_serve.serving.fleet import METADATA
from eldr_serve.serving.ingress import EldrIngress, decode_directory, prefill_directory
from eldr_serve.serving.ingress import application as http_application
from eldr_serve.serving.path import PathOptions
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.signature import pack_counts

MODEL = "fake"
_PROMPT_TOKENS = 300
_STEP_S = 0.03


class FakeEngine(ABC):
    """An engine's replica: its channel, and nothing behind it."""

    async def __init__(self) -> None:  # type: ignore[misc]
        self._address, self._channel = await open_channel(self.answer, describe=describe)

    @abstractmethod
    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """Answer a call."""

    async def record_replica_metadata(self) -> dict[str, Any]:
        """As EngineServer's."""
        return {METADATA: asdict(self._address)}

    async def check_health(self) -> None:  # noqa: B027 - that is all there is to it
        """Always well."""


class FakePrefill(FakeEngine):
    """Answers after `seconds` with a signature of real size."""

    async def __init__(self, seconds: float, seed: int) -> None:  # type: ignore[misc]
        rng = np.random.default_rng(seed)
        self._seconds = seconds
        self._packed = [pack_counts(counts) for counts in prompt_counts(32, rng)]
        self._number = 0
        await super().__init__()

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """One answer, as for a prefill call; there is nothing to release."""
        if method == "release":
            return
        await asyncio.sleep(self._seconds)
        self._number += 1
        kv = {
            "do_remote_prefill": True,
            "remote_request_id": header["id"],
            SIGNATURE: self._packed[self._number % len(self._packed)],
        }
        ids = np.zeros(_PROMPT_TOKENS, np.uint32).tobytes()
        answer.send(msgspec.msgpack.encode({"tokens": _PROMPT_TOKENS, "token_ids": ids, "kv": kv}), 1)


class FakeDecode(FakeEngine):
    """Streams `max_tokens` tokens, one every `gap_ms`; those that are due in one step are sent together.

    Both are read of the request's body.

    A step takes `_STEP_S`, as of an engine at work, so that a stream's tokens come in every n-th step.
    """

    async def __init__(self) -> None:  # type: ignore[misc]
        self._due: defaultdict[int, list[_Stream]] = defaultdict(list)  # by step
        self._number = 0  # of the newest step
        self._steps = asyncio.get_running_loop().create_task(self._step())
        await super().__init__()

    async def answer(self, method: str, header: dict[str, Any], body: bytes, answer: Answer) -> None:
        """The stream of a decode call."""
        chunk = f'data: {{"id":"{header["id"]}","choices":[{{"index":0,"text":" token"}}]}}\n\n'.encode()
        asked = msgspec.json.decode(body)
        gap_steps = max(1, round(asked.get("gap_ms", 0) / 1000 / _STEP_S))
        stream = _Stream(answer, chunk, asked.get("max_tokens") or 1, gap_steps)
        self._due[self._number + 1].append(stream)
        await stream.ended.wait()

    async def _step(self) -> None:
        start = time.monotonic()
        while True:
            await asyncio.sleep(start + (self._number + 1) * _STEP_S - time.monotonic())
            self._number += 1
            for stream in self._due.pop(self._number, ()):
                if stream.step():
                    self._due[self._number + stream.gap_steps].append(stream)


class _Stream:
    def __init__(self, answer: Answer, chunk: bytes, tokens: int, gap_steps: int) -> None:
        self.ended = asyncio.Event()
        self.gap_steps = gap_steps
        self._answer, self._chunk, self._left = answer, chunk, tokens

    def step(self) -> bool:
        """Send a token; whether there are more."""
        self._answer.send(self._chunk, 1)
        self._left -= 1
        if self._left == 0:
            self._answer.send(b"data: [DONE]\n\n")
            self.ended.set()
        return self._left > 0


def fake_application(
    *, decode_replicas: int, prefill_s: float, seed: int, own_port: int | None = None
) -> Application:
    """Our ingress, router actor and channels over engines that compute nothing.

    Args:
        own_port: see IngressOptions.port.
    """
    name = "bench-streams"

    def deployed(engine: type[FakeEngine], directory_name: str, replicas: int) -> Any:
        router = RequestRouterConfig(
            request_router_class="eldr_serve.serving.request_router.DirectoryRouter",
            request_router_kwargs={"directory_name": directory_name},
        )
        return serve.deployment(
            engine,
            num_replicas=replicas,
            request_router_config=router,
            ray_actor_options={"num_cpus": 0.1},
        )

    rng = np.random.default_rng(seed)
    table = table_near(prompt_counts(decode_replicas, rng), decode_replicas, rng, spec=random_spec(rng))
    limits = IngressOptions(port=own_port)
    ingress = serve.deployment(
        serve.ingress(http_application)(EldrIngress),
        name="EldrIngress",
        max_ongoing_requests=2 * limits.max_in_flight,
        ray_actor_options={"num_cpus": 0.1},
    )
    return ingress.bind(
        prefill=deployed(FakePrefill, prefill_directory(name), 1).bind(prefill_s, seed),
        decode=deployed(FakeDecode, decode_directory(name), decode_replicas).bind(),
        model_card={"id": MODEL, "object": "model"},
        openapi={},
        application=name,
        router=RouterSettings(
            model_id=MODEL, policy="locality-band", table=replace(table, model=MODEL).to_bytes()
        ),
        options=limits,
        path_options=PathOptions(),
    )
