"""More prompts at once than the demo's prefill engine can compute within its bound."""

import asyncio
from pathlib import Path

from benchmarks.serving.backlog import row, send_all, texts
from examples.demo_model import WEIGHTS
from tests.e2e.service import ROOT, Service, wait_for

REQUESTS, TOKENS = 40, 1500  # four times what the bound of 8 s admits


def test_each_prompt_is_answered_or_gets_retry_after_and_no_engine_is_ejected(service: Service) -> None:
    prompts = texts(ROOT / "examples/demo_model" / "prompts", REQUESTS, TOKENS, seed=39, model=Path(WEIGHTS))
    before = service.status()["counters"]
    answers = asyncio.run(send_all(service.url, prompts, timeout_s=120.0))
    assert [request.error for request in answers if request.error] == []
    expected_prefills = before.get("prefills", 0) + REQUESTS
    wait_for(lambda: service.counter("prefills") >= expected_prefills, "all prefills are counted")
    figures = row(answers, before, service.status()["counters"])
    assert figures["answered"] == REQUESTS
    assert figures["refusals"] > 0
    assert figures["ejected"] == figures["duplicate_prefills"] == 0
    ingress = service.status()["ingress"]
    assert ingress["prefill_wait_s"].keys() == ingress["prefill_in_flight"].keys()
