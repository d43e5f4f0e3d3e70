"""Send more prompts at once than the demo's prefill engine can compute within its bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service import ROOT, Service, wait_for

from benchmarks.serving.backlog import row, send_all, texts
from examples.demo_model import WEIGHTS

REQUESTS, TOKENS = 150, 1500


def test_each_prompt_is_answered_or_gets_retry_after_and_no_engine_is_ejected(service: Service) -> None:
    prompts = texts(ROOT / "examples/demo_model" / "prompts", REQUESTS, TOKENS, seed=39, model=Path(WEIGHTS))
    before = service.status()["counters"]
    found = asyncio.run(send_all(service.url, prompts, timeout_s=120.0))
    assert [request.error for request in found if request.error] == []

    def prefilled() -> int:
        return service.status()["counters"].get("prefills", 0) - before.get("prefills", 0)

    wait_for(lambda: prefilled() >= REQUESTS, "all prefills are counted")
    figures = row(found, before, service.status()["counters"])
    assert figures["answered"] == REQUESTS
    assert figures["refusals"] > 0
    assert figures["set_aside"] == figures["duplicate_prefills"] == 0
    assert set(service.status()["ingress"]["prefill_wait_s"]) == set(
        service.status()["ingress"]["prefill_in_flight"]
    )
