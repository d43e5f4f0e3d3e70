"""An engine that counts no experts never becomes ready, and says why; over fakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve.llm.deployment import LLMServer

from eldr_serve.serving import warmup
from eldr_serve.serving.compat import ErrorResponse
from eldr_serve.serving.errors import ConfigurationError
from eldr_serve.serving.replicas import Engines
from eldr_serve.serving.servers import PrefillServer, ReleaseKv
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.wire import REPLICA, REQUEST, SIGNATURE
from eldr_serve.signature import pack_counts

# Ray's destructor is a coroutine, which Serve awaits.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'LLMServer.__del__'")
COUNTED = {"do_remote_prefill": True, SIGNATURE: pack_counts(np.ones((3, 4), np.uint32))}
UNCOUNTED = {"do_remote_prefill": True}


def answer(params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(kv_transfer_params=params)


def error(message: str) -> ErrorResponse:
    return ErrorResponse(error={"message": message, "type": "test", "code": 500})


class Serving:
    """vLLM's serving object: it answers every prompt with `response`, an error or transfer parameters."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.requests: list[Any] = []
        self.engine_client: Any = SimpleNamespace(
            input_processor=SimpleNamespace(process_inputs=lambda *_, **__: None),
            get_supported_tasks=self.tasks,
            generate=self.generate,
        )

    async def tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def create_completion(self, request: Any, raw_request: Any) -> Any:
        self.requests.append(request)
        if isinstance(self.response, ErrorResponse):
            return self.response
        return self.engine_client.generate([1], request.to_sampling_params(9, {}), "id")

    create_chat_completion = create_completion

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(prompt_token_ids=[1], kv_transfer_params=self.response)


class Engine:
    """What LLMServer would start."""

    def __init__(self, response: Any) -> None:
        self._oai_serving_chat = self._oai_serving_completion = self.serving = Serving(response)
        self.abandoned: list[str] = []

    async def collective_rpc(self, method: str, timeout: Any, args: Any, kwargs: Any) -> None:
        assert method == "eldr_abandon"
        self.abandoned += args[0]


async def start(monkeypatch: pytest.MonkeyPatch, response: Any) -> Engine:
    engine = Engine(response)

    async def start_engine(server: Any) -> None:
        server.engine = engine

    monkeypatch.setattr(LLMServer, "start", start_engine)
    server = object.__new__(PrefillServer)
    await server.__init__(SimpleNamespace(model_id="m", multiplex_config=lambda: None))  # as Serve does
    return engine


async def test_a_prefill_engine_that_counts_starts_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start(monkeypatch, COUNTED)
    (request,) = engine.serving.requests
    assert request.model == "m"
    assert request.kv_transfer_params["do_remote_decode"]
    assert engine.abandoned == [request.kv_transfer_params[REQUEST]]


@pytest.mark.parametrize("params", [None, UNCOUNTED, UNCOUNTED | {SIGNATURE: "?"}])
async def test_a_prefill_engine_that_counts_no_experts_does_not_start(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any] | None
) -> None:
    with pytest.raises(ConfigurationError, match=r"'m' \(vLLM .*without an expert signature.*scheduler_cls"):
        await start(monkeypatch, params)


async def test_a_prefill_engine_that_fails_its_first_prompt_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match="'m' failed its first prompt: no room"):
        await start(monkeypatch, error("no room"))


class Handle:
    """A DeploymentHandle whose calls answer with what a test puts into `response`."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.released: list[ReleaseKv] = []
        self.prompts = 0

    def options(self, **_: Any) -> Handle:
        return self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: getattr(self, f"_{name}")(*args))

    async def _check_health(self) -> None: ...

    async def _release_kv(self, release: ReleaseKv) -> None:
        self.released.append(release)

    async def _completions(self, request: Any) -> AsyncIterator[Any]:
        self.prompts += 1
        yield self.response


class Client:
    """A RouterClient that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, *call: Any) -> None:
        self.calls.append(call)


async def test_a_pair_is_warm_once_its_prefill_sends_a_signature(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warmup, "_PERIOD_S", 0.001)
    prefill, decode, client = Handle(answer(UNCOUNTED)), Handle(answer(None)), Client()
    engines: Any = Engines(prefill, decode, SimpleNamespace(live=["p"]), SimpleNamespace(live=["d"]))  # type: ignore[arg-type]
    warm = Warmup(engines=engines, client=client, model_id="m")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(warm.run())
        try:
            while len(prefill.released) < 2:
                await asyncio.sleep(0)
            assert not warm.ready
            assert (warm.pairs, decode.prompts, client.calls) == (0, 0, [])
            assert prefill.released[0].kv_transfer_params == {REPLICA: "p"}
            assert "p sends no expert signatures" in caplog.text
            prefill.response = answer(COUNTED)
            while not client.calls:
                await asyncio.sleep(0)
        finally:
            task.cancel()
    assert warm.ready
    assert (warm.pairs, client.calls) == (1, [("expect_signatures", 3, 4)])
