"""The order of turns in the decode queue, against brute force, and what the queue does to its leases."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.scheduling.decode_queue import DecodeQueue
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.clock import Clock
from tests.support.tables import request

seconds = st.floats(0, 9)


def sent(name: str, **fields: Any) -> Lease:
    return Lease(request(name, may_wait=True, **fields), LeaseState.SENT)


@given(st.lists(st.tuples(seconds, st.none() | seconds), max_size=8), seconds)
def test_the_request_with_the_earliest_deadline_that_can_be_met_is_always_next(
    arrivals: list[tuple[float, float | None]], later_s: float
) -> None:
    clock = Clock()
    queue = DecodeQueue(clock)
    deadlines: dict[str, list[float]] = {}
    for number, (after_s, due_in_s) in enumerate(arrivals):
        clock.now += after_s
        queue.add(sent(str(number), first_token_due_in_s=due_in_s))
        deadlines[str(number)] = [clock.now + queue.patience_s]
        if due_in_s is not None:
            deadlines[str(number)].append(clock.now + due_in_s)
    clock.now += later_s
    order = [lease.request_id for lease in queue.in_turn([])]
    for expected in order:
        turns = {
            name: min([patient_s, *(due_s for due_s in due if due_s >= clock.now)])
            for name, (patient_s, *due) in deadlines.items()
        }
        assert expected == min(turns, key=turns.__getitem__)  # the first of several
        del deadlines[expected]
    assert not deadlines


def test_a_request_that_is_added_again_keeps_its_place_and_its_deadline() -> None:
    clock = Clock()
    queue = DecodeQueue(clock)
    queue.add(sent("a", first_token_due_in_s=2.0))
    queue.add(sent("b"))
    clock.now = 1.0
    again = sent("a", first_token_due_in_s=2.0)
    queue.add(again)
    assert list(queue.leases) == ["a", "b"]
    assert (again.queued_at_s, again.first_token_deadline_s) == (0.0, 2.0)
    queue.remove_assigned(again)
    assert list(queue.leases) == ["b"]
    assert again.waited_s == 1.0


def test_a_lease_that_replaces_a_queued_one_has_not_waited_itself() -> None:
    clock = Clock()
    queue = DecodeQueue(clock)
    queue.add(sent("a"))
    clock.now = 1.0
    other = sent("a")
    queue.remove_assigned(other)
    assert not queue.leases
    assert other.waited_s == 0.0


def test_a_request_ends_once() -> None:
    queue = DecodeQueue(Clock())
    lease = sent("a")
    queue.add(lease)
    assert queue.end("a")
    assert lease.state is LeaseState.ENDED
    assert not queue.end("a")
