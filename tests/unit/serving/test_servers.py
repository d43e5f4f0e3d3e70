"""What an engine's replica does beside serving, without an engine."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from router_talk import settled

from eldr_serve.routing import StepSums
from eldr_serve.serving import servers


def router(*errors: Exception | None) -> Any:
    """The actor's handle; the first calls fail so, in turn."""
    observe = AsyncMock(side_effect=itertools.chain(errors, itertools.repeat(None)))
    return Mock(observe_steps=Mock(remote=observe), reports=lambda: observe.await_count)


async def report(monkeypatch: pytest.MonkeyPatch, find: Any, until: Any) -> None:
    monkeypatch.setattr(servers, "find", find)
    monkeypatch.setattr(servers, "_REPORT_PERIOD_S", 0.001)
    monkeypatch.setattr(servers.steps, "take", lambda: StepSums(steps=1.0))
    server: Any = SimpleNamespace(_router_name="router")
    reporting = asyncio.create_task(servers.DecodeServer._report_steps(server))
    await settled(until)
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
