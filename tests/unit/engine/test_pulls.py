"""An engine with nothing to compute notices the end of a pull at once, and looks no longer than it may."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from eldr_serve.engine.abandoned import AbandonedPrompts
from eldr_serve.engine.vllm import connector as connector_module
from eldr_serve.engine.vllm.capture import StepPlan
from eldr_serve.engine.vllm.compat.nixl import NixlPullConnector, await_pull
from eldr_serve.engine.vllm.connector import EldrConnector, EldrMetadata

NEVER = 10**9
LONG_S = 60.0


class Wrapper:
    """NIXL's agent: a handle is how many looks its transfer takes."""

    def __init__(self, end: str = "DONE") -> None:
        self.looks = 0
        self.end = end

    def check_xfer_state(self, handle: int) -> str:
        self.looks += 1
        return "PROC" if self.looks < handle else self.end


def worker(wrapper: Any, **pulls: list[int]) -> Any:
    return SimpleNamespace(nixl_wrapper=wrapper, _recving_transfers=pulls)


@pytest.mark.parametrize("end", ["DONE", "ERR"])
def test_it_goes_on_when_one_pull_has_ended_however_it_has(end: str) -> None:
    wrapper = Wrapper(end)
    await_pull(worker(wrapper, slow=[NEVER], quick=[20]), LONG_S)
    assert 20 <= wrapper.looks <= 21


def test_it_waits_no_longer_than_it_may() -> None:
    wrapper = Wrapper()
    start = time.perf_counter()
    await_pull(worker(wrapper, slow=[NEVER]), 0.01)
    assert time.perf_counter() - start >= 0.01
    assert wrapper.looks > 1


def test_without_a_pull_it_does_not_wait_and_an_error_is_left_to_vllm() -> None:
    await_pull(worker(Wrapper(), unstarted=[]), LONG_S)
    broken = Mock(**{"check_xfer_state.side_effect": RuntimeError("no such handle")})
    await_pull(worker(broken, one=[1]), LONG_S)
    broken.check_xfer_state.assert_called_once_with(1)


@pytest.mark.parametrize(("role", "tokens", "waits"), [("decode", 0, 1), ("decode", 3, 0), ("prefill", 0, 0)])
def test_a_decode_engine_waits_in_steps_without_tokens_alone(
    role: str, tokens: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = Mock()
    monkeypatch.setattr(connector_module, "await_pull", waited)
    monkeypatch.setattr(
        NixlPullConnector, "get_transfer_results", lambda self, ids: KVConnectorTransferResults()
    )
    meta = EldrMetadata()
    meta.plan = StepPlan(requests=tokens, tokens=tokens, drafts=0)
    made: Any = object.__new__(EldrConnector)  # without NIXL's agent
    made.__dict__ |= {
        "_is_consumer_only": role == "decode", "_connector_metadata": meta, "_abandoned": AbandonedPrompts(),
        "connector_worker": SimpleNamespace(_reqs_to_send={}), "_count": lambda: None,
    }  # fmt: skip
    made.get_transfer_results(set())
    assert waited.call_count == waits
