"""Each pair of engines is warmed up before requests are accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import msgspec
import pytest
from ray.exceptions import RayError

from eldr_serve.experts.signature import pack_counts
from eldr_serve.fleet import measured_counts
from eldr_serve.pipeline import warmup
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path_options import PrefillRouterOptions
from eldr_serve.pipeline.prefill import kv_release
from eldr_serve.pipeline.warmup import Warmup
from tests.support.fake_fleet import FakeFleet, Sent, answer_with, prefill_result
from tests.support.fake_router import wait_until
from tests.support.ingress_app import unstreamed_answer
from tests.support.request_path import COUNTS, good_prefill


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_FIRST_PERIOD_S", 0.001)
    monkeypatch.setattr(warmup, "_PERIOD_S", 0.001)
    monkeypatch.setattr(warmup, "_RETRY_S", 0.001)
    monkeypatch.setattr(warmup, "_MAX_RETRY_S", 0.002)
    monkeypatch.setattr(measured_counts, "_MAX_DELAY_S", 0.01)


def warmup_of(prefill: FakeFleet, decode: FakeFleet, *, whole: bool = False, health: Any = None) -> Warmup:
    handle: Any = Mock(check_health=Mock(remote=health or AsyncMock()))
    fleets: Any = prefill, decode
    return Warmup(
        fleets=Fleets(*fleets, PrefillRouterOptions(), decode_engines_prefill=whole),
        handles=[handle],
        router=Mock(expect_counts=AsyncMock()),
        model_id="m",
    )


async def test_a_pair_is_warm_after_counts_and_all_samplers(caplog: pytest.LogCaptureFixture) -> None:
    prefill = FakeFleet(answer_with(prefill_result(do_remote_prefill=True)), "p0")  # no expert counts
    decode = FakeFleet(unstreamed_answer, "d0", "d1")
    warm = warmup_of(prefill, decode)
    client: Any = warm._router
    decode.lost = {"d1"}  # no channel to it yet
    running = asyncio.create_task(warm.run())
    await wait_until(lambda: len(prefill.released) >= 2)
    assert (warm.all_warm, warm.num_warm_pairs, decode.requests) == (False, 0, [])
    client.expect_counts.assert_not_called()
    assert prefill.released[0][0] == "p0"
    assert "p0 sends no expert counts" in caplog.text
    prefill.answer = good_prefill
    await wait_until(lambda: warm.num_warm_pairs == 1)
    assert not warm.all_warm
    decode.lost = set()
    await wait_until(lambda: warm.all_warm)
    running.cancel()
    assert client.expect_counts.await_args_list == [call(3, 4)] * 2
    for name in ("d0", "d1"):
        sent = [s for s in decode.requests if s.replica == name]
        sampling = [(s.fields["n"], s.fields["logprobs"], s.fields["temperature"]) for s in sent]
        assert sampling == [(1, 0, 1.0), (2, 0, 1.0)]
        assert ["do_remote_prefill" in s.kv for s in sent] == [True, False]


async def test_requests_wait_for_all_pairs_at_first_and_later_for_one_engine() -> None:
    up = asyncio.Event()
    prefill, decode = FakeFleet(good_prefill, "p0"), FakeFleet(unstreamed_answer, "d0", "d1")
    warm = warmup_of(prefill, decode, health=up.wait)
    decode.lost = {"d1"}  # no channel to it yet
    running = asyncio.create_task(warm.run())
    await asyncio.sleep(0)
    assert warm.not_ready_reason == "the engines are not up yet"
    up.set()
    await wait_until(lambda: warm.num_warm_pairs == 1)
    assert warm.not_ready_reason == "1 of 2 pairs of engines are warm"
    decode.lost = set()
    await wait_until(lambda: warm.not_ready_reason is None)
    decode.lost = {"d2"}
    decode.directory.publish({"d0": {}, "d1": {}, "d2": {}})  # a third one, which is cold
    assert (warm.all_warm, warm.not_ready_reason) == (False, None)
    prefill.directory.publish({})  # requests are prefilled by decode engines
    await wait_until(lambda: not warm._warm_pairs)
    assert (warm.all_warm, warm.not_ready_reason) == (False, None)
    decode.directory.publish({"d2": {}})
    assert warm.not_ready_reason == "no decode engine is up"
    running.cancel()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_call_that_hangs_is_cancelled_and_its_blocks_are_released(
    leg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(kv_release, "_NOTICE_S", 0.0)
    hangs = answer_with(asyncio.Event())
    prefill = FakeFleet(hangs if leg == "prefill" else good_prefill, "p0")
    decode = FakeFleet(hangs if leg == "decode" else unstreamed_answer, "d0")
    running = asyncio.create_task(warmup_of(prefill, decode).run())
    await wait_until(lambda: prefill.released)
    running.cancel()
    assert (prefill if leg == "prefill" else decode).requests[0].cancelled
    assert prefill.released[0] == ("p0", prefill.requests[0].header["id"])


async def test_pairs_of_replicas_that_have_gone_do_not_count() -> None:
    prefill, decode = FakeFleet(good_prefill, "p0"), FakeFleet(unstreamed_answer, "d0", "d1")
    warm = warmup_of(prefill, decode)
    running = asyncio.create_task(warm.run())
    await wait_until(lambda: warm.num_warm_pairs == 2)
    decode.directory.publish({"d1": {}})
    assert warm.num_warm_pairs == 1
    await wait_until(lambda: warm._warm_pairs == {("p0", "d1")})
    prefill.directory.publish({"p1": {}})
    await wait_until(lambda: warm._warm_pairs == {("p1", "d1")})
    running.cancel()


async def test_an_engine_that_stays_cold_does_not_keep_the_service_from_being_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = FakeFleet(unstreamed_answer, "d0", "d1")
    decode.lost = {"d1"}
    warm = warmup_of(FakeFleet(good_prefill, "p0"), decode)
    running = asyncio.create_task(warm.run())
    await wait_until(lambda: warm.num_warm_pairs == 1)
    assert warm.not_ready_reason == "1 of 2 pairs of engines are warm"
    monkeypatch.setattr(warmup, "_MAX_WAIT_S", 0.0)
    assert (warm.all_warm, warm.not_ready_reason) == (False, None)
    running.cancel()


async def test_the_warm_up_continues_after_a_replica_has_died_at_its_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = AsyncMock(side_effect=[RayError("the replica has died"), None])
    warm = warmup_of(FakeFleet(good_prefill, "p0"), FakeFleet(unstreamed_answer, "d0"), health=health)
    running = asyncio.create_task(warm.run())
    await wait_until(lambda: warm.all_warm)
    running.cancel()
    assert "the engines are not up yet: the replica has died" in caplog.text


async def test_a_cold_pair_is_logged_once_for_each_error(caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = FakeFleet(good_prefill, "p0"), FakeFleet(unstreamed_answer, "d0")
    decode.lost = {"d0"}
    running = asyncio.create_task(warmup_of(prefill, decode).run())
    await wait_until(lambda: len(prefill.released) > 3)
    assert caplog.text.count("pair p0-d0 is not warm yet") == 1
    prefill.lost = {"p0"}
    await wait_until(lambda: "there is no channel to p0" in caplog.text)
    running.cancel()
    assert caplog.text.count("pair p0-d0 is not warm yet") == 2


async def test_a_cold_pair_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_RETRY_S", 100.0)
    monkeypatch.setattr(warmup, "_MAX_RETRY_S", 500.0)
    warm = warmup_of(FakeFleet(good_prefill, "p0"), FakeFleet(unstreamed_answer, "d0", "d1"))
    retries = []
    for _ in range(5):
        warm._record_failure(("p0", "d0"), "no")
        retries.append(warm._failures["p0", "d0"].retry_s)
    assert retries == [100.0, 200.0, 400.0, 500.0, 500.0]
    assert warm._due_pairs() == [("p0", "d1")]


async def test_engines_become_warm_without_a_router(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are then placed locally; the router gets the shape when the ingress connects to it."""
    warm = warmup_of(FakeFleet(good_prefill, "p0"), FakeFleet(unstreamed_answer, "d0", "d1"))
    client: Any = warm._router
    client.expect_counts.side_effect = ConnectionError("Ray is shut down")
    running = asyncio.create_task(warm.run())
    await wait_until(lambda: warm.all_warm and client.expect_counts.await_count == 2)
    await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
    assert "the router does not know the shape of expert counts yet" in caplog.text
    assert "is not warm yet" not in caplog.text


async def test_a_whole_replica_is_warm_after_its_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def engine(sent: Sent) -> AsyncIterator[bytes]:
        if sent.method == "generate":
            async for chunk in unstreamed_answer(sent):
                yield chunk
        elif sent.replica == "d0":
            yield msgspec.msgpack.encode((9, pack_counts(COUNTS)))
        else:  # it counts no experts
            await asyncio.sleep(60)

    prefill, decode = FakeFleet(good_prefill), FakeFleet(engine, "d0", "d1")
    warm = warmup_of(prefill, decode, whole=True)
    client: Any = warm._router
    running = asyncio.create_task(warm.run())
    await wait_until(lambda: warm.all_warm)
    running.cancel()
    assert warm.num_warm_pairs == 2
    assert client.expect_counts.await_args_list == [call(3, 4)]
    assert "d1 counts no experts" in caplog.text
    for name in ("d0", "d1"):
        counted, first, second = (s for s in decode.sent if s.replica == name)
        assert counted.header["id"] == first.header["id"]
        assert [sent.fields["n"] for sent in (first, second)] == [1, 2]
