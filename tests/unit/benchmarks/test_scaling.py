"""The benchmark of scaling engines: its reference requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lib.client import Answer
from benchmarks.serving import scaling
from eldr_serve.errors import ServiceFailedError


async def test_a_failed_reference_request_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first text of any later engine would be the required one."""

    async def fail(http: Any, url: str, body: dict[str, Any]) -> Answer:
        await asyncio.sleep(0)
        return Answer(0.0, 1.0, error="HTTP 503")

    async def load(clients: int, engines: int, timeout_s: float) -> dict[str, Any]:
        raise AssertionError("a phase began without its references")

    monkeypatch.setattr(scaling, "request_completion", fail)
    client: Any = SimpleNamespace(url="http://service")
    work = [{"prompt": "a"}, {"prompt": "b"}]
    service = scaling._Service(client, work)
    monkeypatch.setattr(service, "load", load)
    with pytest.raises(ServiceFailedError, match=r"requests failed: \{'HTTP 503': 2\}"):
        await scaling._run_phases(service, work, 1, 2, 3)
