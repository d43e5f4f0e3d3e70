"""A short run of `python -m tests.fuzz` against the running service."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from loadgen.held_resources import settle
from tests.e2e.service import ADMIN_KEY, HTTP, Service
from tests.fuzz.__main__ import Outcome, corpus, send_all
from tests.fuzz.connections import occupy, slow_request

MODEL = "eldr-demo"
CASES = 300


@pytest.fixture
def own_policy(service: Service) -> Iterator[None]:
    service.set_policy("locality-band")
    yield
    service.set_policy("locality-band")


def test_hostile_requests_cause_no_failure(service: Service, own_policy: None) -> None:
    address = urlsplit(service.url)
    assert address.hostname is not None
    assert address.port is not None
    cases = corpus(service.url, MODEL, CASES, seed=0, admin_key=ADMIN_KEY)
    where = address.hostname, address.port

    async def send_cases() -> list[Outcome]:
        async with occupy(*where, idle=1000, slow=20, request=slow_request(MODEL, 1000)):
            # Slow requests decode at the same time.
            return await send_all(cases, *where, in_flight=8, limit_s=90)

    outcomes = asyncio.run(send_cases())
    assert len(outcomes) == len(cases) == CASES
    assert not [(o.problem, o.case.label, o.case.raw[-300:]) for o in outcomes if o.problem]
    assert settle(service.url, MODEL, ADMIN_KEY) == []


REFUSED: tuple[dict[str, object], ...] = (
    {"max_tokens": 100_000},
    {"min_tokens": 9, "max_tokens": 4},
    {"temperature": -1},
    {"logprobs": 1000},
    {"allowed_token_ids": [10**8]},
    {"structured_outputs": {"regex": "("}},
)


def test_requests_that_decode_refuses_cost_no_prefill(service: Service) -> None:
    (before,) = service.settled_counters("prefills")
    for fields, stream in itertools.product(REFUSED, (False, True)):
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "stream": stream} | fields
        answer = HTTP.post(f"{service.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"]
    time.sleep(0.5)  # counters arrive with the ingress's next message
    assert service.counter("prefills") == before
