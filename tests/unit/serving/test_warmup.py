"""What each pair of engines has done before users come."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest
from ingress_app import answers
from one_path import Deployment, answering, good_prefill, prefilled
from router_talk import settled

from eldr_serve.serving import warmup
from eldr_serve.serving.replicas import Engines, ReplicaDirectory
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.wire import REPLICA


async def test_a_pair_is_warm_once_prefill_sends_a_signature_and_decode_has_compiled_its_samplers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warmup, "_FIRST_PERIOD_S", 0.001)
    uncounted = answering(prefilled(do_remote_prefill=True))
    prefill, decode, client = Deployment(uncounted), Deployment(answers), Mock(call=AsyncMock())
    directories = ReplicaDirectory(), ReplicaDirectory()
    directories[0].publish(["p0"])
    directories[1].publish(["d0", "d1"])
    engines: Any = Engines(prefill, decode, *directories)
    warm = Warmup(engines=engines, client=client, model_id="m")
    running = asyncio.create_task(warm.run())
    await settled(lambda: len(prefill.released) >= 2)
    assert (warm.ready, warm.pairs, decode.requests) == (False, 0, [])
    client.call.assert_not_called()
    assert prefill.released[0].kv_transfer_params == {REPLICA: "p0"}
    assert "p0 sends no expert signatures" in caplog.text
    prefill.answer = good_prefill
    await settled(lambda: warm.ready)
    running.cancel()
    assert warm.pairs == 2
    assert client.call.await_args_list == [call("expect_signatures", 3, 4)] * 2
    for name in ("d0", "d1"):
        sent = [r for r in decode.requests if r.kv_transfer_params[REPLICA] == name]
        assert [(r.n, r.logprobs, r.temperature) for r in sent] == [(1, 0, 1.0), (2, 0, 1.0)]
        assert "do_remote_prefill" in sent[0].kv_transfer_params
        assert "do_remote_prefill" not in sent[1].kv_transfer_params
