"""The connector by the role of its engine: truncated answers, and engines without transfers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.kv_cache import CountedGroup
from eldr_serve.engine.vllm.compat.nixl import (
    NixlConnectorMetadata,
    WithoutTransfers,
    copy_transfers,
    transfer_errors,
)
from eldr_serve.engine.vllm.kv.metadata import EldrConnectorMetadata
from eldr_serve.engine.vllm.kv.scheduler_side import EldrConnectorScheduler


def scheduler_side(*, drafts: bool, kv_role: str) -> EldrConnectorScheduler:
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=kv_role),
        speculative_config=SimpleNamespace() if drafts else None,
    )
    return EldrConnectorScheduler(config, CountedGroup(0, 32, "model.layers.0.attn"))


def request(max_tokens: int, **params: Any) -> Any:
    return SimpleNamespace(
        request_id="r", prompt_token_ids=[1, 2], max_tokens=max_tokens, kv_transfer_params=params
    )


def test_a_prefill_engine_with_a_draft_model_generates_one_token(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = scheduler_side(drafts=True, kv_role="kv_producer")
    requests = [request(n) for n in (1, 24, 8)]
    for one in requests:
        scheduler.on_new_request(one)
    assert [one.max_tokens for one in requests] == [1, 1, 1]
    assert [r.getMessage() for r in caplog.records if "cut to one token" in r.getMessage()] == [
        "this prefill engine has a drafter, whose rejected tokens would be counted: "
        "answers are cut to one token"
    ]


@pytest.mark.parametrize(("drafts", "kv_role"), [(False, "kv_producer"), (True, "kv_consumer")])
def test_other_engines_generate_as_many_tokens_as_requested(drafts: bool, kv_role: str) -> None:
    new_request = request(24)
    scheduler_side(drafts=drafts, kv_role=kv_role).on_new_request(new_request)
    assert new_request.max_tokens == 24


def test_an_engine_that_transfers_nothing_frees_its_blocks_at_once() -> None:
    transfers = WithoutTransfers()
    assert transfers.request_finished(request(1), ([1],)) == (False, None)
    assert transfers.request_finished(request(1, do_remote_decode=True), ([1],)) == (False, {})
    assert transfers.get_num_new_matched_tokens(request(1), 0) == (0, False)
    assert transfers.get_transfer_results() == KVConnectorTransferResults()
    assert type(transfers.build_connector_meta(None)) is NixlConnectorMetadata
    assert transfers.get_kv_connector_stats() is None
    with pytest.raises(AttributeError):
        transfers.anything_else  # noqa: B018


def test_the_metadata_of_a_step_has_all_transfers_of_nixl() -> None:
    transfers, meta = NixlConnectorMetadata(), EldrConnectorMetadata()
    transfers.reqs_to_send, transfers.scheduler_clock = {"r": 9.0}, 5.0
    copy_transfers(transfers, meta)
    assert vars(meta) == vars(transfers)


def test_a_cache_that_nixl_cannot_transfer_is_refused_with_an_alternative() -> None:
    with (
        pytest.raises(UnsupportedEngineError, match=r"SHORT_CONV.*leave prefill_config out"),
        transfer_errors(),
    ):
        raise NotImplementedError("got mamba_type=SHORT_CONV")
