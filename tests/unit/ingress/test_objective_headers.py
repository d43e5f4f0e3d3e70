"""Objectives over HTTP: headers, tenants' defaults, refusals and the status."""

from pathlib import Path
from typing import Any

import pytest

from eldr_serve.limits.keys import Keys, add_key, write_keys
from eldr_serve.objective import TPOT_HEADER, TTFT_HEADER
from eldr_serve.scheduling import StepCost
from tests.support.fake_router import FakeActor
from tests.support.ingress_app import COMPLETIONS, HELLO, running_app, stream_answer

SLOW = StepCost(fixed_s=0.1)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
async def test_a_bad_header_gets_400_with_one_sentence(path: str) -> None:
    body: dict[str, Any] = HELLO | {"messages": [{"role": "user", "content": "x"}]}
    async with running_app() as app:
        answer = await app.post(path, body, **{TTFT_HEADER: "soon"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            "the header x-eldr-ttft-ms is 'soon': send a number of milliseconds above 0 and at most 3600000, "
            "such as 500"
        )
        assert answer.json()["error"]["param"] == TTFT_HEADER
        assert not app.prefill.sent
        assert not app.decode.sent


async def test_a_request_that_would_miss_its_objective_is_refused_before_prefill() -> None:
    async with running_app(actor=FakeActor(cost=SLOW), decode=stream_answer) as app:
        body = HELLO | {"stream": True}
        assert (await app.post(COMPLETIONS, body)).status_code == 200  # the client is connected now
        refused = await app.post(COMPLETIONS, body, **{TPOT_HEADER: "50"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "10"
        assert refused.json()["error"]["type"] == "overloaded"
        assert "a token every 100.1 ms (objective: 50 ms)" in refused.json()["error"]["message"]
        assert len(app.prefill.requests) == 1
        assert (await app.post(COMPLETIONS, body, **{TPOT_HEADER: "500"})).status_code == 200
        assert (await app.status())["ingress"]["objectives"]["ttft"]["requests"] == 0


async def test_a_tenants_default_holds_unless_a_header_replaces_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = add_key(Keys(), "strict", "a", {"tpot_ms": 50})
    write_keys(file, add_key(keys, "patient", "b", {}))
    async with running_app(actor=FakeActor(cost=SLOW), keys_file=file) as app:
        assert (await app.post(COMPLETIONS, HELLO, key="b")).status_code == 200
        assert (await app.post(COMPLETIONS, HELLO, key="a")).status_code == 503
        assert (await app.post(COMPLETIONS, HELLO, key="a", **{TPOT_HEADER: "500"})).status_code == 200
