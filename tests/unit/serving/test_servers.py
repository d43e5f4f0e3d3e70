"""What an engine's replica does beside serving, without an engine."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from eldr_serve.routing import StepSums
from eldr_serve.serving import servers


class Router:
    """The actor's handle; the calls of `errors` fail, in turn."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self.reports = 0
        self.observe_steps = SimpleNamespace(remote=self._observe)

    async def _observe(self, sums: StepSums) -> None:
        self.reports += 1
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error


async def report(monkeypatch: pytest.MonkeyPatch, find: Any, until: Any) -> None:
    monkeypatch.setattr(servers, "find", find)
    monkeypatch.setattr(servers, "_REPORT_PERIOD_S", 0.001)
    monkeypatch.setattr(servers.steps, "take", lambda: StepSums(steps=1.0))
    server: Any = SimpleNamespace(_router_name="router")
    reporting = asyncio.create_task(servers.DecodeServer._report_steps(server))
    async with asyncio.timeout(10):
        while not until():
            await asyncio.sleep(0.001)
    reporting.cancel()


async def test_a_look_up_of_the_router_that_blocks_leaves_the_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, loop_runs, free = Router(), threading.Event(), []

    def find(name: str) -> Router:
        free.append(loop_runs.wait(5))
        return router

    asyncio.get_running_loop().call_later(0.05, loop_runs.set)
    await report(monkeypatch, find, lambda: router.reports == 3)
    assert free == [True]


async def test_the_router_is_looked_up_anew_only_if_it_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, look_ups = Router(ActorUnavailableError("test", None), None, ActorDiedError()), []

    def find(name: str) -> Router:
        look_ups.append(router.reports)
        if len(look_ups) == 1:
            raise ValueError("not there yet")
        return router

    await report(monkeypatch, find, lambda: router.reports == 5)
    assert look_ups == [0, 0, 3]
