"""What an engine's replica does, over an engine that computes nothing or over none."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from engine_server import COUNTS, serving
from fake_router import wait_until
from ray.exceptions import ActorDiedError, ActorUnavailableError

from eldr_serve.channel import CallFailed
from eldr_serve.engine.calls import decode_header, expert_counts_of, prefill_header
from eldr_serve.pipeline.prefill_step import prefill_answer
from eldr_serve.replicas import servers
from eldr_serve.router.budget import KV_USAGE, SAMPLE
from eldr_serve.scheduling import StepSums


def router(*errors: Exception | None) -> Any:
    """The actor's handle; the first calls fail so, in turn."""
    observe = AsyncMock(side_effect=itertools.chain(errors, itertools.repeat(0.0)))
    return Mock(observe_steps=Mock(remote=observe), reports=lambda: observe.await_count)


async def report(monkeypatch: pytest.MonkeyPatch, find: Any, until: Any) -> None:
    monkeypatch.setattr(servers, "find", find)
    monkeypatch.setattr(servers, "_REPORT_PERIOD_S", 0.001)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r0"))
    monkeypatch.setattr(servers.serve, "get_replica_context", lambda: context)
    engine = SimpleNamespace(take_steps=lambda: StepSums(steps=1.0), prefix_cache=lambda: (32, 960))
    server: Any = SimpleNamespace(_router_name="router", _engine=engine)
    reporting = asyncio.create_task(servers.DecodeServer._report_steps(server))
    await wait_until(until)
    reporting.cancel()


async def test_a_look_up_of_the_router_that_blocks_leaves_the_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, loop_runs, free = router(), threading.Event(), []

    def find(name: str) -> Any:
        free.append(loop_runs.wait(5))
        return actor

    asyncio.get_running_loop().call_later(0.05, loop_runs.set)
    await report(monkeypatch, find, lambda: actor.reports() >= 3)
    assert free == [True]


async def test_the_router_is_looked_up_anew_only_if_it_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, look_ups = router(ActorUnavailableError("test", None), None, ActorDiedError()), []

    def find(name: str) -> Any:
        look_ups.append(actor.reports())
        if len(look_ups) == 1:
            raise ValueError("not there yet")
        return actor

    await report(monkeypatch, find, lambda: actor.reports() >= 5)
    assert look_ups == [0, 0, 3]


async def test_steps_that_could_not_be_reported_are_in_the_next_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = router(ActorUnavailableError("test", None), ActorUnavailableError("test", None))
    await report(monkeypatch, lambda name: actor, lambda: actor.reports() >= 5)
    told = [(call.args[0].steps, call.args[1]) for call in actor.observe_steps.remote.await_args_list]
    assert told[:5] == [(steps, "r0") for steps in (1, 2, 3, 1, 1)]
    assert actor.observe_steps.remote.await_args.args[2] == (32, 960)


async def test_requests_that_wait_in_the_router_count_for_the_autoscaler_while_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "_REPORT_PERIOD_S", 0.001)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r0"))
    monkeypatch.setattr(servers.serve, "get_replica_context", lambda: context)
    actor = Mock(observe_steps=Mock(remote=AsyncMock(return_value=2.5)))
    monkeypatch.setattr(servers, "find", lambda name: actor)
    async with serving(servers.DecodeServer, router_name="router") as (server, _):
        monkeypatch.setattr(server._engine, "take_steps", lambda: StepSums(steps=1.0))

        async def counted() -> float:
            return float((await server.record_autoscaling_stats())["in_flight"])

        async def until(wanted: float) -> None:
            async with asyncio.timeout(30):
                while await counted() != wanted:
                    await asyncio.sleep(0.001)

        await until(2.5)
        actor.observe_steps.remote.side_effect = ActorUnavailableError("test", None)
        await until(0.0)
        server._reporter.cancel()


# -- over an engine that computes nothing --------------------------------------------------------------


async def test_a_prompt_is_prefilled_and_held_until_it_is_released() -> None:
    async with serving(servers.PrefillServer) as (server, channel):
        for name, counts in (("a", COUNTS[0]), ("b", COUNTS[1])):
            call = channel.call("prefill", prefill_header("completions", name), b'{"prompt": "x"}')
            found = await prefill_answer(call)
            np.testing.assert_array_equal(expert_counts_of(found["kv"]), counts)
            assert len(found["token_ids"]) == 4 * found["tokens"]
        assert server._engine.held == {"a", "b"}
        await channel.call("release", {"id": "a"}).end()
        assert server._engine.held == {"b"}
        assert await server.record_autoscaling_stats() == {"in_flight": 0.0, "kv_in_use": 0.0}
        assert not hasattr(server, "record_routing_stats")  # Serve's controller would poll dead replicas
        samples = [server.report() for _ in range(2)]
        assert [(sample[SAMPLE], sample[KV_USAGE]) for sample in samples] == [(0, 0.0), (1, 0.0)]
        await server.check_health()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_comes_with_its_tokens(stream: bool) -> None:
    async with serving(servers.DecodeServer, router_name="router") as (_, channel):
        body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": stream}).encode()
        call = channel.call("generate", decode_header("completions", "id", None), body)
        chunks = []
        while (chunk := await call.read()) is not None:
            chunks.append(chunk)
        assert sum(chunk.tokens for chunk in chunks) == 3
        text = b"".join(chunk.payload for chunk in chunks)
        assert text.count(b"data: ") == (4 if stream else 0)
        assert text.count(b" token") == 3


@pytest.mark.parametrize(
    ("method", "header", "status"),
    [
        ("prefill", prefill_header("completions", "id"), 400),  # its body is no JSON
        ("embeddings", {}, 400),
        ("release", {}, 500),  # it names no prompt
    ],
)
async def test_a_call_that_fails_says_so(method: str, header: dict[str, Any], status: int) -> None:
    async with serving(servers.PrefillServer) as (_, channel):
        with pytest.raises(CallFailed) as failure:
            await channel.call(method, header, b"?").read()
        assert failure.value.status == status
        assert json.loads(failure.value.body)["error"]["code"] == status


async def test_serve_finds_a_destructor_that_python_does_not_call() -> None:
    """Serve awaits the object's attribute; Python would call a method of the class and never await it."""
    async with serving(servers.DecodeServer, router_name="router") as (server, _):
        assert server.__del__ == server.shut_down
        assert not hasattr(type(server), "__del__")
