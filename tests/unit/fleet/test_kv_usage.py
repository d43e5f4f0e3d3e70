"""Back-pressure before prefill: replicas with room, and missing reports."""

import pytest

from eldr_serve.engine.report_fields import KV_USAGE, REPORT_NUMBER
from eldr_serve.fleet.kv_usage import KvUsage


class TimedKvUsage(KvUsage):
    """A KvUsage with its own clock and numbered reports."""

    def __init__(self, max_usage: float = 0.9) -> None:
        self.now = 0.0
        super().__init__(max_usage, clock=lambda: self.now)

    def report(self, number: int, **usage: float) -> None:
        self.update({name: {KV_USAGE: value, REPORT_NUMBER: number} for name, value in usage.items()})


def test_a_full_replica_gets_no_requests_until_it_has_room() -> None:
    kv_usage = TimedKvUsage()
    kv_usage.report(0, a=0.95, b=0.9)
    assert kv_usage.replicas_with_room("ab") == ["b"]
    kv_usage.report(1, a=0.2, b=0.91)
    assert kv_usage.replicas_with_room("ab") == ["a"]
    kv_usage.report(2, a=1.0, b=1.0)
    assert kv_usage.replicas_with_room("ab") == []
    assert kv_usage.usage_by_worker == {"a": 1.0, "b": 1.0}


def test_a_replica_without_a_report_is_empty() -> None:
    kv_usage = TimedKvUsage()
    assert kv_usage.replicas_with_room("ab") == ["a", "b"]
    kv_usage.update({"a": {}, "b": {KV_USAGE: 0.99, REPORT_NUMBER: 0}})
    assert kv_usage.replicas_with_room("ab") == ["a"]
    kv_usage.now = 60.0
    assert kv_usage.replicas_with_room("ab") == ["a"]


def test_a_replica_whose_reports_stop_counts_as_full() -> None:
    kv_usage = TimedKvUsage()
    kv_usage.report(0, a=0.1, b=0.1)
    kv_usage.now = 11.0
    kv_usage.update({"a": {KV_USAGE: 0.1, REPORT_NUMBER: 0}, "b": {KV_USAGE: 0.1, REPORT_NUMBER: 1}})
    assert kv_usage.replicas_with_room("ab") == ["b"]
    kv_usage.report(2, a=0.1, b=0.1)
    assert kv_usage.replicas_with_room("ab") == ["a", "b"]


@pytest.mark.parametrize("usage", [0.1, 1.0])
def test_no_replica_is_full_if_all_reports_stop(usage: float) -> None:
    kv_usage = TimedKvUsage()
    kv_usage.report(0, a=usage, b=usage)
    kv_usage.now = 11.0
    assert kv_usage.replicas_with_room("ab") == ["a", "b"]


def test_a_lost_replica_is_forgotten_and_no_replica_is_full_without_a_bound() -> None:
    kv_usage = TimedKvUsage()
    kv_usage.report(0, a=1.0, b=0.0)
    kv_usage.report(1, b=0.0)
    assert kv_usage.usage_by_worker == {"b": 0.0}
    unbounded = TimedKvUsage(max_usage=1.0)
    unbounded.report(0, a=1.0)
    assert kv_usage.replicas_with_room("a") == unbounded.replicas_with_room("a") == ["a"]
