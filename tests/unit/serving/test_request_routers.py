"""Request routers choose a replica whatever a call is made of; else Serve lets it wait for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from eldr_serve.serving.budget import PrefillBudget
from eldr_serve.serving.request_router import DecodeRequestRouter, PrefillRequestRouter
from eldr_serve.serving.wire import REPLICA

REPLICAS: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("a", "b")]


def router(kind: Any) -> Any:
    made = kind.__new__(kind)
    made.initialize_state(directory_name=f"test-{kind.__name__}")
    made.directory.budget = PrefillBudget()
    if kind is DecodeRequestRouter:
        made._client = Mock(place=AsyncMock(side_effect=OverflowError))  # which cannot place anything
    return made


def call(request: Any, number: int = 0) -> Any:
    return SimpleNamespace(args=[request], metadata=SimpleNamespace(internal_request_id=str(number)))


@pytest.mark.parametrize("kind", [DecodeRequestRouter, PrefillRequestRouter])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a\ud800b"},
        {"prompt": 5, "kv_transfer_params": "boom"},
        {"kv_transfer_params": ["boom"]},
        {"kv_transfer_params": {"eldr_attempt": "boom"}},
        {"kv_transfer_params": {"eldr_attempt": None}},
        {"kv_transfer_params": {"remote_num_tokens": "boom"}},
        {"kv_transfer_params": {"remote_num_tokens": 10**30}, "max_tokens": 10**30},
        {"kv_transfer_params": {"eldr_signature": 5}, "max_tokens": "boom"},
        {"kv_transfer_params": {REPLICA: ["b"]}},
        {"messages": 5},
        {"messages": [{"role": 5, "content": "\udfff"}]},
        {"request_id": 5},
    ],
)
async def test_every_call_gets_a_replica(kind: Any, fields: dict[str, Any]) -> None:
    routing = router(kind)
    chosen = []
    for number in range(2):
        ((replica,),) = await routing.choose_replicas(REPLICAS, call(SimpleNamespace(**fields), number))
        chosen.append(replica.replica_id.unique_id)
    assert set(chosen) <= {"a", "b"}
    assert sum(routing._in_flight.values()) == 2


@pytest.mark.parametrize("kind", [DecodeRequestRouter, PrefillRequestRouter])
async def test_an_addressed_call_goes_where_it_is_addressed(kind: Any) -> None:
    routing = router(kind)
    for name in ("b", "a", "b"):
        request = SimpleNamespace(kv_transfer_params={REPLICA: name})
        ((replica,),) = await routing.choose_replicas(REPLICAS, call(request))
        assert replica.replica_id.unique_id == name
    assert await routing.choose_replicas([], call(request)) == []
    assert len(await routing.choose_replicas(REPLICAS, None)) == 1
