"""The ingress with keys: authentication, calls to engines, rate limits, status and audit log."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.engine.calls import STEERING_HEADERS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.requests.request_parsing import parse_request
from eldr_serve.ingress.endpoints import ENDPOINTS, Audience
from eldr_serve.limits.keys import Keys, add_key, write_keys
from eldr_serve.request import RequestFields, tenant_salt
from eldr_serve.signatures import coordinator_client
from tests.support.fake_fleet import answer_with, refusal
from tests.support.fake_router import wait_until
from tests.support.ingress_app import CHAT, COMPLETIONS, HELLO, KEY, running_app

HEY = {"model": "m", "messages": [{"role": "user", "content": "hey"}]}


@asynccontextmanager
async def with_tenants(folder: Path, limits: dict[str, dict[str, float]], **options: Any) -> Any:
    """Run an ingress whose tenants have their names as keys."""
    keys, file = Keys(), folder / "keys.json"
    for tenant, given_limits in limits.items():
        keys = add_key(keys, tenant, tenant, given_limits)
    write_keys(file, keys)
    async with running_app(keys_file=file, **options) as app:
        yield app


@pytest.mark.parametrize("audience", Audience)
async def test_endpoints_need_the_key_of_their_audience(tmp_path: Path, audience: Audience) -> None:
    keys_of_others: dict[Audience, tuple[str, ...]] = {
        Audience.ANYONE: (),
        Audience.TENANTS: ("", "Bearer no", "a", f"Bearer {KEY}"),
        Audience.OPERATORS: ("", "Bearer no", KEY, "Bearer a"),
    }
    endpoints = [endpoint for endpoint in ENDPOINTS if endpoint.audience is audience]
    calls = [(method, endpoint.documented_path) for endpoint in endpoints for method in endpoint.methods]
    async with with_tenants(tmp_path, {"a": {}}) as app:
        for method, path in calls:
            for authorization in keys_of_others[audience]:
                headers = {"authorization": authorization}
                answer = await app.client.request(method, path, json=HELLO, headers=headers)
                assert answer.status_code == answer.json()["error"]["code"] == 401
            if audience is Audience.ANYONE:
                assert (await app.client.request(method, path)).status_code in (200, 503), path
        assert not app.prefill.sent + app.decode.sent


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, HELLO), (CHAT, HEY), (COMPLETIONS, HELLO | {"n": 2})]
)
async def test_engines_receive_a_cache_salt_per_tenant_and_no_priority_of_the_client(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with with_tenants(tmp_path, {"a": {}, "b": {}}) as app:
        salts = []
        for tenant in "ab":
            for own_fields in ({}, {"cache_salt": "x"}, {"cache_salt": "y", "priority": -5}):
                app.valid_calls.clear()
                steering = {"X-Vllm-Priority": "-9"}
                answer = await app.post(path, body | own_fields, tenant, **steering)
                assert answer.status_code == 200, answer.text
                calls = [c for c in app.valid_calls if c.method in ("prefill", "generate")]
                assert len(calls) == (1 if "n" in body else 2)
                requests = [parse_request(EngineRequest(body=c.body, **c.header)) for c in calls]
                assert {request.priority for request in requests} == {0}
                assert not any(set(map(str.lower, c.header["headers"])) & STEERING_HEADERS for c in calls)
                (salt,) = {request.cache_salt for request in requests}
                salts.append(salt)
        assert len(set(salts)) == 6  # no two tenants, and no two salts of a client, share a cache


@given(*[st.tuples(st.text(min_size=1), st.none() | st.text(min_size=1))] * 2)
def test_salts_are_equal_only_for_equal_tenants_and_client_salts(
    first: tuple[str, str | None], second: tuple[str, str | None]
) -> None:
    salts = [tenant_salt(tenant, RequestFields(cache_salt=salt)) for tenant, salt in (first, second)]
    assert (salts[0] == salts[1]) == (first == second)


async def test_without_keys_a_clients_salt_is_unchanged() -> None:
    async with running_app() as app:
        assert (await app.post(COMPLETIONS, HELLO | {"cache_salt": "x"})).status_code == 200
        (call,) = [c for c in app.valid_calls if c.method == "generate"]
        assert parse_request(EngineRequest(body=call.body, **call.header)).cache_salt == "x"
        assert (await app.post(COMPLETIONS, HELLO | {"cache_salt": 5})).status_code == 400


async def test_each_tenant_has_its_own_rate_limits(tmp_path: Path) -> None:
    limits = {"a": {"requests_per_minute": 3}, "b": {"tokens_per_minute": 20}, "c": {}}
    async with with_tenants(tmp_path, limits) as app:
        for tenant, allowed, what in (("a", 3, "3 requests"), ("b", 2, "20 tokens")):
            for _ in range(allowed):  # a prompt has 7 tokens here, an answer 2 or less
                assert (await app.post(COMPLETIONS, HELLO | {"max_tokens": 30}, tenant)).status_code == 200
                app.ingress.gate.tenants.find(f"Bearer {tenant}").tokens.charge(2)
            answer = await app.post(COMPLETIONS, HELLO, tenant)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (429, "rate_limit_exceeded")
            assert f"{what} per minute" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        for _ in range(9):
            assert (await app.post(COMPLETIONS, HELLO, "c")).status_code == 200
        assert app.ingress.gate.in_flight == 0


async def test_a_negative_limit_of_tokens_leaves_no_debt(tmp_path: Path) -> None:
    engine = answer_with(refusal(400))
    async with with_tenants(tmp_path, {"a": {"tokens_per_minute": 1000}}, prefill=engine) as app:
        for _ in range(2):
            answer = await app.post(COMPLETIONS, HELLO | {"max_tokens": -(10**9)}, "a")
            assert answer.status_code == 400  # the engine's answer
        tokens = app.ingress.gate.tenants.find("Bearer a").tokens
        assert (tokens._used, tokens.compute_wait_s()) == (pytest.approx(0, abs=1e-6), 0)


async def test_waiting_tenants_get_permits_in_fair_shares(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with with_tenants(tmp_path, {"a": {}, "b": {}}, max_in_flight=2, prefill=answer_with(go_on)) as app:
        posts = [asyncio.create_task(app.post(COMPLETIONS, HELLO, tenant)) for tenant in "aaab"]
        await wait_until(lambda: app.ingress.gate.limiter.num_waiting == 2)
        posts[0].cancel()
        await wait_until(lambda: app.ingress.gate.limiter.num_waiting == 1)
        assert [tenant.name for tenant in app.ingress.gate.limiter._waiting] == ["a"]
        for task in posts:
            task.cancel()
        await asyncio.wait(posts)
        await wait_until(lambda: app.ingress.gate.in_flight == app.ingress.gate.limiter.num_waiting == 0)


async def test_the_status_shows_workers_only_with_the_admin_key() -> None:
    async with running_app() as app:
        public = (await app.client.get("/eldr/status")).json()
        assert public["model"] == "m"
        assert set(public["ingress"]) == {"ready", "all_warm", "router_unreachable", "in_flight", "leases"}
        assert not any(name in json.dumps(public) for name in ("r0", "r1"))
        assert {"workers", "counters"} <= (await app.status()).keys()
    async with running_app(admin_key=None) as app:
        for key in ("", KEY):
            answer = await app.client.get("/eldr/status", headers={"authorization": f"Bearer {key}"})
            assert "workers" not in answer.json()


async def test_accepted_and_refused_changes_and_traces_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "find_pool", Mock(side_effect=ValueError("no actor")))
    async with running_app() as app:
        with caplog.at_level(logging.WARNING):
            await app.put("/eldr/policy", json={"name": "random"})
            await app.put("/eldr/table", content=b"\x00no table")
            await app.put("/eldr/policy", "wrong", json={"name": "secret"})
            for key in (KEY, "wrong"):  # prompts can be read from a trace
                await app.client.get("/eldr/trace", headers={"authorization": f"Bearer {key}"})
            await app.client.get("/eldr/live", headers={"authorization": f"Bearer {KEY}"})
        lines = [json.loads(m.removeprefix("audit ")) for m in caplog.messages if m.startswith("audit ")]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/eldr/policy", 200),
        ("/eldr/table", 400),
        ("/eldr/policy", 401),
        ("/eldr/trace", 400),
        ("/eldr/trace", 401),
    ]
    assert [line["key_sha256"] is not None for line in lines] == [True, True, False, True, False]
    assert json.loads(lines[0]["what"]) == {"name": "random"}
    assert lines[1]["bytes"] == 9
    assert len(lines[1]["sha256"]) == 64
    assert not {"secret", KEY} & set("".join(caplog.messages).split('"'))
