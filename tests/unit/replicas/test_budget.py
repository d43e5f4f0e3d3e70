"""Back-pressure before prefill: replicas with room, and missing samples."""

from __future__ import annotations

import pytest

from eldr_serve.router.budget import KV_USAGE, SAMPLE, PrefillBudget


class Budget(PrefillBudget):
    """A budget with its own clock and numbered samples."""

    def __init__(self, max_usage: float = 0.9) -> None:
        self.now = 0.0
        super().__init__(max_usage, clock=lambda: self.now)

    def sample(self, number: int, **usage: float) -> None:
        self.take({name: {KV_USAGE: value, SAMPLE: number} for name, value in usage.items()})


def test_a_full_replica_gets_no_requests_until_it_has_room() -> None:
    budget = Budget()
    budget.sample(0, a=0.95, b=0.9)
    assert budget.with_room("ab") == ["b"]
    budget.sample(1, a=0.2, b=0.91)
    assert budget.with_room("ab") == ["a"]
    budget.sample(2, a=1.0, b=1.0)
    assert budget.with_room("ab") == []
    assert budget.usage == {"a": 1.0, "b": 1.0}


def test_a_replica_without_a_sample_is_empty() -> None:
    budget = Budget()
    assert budget.with_room("ab") == ["a", "b"]
    budget.take({"a": {}, "b": {KV_USAGE: 0.99, SAMPLE: 0}})
    assert budget.with_room("ab") == ["a"]
    budget.now = 60.0
    assert budget.with_room("ab") == ["a"]


def test_a_replica_whose_samples_stop_counts_as_full() -> None:
    budget = Budget()
    budget.sample(0, a=0.1, b=0.1)
    budget.now = 11.0
    budget.take({"a": {KV_USAGE: 0.1, SAMPLE: 0}, "b": {KV_USAGE: 0.1, SAMPLE: 1}})
    assert budget.with_room("ab") == ["b"]
    budget.sample(2, a=0.1, b=0.1)
    assert budget.with_room("ab") == ["a", "b"]


@pytest.mark.parametrize("usage", [0.1, 1.0])
def test_no_replica_is_full_if_all_samples_stop(usage: float) -> None:
    budget = Budget()
    budget.sample(0, a=usage, b=usage)
    budget.now = 11.0
    assert budget.with_room("ab") == ["a", "b"]


def test_a_lost_replica_is_forgotten_and_no_replica_is_full_without_a_bound() -> None:
    budget = Budget()
    budget.sample(0, a=1.0, b=0.0)
    budget.sample(1, b=0.0)
    assert budget.usage == {"b": 0.0}
    unbounded = Budget(max_usage=1.0)
    unbounded.sample(0, a=1.0)
    assert budget.with_room("a") == unbounded.with_room("a") == ["a"]
