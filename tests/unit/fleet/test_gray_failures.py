"""Engines that are silent or fail repeatedly although their channels are open; outlier ejection."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.channel import Call, CallFailedError, CallTimeoutError
from eldr_serve.fleet.outliers import OutlierDetector
from eldr_serve.pipeline.prefill import kv_release
from tests.support.clock import Clock
from tests.support.fake_fleet import answer_with, in_turn, prefill_result, refusal
from tests.support.fake_router import wait_until
from tests.support.request_path import (
    END,
    WHOLE,
    Pipeline,
    RecordedCounters,
    good_prefill,
    on,
    pack_ids,
    request_context,
)


def resumable(*chunks: Any) -> Any:
    """Return an engine that sends these chunks, or the rest of the answer if it resumes one."""
    first = answer_with(*chunks)
    sent = b"".join(chunk[0] for chunk in chunks if isinstance(chunk, tuple))
    rest = answer_with((WHOLE[len(sent) :] + END, 3, pack_ids(1, 2, 3)))
    return lambda sent: (rest if sent.header["generated"] else first)(sent)


async def test_a_decode_engine_without_a_first_token_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_release, "_NOTICE_S", 0.1)
    pipeline = Pipeline(decode=on("d0", answer_with(asyncio.Event())), first_token_timeout_s=0.05)
    assert await pipeline.run() == b"abc"
    first, second = pipeline.decode.requests
    assert first.cancelled
    placement, _ = pipeline.router.placements[1]
    assert (placement.exclude, placement.worker_failed) == (("d0",), True)
    lost, _ = pipeline.prefill.requests
    # The blocks are released after the engine has left the call.
    await wait_until(lambda: pipeline.prefill.released == [(lost.replica, lost.header["id"])])
    assert second.replica == "d1"


async def test_a_stalled_stream_resumes_on_another_engine() -> None:
    decode = resumable((WHOLE[:10], 1, pack_ids(0)), asyncio.Event())
    pipeline = Pipeline(decode=decode, next_token_timeout_s=0.05)
    assert await pipeline.run(stream=True) == WHOLE + END
    first, second = pipeline.decode.requests
    assert first.cancelled
    assert second.header["generated"] == pack_ids(0)


async def test_a_slow_prefill_is_retried_elsewhere_and_its_blocks_are_released() -> None:
    prefill = in_turn(answer_with(asyncio.Event()), good_prefill)
    pipeline = Pipeline(prefill=prefill, prefill_timeout_s=0.05)
    assert await pipeline.run() == b"abc"
    first, second = pipeline.prefill.requests
    assert first.cancelled
    assert first.replica != second.replica
    assert pipeline.prefill.released == [(first.replica, first.header["id"])]


async def test_unstreamed_answers_to_unsplit_requests_have_no_token_limits() -> None:
    async def slow(sent: Any) -> Any:
        await asyncio.sleep(0.1)
        yield b"an answer"

    pipeline = Pipeline(decode=slow, first_token_timeout_s=0.01, next_token_timeout_s=0.01)
    assert await pipeline.run(n=2) == b"an answer"


async def test_a_slow_client_is_no_slow_engine() -> None:
    more = asyncio.Event()

    async def steady(sent: Any) -> Any:
        for _ in range(20):
            yield b"x"
            await asyncio.sleep(0.005)
        yield END
        more.set()

    pipeline = Pipeline(decode=steady, next_token_timeout_s=0.08)
    stream = pipeline.path.generate(request_context(stream=True))
    assert await anext(stream) == b"x"
    await more.wait()
    assert b"".join([chunk async for chunk in stream]) == b"x" * 19 + END


async def test_a_replica_that_fails_repeatedly_is_ejected() -> None:
    pipeline = Pipeline(decode=on("d0", answer_with(refusal(500))), prefill=answer_with(prefill_result()))
    for _ in range(3):
        assert await pipeline.run() == b"abc"
    assert pipeline.counters.events.count("ejected") == 1
    pipeline.decode.sent.clear()
    assert await pipeline.run() == b"abc"
    assert [sent.replica for sent in pipeline.decode.requests] == ["d1"]
    placement, _ = pipeline.router.placements[-1]
    assert (placement.exclude, placement.worker_failed) == (("d0",), False)
    assert pipeline.router.waits[-1] > 0


async def test_a_full_replica_is_not_ejected() -> None:
    pipeline = Pipeline(decode=on("d0", answer_with(refusal(503))))
    for _ in range(9):
        assert await pipeline.run() == b"abc"
    assert "ejected" not in pipeline.counters.events


async def test_a_late_call_is_cancelled_once() -> None:
    sent: list[bytes] = []
    channel: Any = SimpleNamespace(send=sent.append)
    call = Call(channel, 1, "generate")
    call.set_timeouts(0.01, 0.02)
    with pytest.raises(CallTimeoutError, match=r"sent nothing for 0\.01 s"):
        await call.read()
    assert len(sent) == 1
    call.feed(b"late", 1)  # this has no effect
    call.on_ended(None)
    with pytest.raises(CallTimeoutError):
        await call.read()
    await call.wait_until_ended()


class Outliers(OutlierDetector):
    """A detector for the replicas `live`, which records the names of its events."""

    def __init__(self, live: str) -> None:
        self.clock, self.counters = Clock(), RecordedCounters()
        self.fleet: Any = SimpleNamespace(live_workers=tuple(live))
        super().__init__(self.fleet, self.counters, clock=self.clock)

    def fail(self, replica: str, times: int = 3) -> bool:
        """Fail calls of the replica, and return whether it was ejected for one of them."""
        before = len(self.counters.events)
        for _ in range(times):
            self.record_failure(replica, CallTimeoutError())
        return len(self.counters.events) > before


def test_the_log_names_the_length_and_the_cause_of_an_ejection(caplog: pytest.LogCaptureFixture) -> None:
    outliers = Outliers("abc")
    outliers.fail("a", 2)
    outliers.record_failure("a", CallFailedError(500, b"out of\nmemory"))
    (message,) = caplog.messages
    assert message.startswith(
        "replica a has failed 3 calls in a row and is ejected for 10 s; the last error: "
    )
    assert "memory" in message


def test_each_ejection_is_longer_until_a_success() -> None:
    outliers = Outliers("abc")
    ejected_s = []
    for _ in range(6):
        assert not outliers.fail("a", 2)
        assert outliers.fail("a", 1)
        assert not outliers.fail("a", 1)  # an earlier call
        began = outliers.clock.now
        while outliers.usable_workers == ["b", "c"]:
            outliers.clock.now += 1.0
        ejected_s.append(outliers.clock.now - began)
    assert ejected_s == [10, 20, 40, 80, 120, 120]
    outliers.record_success("a")
    assert not outliers.fail("a", 2)
    assert outliers.fail("a", 1)
    outliers.clock.now += 10.0
    assert outliers.usable_workers == ["a", "b", "c"]


def test_a_success_during_an_ejection_does_not_end_it() -> None:
    outliers = Outliers("abc")
    assert outliers.fail("a")
    outliers.record_success("a")  # an earlier call
    assert outliers.usable_workers == ["b", "c"]
    outliers.clock.now += 10.0
    assert outliers.usable_workers == ["a", "b", "c"]
    assert outliers.fail("a")
    outliers.clock.now += 19.0
    assert outliers.usable_workers == ["b", "c"]  # the second ejection takes 20 s


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_none_is_ejected_if_more_than_half_would_be(events: list[tuple[str, bool]]) -> None:
    outliers, failures = Outliers("abcde"), dict.fromkeys("abcde", 0)
    for name, fails in events:
        if fails:
            outliers.fail(name, 1)
            failures[name] += 1
        else:
            outliers.record_success(name)
            failures[name] = failures[name] if failures[name] >= 3 else 0  # time does not pass
        ejected = {name for name in "abcde" if failures[name] >= 3}
        assert set(outliers.usable_workers) == (set("abcde") - ejected if len(ejected) <= 2 else set("abcde"))


def test_a_replica_that_reconnects_stays_ejected() -> None:
    outliers = Outliers("abc")
    outliers.fail("a")
    outliers.fleet.live_workers = ("b", "c")
    assert outliers.usable_workers == ["b", "c"]
    outliers.fleet.live_workers = ("a", "b", "c")
    assert outliers.usable_workers == ["b", "c"]


def test_a_record_is_forgotten_ten_minutes_after_the_last_failure() -> None:
    outliers = Outliers("abc")
    outliers.fail("a")
    outliers.fail("c", 2)
    outliers.clock.now += 599.0
    outliers.fail("a", 1)
    outliers.clock.now += 1.0
    outliers.fail("b", 1)
    assert outliers._records.keys() == {"a", "b"}
