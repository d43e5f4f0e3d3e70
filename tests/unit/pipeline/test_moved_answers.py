"""Answers move from decode engines that leave: the text is equal, and what cannot move stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from eldr_serve.channel import ChannelLostError, Chunk
from eldr_serve.engine.report_fields import SLOTS
from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.decode_start import DecodeStartEstimator
from eldr_serve.fleet.outliers import FAILURES, OutlierDetector
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.decode.move_limiter import MAX_MOVES, MoveLimiter
from tests.support.fake_fleet import FakeFleet, Sent, answer_with, refusal
from tests.support.request_path import (
    END,
    EVENTS,
    TOKENS,
    WHOLE,
    Pipeline,
    good_prefill,
    pack_ids,
    request_context,
)


def engines(
    *leave_after: int | None, send_ids: bool = True, lost: int | None = None
) -> Callable[[Sent], AsyncIterator[Any]]:
    """Return decode engines that generate tokens 0, 1, ..., one at a time.

    Args:
        leave_after: for each call in turn, the number of its tokens after which its engine leaves.
        send_ids: whether frames have token ids.
        lost: number of the call whose engine dies after two tokens.
    """
    calls = iter(range(100))

    async def answer(sent: Sent) -> AsyncIterator[Any]:
        number, generated = next(calls), len(sent.header["generated"]) // 4
        leaves = leave_after[number] if number < len(leave_after) else None
        assert sent.header["generated"] == pack_ids(*range(generated))
        for done, token in enumerate(range(generated, TOKENS)):
            if number == lost and done == 2:
                raise ChannelLostError("it is dead")
            sent.is_leaving |= leaves is not None and done >= leaves
            last = token == TOKENS - 1
            if sent.fields["stream"]:
                payload = EVENTS[token] + (END if last else b"")
            else:
                payload = WHOLE if last else b""
            yield (payload, 1, pack_ids(token)) if send_ids else (payload, 1)
            await asyncio.sleep(0.001)

    return answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 4, TOKENS - 2])
async def test_an_answer_moves_from_an_engine_that_leaves(stream: bool, tokens: int) -> None:
    pipeline = Pipeline(decode=engines(tokens))
    assert await pipeline.run(stream=stream) == (WHOLE + END if stream else WHOLE)
    first, second = pipeline.decode.requests
    assert (first.replica, second.replica) == ("d0", "d1")
    assert first.cancelled
    assert second.header["generated"] == pack_ids(*range(tokens + 1))
    assert second.header["id"] == first.header["id"]
    assert pipeline.prefill.requests[-1].header["generated"] == second.header["generated"]
    assert pipeline.counters.events == ["prefills", "prefills", "moved"]
    assert [request.exclude for request, _ in pipeline.router.placements] == [(), ("d0",)]
    assert pipeline.router.waits[-1] == 0.0
    assert pipeline.router.tokens[-1] == TOKENS


async def test_a_move_is_no_failure() -> None:
    pipeline = Pipeline(decode=engines(3))
    context = request_context(stream=True)
    assert b"".join([chunk async for chunk in pipeline.path.generate(context)]) == WHOLE + END
    assert (context.failures.attempts, context.failures.messages, context.record.error) == (0, [], "")
    assert not any(stage.error for stage in context.record.stages)


async def test_an_answer_moves_again_and_stays_when_no_engine_is_left() -> None:
    pipeline = Pipeline(decode=engines(2, 2, 2))
    assert await pipeline.run(stream=True) == WHOLE + END
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d1", "d2"]


async def test_an_unstreamed_answer_whose_next_engine_refuses_it_begins_again() -> None:
    generate = engines(2)

    def decode(sent: Sent) -> AsyncIterator[Any]:
        return answer_with(refusal(400))(sent) if sent.header["generated"] else generate(sent)

    pipeline = Pipeline(decode=decode)
    assert await pipeline.run(stream=False) == WHOLE
    assert [sent.replica for sent in pipeline.decode.requests] == ["d0", "d1", "d2"]
    # The resumed request is at fault, and not the engine that prefilled it.
    assert len(pipeline.prefill.requests) == 3
    assert len({sent.replica for sent in pipeline.prefill.requests}) == 1


async def test_a_stream_that_has_moved_resumes_after_a_loss() -> None:
    pipeline = Pipeline(decode=engines(2, lost=1))
    assert await pipeline.run(stream=True) == WHOLE + END
    assert [event for event in pipeline.counters.events if event != "prefills"] == ["moved", "resumed"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_cannot_continue_elsewhere_stays(stream: bool) -> None:
    pipeline = Pipeline(decode=engines(2, send_ids=False))
    assert await pipeline.run(stream=stream) == (WHOLE + END if stream else WHOLE)
    assert len(pipeline.decode.requests) == 1


async def test_without_another_engine_an_answer_stays() -> None:
    pipeline = Pipeline(decode=engines(2))
    pipeline.decode.lost = {"d1", "d2"}
    assert await pipeline.run(stream=True) == WHOLE + END
    assert len(pipeline.decode.requests) == 1


async def test_an_answer_waits_for_another_engine_if_all_leave_while_it_moves() -> None:
    def come_back() -> None:
        pipeline.decode.lost.clear()
        pipeline.decode.waiters.wake()

    def prefill(sent: Sent) -> AsyncIterator[Any]:
        if sent.header["generated"]:
            pipeline.decode.lost |= {"d0", "d1", "d2"}
            asyncio.get_running_loop().call_later(0.02, come_back)
        return good_prefill(sent)

    async def place(*args: Any, **options: Any) -> Any:
        if not pipeline.decode.live_workers:
            raise OverloadedError("no decode replica is running yet")
        return await place_on_any(*args, **options)

    pipeline = Pipeline(prefill=prefill, decode=engines(2))
    place_on_any, pipeline.router.place = pipeline.router.place, place
    assert await pipeline.run(stream=True) == WHOLE + END
    assert pipeline.counters.events == ["prefills", "prefills", "moved"]


async def test_an_operator_can_switch_moves_off() -> None:
    pipeline = Pipeline(decode=engines(2), moves_at_once=0)
    assert await pipeline.run(stream=True) == WHOLE + END
    assert len(pipeline.decode.requests) == 1


def limiter(*names: str, limit: int = 16, slots: int = 0) -> tuple[MoveLimiter, FakeFleet]:
    fleet = FakeFleet(answer_with(), *names)
    if slots:
        fleet.directory.publish({name: {SLOTS: slots} for name in names})
    decode: Any = fleet
    return MoveLimiter(DecodeStartEstimator(decode), outliers_of(fleet), limit), fleet


def outliers_of(fleet: FakeFleet) -> OutlierDetector:
    return OutlierDetector(fleet, IngressCounters())


def answer_context() -> Any:
    """Return the context of a stream with one token."""
    context = request_context(stream=True)
    context.answer.append(Chunk(EVENTS[0], 1, pack_ids(0)))
    return context


def test_only_so_many_answers_move_at_once() -> None:
    moves, _ = limiter("a", "b", limit=1)
    first, second = answer_context(), answer_context()
    assert moves.begin(first, "a")
    assert not moves.begin(second, "a")
    assert moves.end(first.request_id)
    assert moves.begin(second, "a")
    with moves.track(second.request_id):
        assert moves.is_moving(second.request_id)
    assert not moves.is_moving(second.request_id)
    assert not moves.end(second.request_id)


@pytest.mark.parametrize(
    ("workers", "begins"), [(("a/0", "a/1"), False), (("a/0", "a/1", "b/0"), False), (("a/0", "c/0"), True)]
)
def test_an_answer_moves_only_to_an_engine_that_placement_does_not_avoid(
    workers: tuple[str, ...], begins: bool
) -> None:
    moves, _ = limiter(*workers)
    context = answer_context()
    context.failures.decode_workers.append("b/1")
    assert moves.begin(context, "a/0") == begins


def test_an_answer_does_not_move_to_an_ejected_engine() -> None:
    fleet = FakeFleet(answer_with(), "a", "b", "c", "d")
    fleet.directory.publish({name: {SLOTS: 2} for name in fleet.live_workers})
    decode: Any = fleet
    outliers = outliers_of(fleet)
    moves = MoveLimiter(DecodeStartEstimator(decode), outliers, 16)
    context = answer_context()
    context.drained_workers.append("c")
    for _ in range(FAILURES):
        outliers.record_failure("b", ChannelLostError("it is dead"))
        outliers.record_failure("d", ChannelLostError("it is dead"))
    assert not moves.begin(context, "a")


def test_an_answer_moves_a_limited_number_of_times() -> None:
    moves, fleet = limiter("a", "b", "c", "d", "e", "f")
    context = answer_context()
    begun = [moves.begin(context, name) for name in fleet.live_workers]
    assert begun == [True] * MAX_MOVES + [False] * (len(begun) - MAX_MOVES)


def test_an_answer_moves_only_to_a_free_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, fleet = limiter("a", "b", slots=2)
    monkeypatch.setattr(fleet, "slot_calls_of", lambda name: 2)
    assert not moves.begin(answer_context(), "a")
    monkeypatch.setattr(fleet, "slot_calls_of", lambda name: 1)
    assert moves.begin(answer_context(), "a")
    assert not moves.begin(answer_context(), "a"), "the free slot is for the answer that moves already"
