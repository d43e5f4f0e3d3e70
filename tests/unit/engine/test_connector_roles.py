"""The connector by the role of its engine: truncated answers, and engines without transfers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.nixl import NixlConnectorMetadata, WithoutTransfers, clear_refusal
from eldr_serve.engine.vllm.connector import EldrConnector


def connector(*, drafts: bool, producer: bool) -> EldrConnector:
    made = object.__new__(EldrConnector)  # without NIXL's agent
    made.__dict__ |= {
        "_drafts": drafts, "_is_producer_only": producer, "_warned_of_cut": False, "_handshake": {},
        "_requests": {}, "_tracked": {}, "connector_scheduler": WithoutTransfers(),
    }  # fmt: skip
    return made


def request(max_tokens: int, **params: Any) -> Any:
    return SimpleNamespace(
        request_id="r", prompt_token_ids=[1, 2], max_tokens=max_tokens, kv_transfer_params=params
    )


def test_a_prefill_engine_with_a_draft_model_generates_one_token(caplog: pytest.LogCaptureFixture) -> None:
    ours = connector(drafts=True, producer=True)
    asked = [request(n) for n in (1, 24, 8)]
    for one in asked:
        ours.on_new_request(one)
    assert [one.max_tokens for one in asked] == [1, 1, 1]
    assert [r.getMessage() for r in caplog.records if "cut to one token" in r.getMessage()] == [
        "this prefill engine has a drafter, whose rejected tokens would be counted: "
        "answers are cut to one token"
    ]


@pytest.mark.parametrize(("drafts", "producer"), [(False, True), (True, False)])
def test_other_engines_generate_as_many_tokens_as_requested(drafts: bool, producer: bool) -> None:
    one = request(24)
    connector(drafts=drafts, producer=producer).on_new_request(one)
    assert one.max_tokens == 24


def test_an_engine_that_transfers_nothing_frees_its_blocks_at_once() -> None:
    half = WithoutTransfers()
    assert half.request_finished(request(1), ([1],)) == (False, None)
    assert half.request_finished(request(1, do_remote_decode=True), ([1],)) == (False, {})
    assert half.get_num_new_matched_tokens(request(1), 0) == (0, False)
    assert half.get_transfer_results() == KVConnectorTransferResults()
    assert type(half.build_connector_meta(None)) is NixlConnectorMetadata
    assert half.get_kv_connector_stats() is None
    with pytest.raises(AttributeError):
        half.anything_else  # noqa: B018


def test_a_cache_that_nixl_cannot_transfer_is_refused_with_an_alternative() -> None:
    with (
        pytest.raises(UnsupportedEngineError, match=r"SHORT_CONV.*leave prefill_config out"),
        clear_refusal(),
    ):
        raise NotImplementedError("got mamba_type=SHORT_CONV")
