"""Prefix-hash routing of prompts with bounded load."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.queues.prefill_replica_choice import choose_prefill_replica
from eldr_serve.request import RequestFields, prompt_head

REPLICAS = [f"p{n}" for n in range(8)]
IDLE = dict.fromkeys(REPLICAS, 0)


def test_equal_prefixes_meet_and_different_ones_spread() -> None:
    assert len({choose_prefill_replica(b"the same head", IDLE) for _ in range(5)}) == 1
    spread = Counter(choose_prefill_replica(f"head {n}".encode(), IDLE) for n in range(800))
    assert set(spread) == set(REPLICAS)
    assert max(spread.values()) < 2 * 100


def test_a_replica_that_leaves_moves_only_its_own_prefixes() -> None:
    fewer = {name: 0 for name in REPLICAS if name != "p3"}
    for n in range(300):
        before, after = (
            choose_prefill_replica(f"{n}".encode(), IDLE),
            choose_prefill_replica(f"{n}".encode(), fewer),
        )
        assert after == before or before == "p3"


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.binary(max_size=20))
def test_no_replica_exceeds_its_bound(loads: list[int], head: bytes) -> None:
    in_flight = {f"p{n}": load for n, load in enumerate(loads)}
    chosen = choose_prefill_replica(head, in_flight, max_load_ratio=1.25)
    mean = (sum(loads) + 1) / len(loads)
    assert in_flight[chosen] + 1 <= max(1.0, 1.25 * mean) or in_flight[chosen] == min(loads)


def test_prefixes_overflow_to_different_replicas() -> None:
    def overflow(head: bytes) -> str:
        return choose_prefill_replica(head, IDLE | {choose_prefill_replica(head, IDLE): 30})

    heads = [f"head {n}".encode() for n in range(200)]
    assert all(overflow(head) == overflow(head) != choose_prefill_replica(head, IDLE) for head in heads)
    assert {overflow(head) for head in heads} == set(REPLICAS)


def test_each_attempt_chooses_another_replica() -> None:
    failed: list[str] = []
    for _ in REPLICAS:
        failed.append(choose_prefill_replica(b"head", IDLE, failed_replicas=failed))
    assert set(failed) == set(REPLICAS)
    assert choose_prefill_replica(b"head", IDLE, failed_replicas=failed) == failed[0]


def test_the_next_replica_in_rank_follows_a_failed_one_that_was_also_lost() -> None:
    first = choose_prefill_replica(b"head", IDLE)
    left = {name: 0 for name in REPLICAS if name != first}
    assert choose_prefill_replica(b"head", left, failed_replicas=[first]) == choose_prefill_replica(
        b"head", left
    )


def test_every_kind_of_request_has_a_prefix() -> None:
    long = "shared beginning " * 40
    first, second = (RequestFields(prompt=long + end) for end in ("a", "b"))
    assert prompt_head(first, 64) == prompt_head(second, 64)
    assert prompt_head(RequestFields(prompt=[1, 2, 3]), 2) == b"[1, 2]"
    chat = RequestFields(messages=[{"role": "user", "content": long}])
    assert prompt_head(chat, 64).startswith(b"user:shared")
    assert prompt_head(RequestFields(), 64) == prompt_head(RequestFields(), 64)


class Unread:
    """A value that must not be formatted."""

    def __str__(self) -> str:
        raise AssertionError

    __repr__ = __str__


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 300}, {"role": "user", "content": Unread()}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 300}, Unread()]}]},
        {"prompt": [[*range(1000), Unread()]]},
    ],
)
def test_only_the_head_of_a_prompt_is_formatted(fields: dict[str, Any]) -> None:
    assert len(prompt_head(RequestFields(**fields), 64)) == 4 * 64
