"""Measurements of memory, descriptors, tasks and event loops by the chaos command."""

from typing import Any

import pytest

from tests.faults.steadiness import Steadiness, find_problems


def loop_metric(metric: str, role: str, worker: str, value: float) -> str:
    return f'ray_eldr_loop_{metric}{{SessionName="s",WorkerId="{worker}",role="{role}"}} {value}\n'


Held = dict[str, list[tuple[int, float, int]]]  # (pid, MiB, descriptors) of processes, by role


def measured_rows(before: Held, after: Held, *metrics: str, **stops: int) -> dict[str, dict[str, Any]]:
    readings = [before, after]
    steadiness = Steadiness(lambda role: readings[0].get(role, []))
    steadiness.begin()
    for text in metrics:
        steadiness.take(text)
    readings.pop(0)
    steadiness.end()
    return {row["process"]: row for row in steadiness.rows(stops)}


def test_growth_is_measured_on_processes_that_survive_the_run() -> None:
    before = dict(ingress=[(1, 100.0, 20), (2, 100.0, 20)], decode=[(3, 900.0, 50)])
    after = dict(ingress=[(1, 110.0, 25), (9, 500.0, 300)], decode=[(4, 1500.0, 90)])
    rows = measured_rows(before, after)
    assert (rows["ingress"]["lived"], rows["decode"]["lived"]) == (1, 0)
    assert rows["ingress"]["memory_growth_mib"] == 10.0
    assert rows["ingress"]["descriptors_growth"] == 5
    assert rows["ingress"]["descriptors"] == 300
    assert rows["decode"]["memory_growth"] is None
    assert not find_problems(list(rows.values()))


@pytest.mark.parametrize(
    ("after", "words"), [((1, 400.0, 20), "MiB of memory"), ((1, 100.0, 200), "180 descriptors")]
)
def test_a_growing_process_is_reported(after: tuple[int, float, int], words: str) -> None:
    (what,) = find_problems(list(measured_rows(dict(router=[(1, 100.0, 20)]), dict(router=[after])).values()))
    assert what.startswith("router: ")
    assert words in what


def test_task_growth_starts_at_the_first_sample() -> None:
    metrics = [loop_metric("tasks", "ingress", "a", 20) + loop_metric("tasks", "ingress", "b", 150)]
    metrics += [loop_metric("tasks", "ingress", "a", 90) + loop_metric("tasks", "ingress", "b", 150)]
    rows = measured_rows({}, {}, *metrics)
    assert (rows["ingress"]["tasks"], rows["ingress"]["tasks_growth"]) == (150, 70)
    assert find_problems(list(rows.values())) == ["ingress: 70 tasks more than after warm-up"]


def test_an_event_loop_may_block_only_while_its_process_is_stopped() -> None:
    metrics = [
        loop_metric("stalls_total", "ingress", "a", 2.2250738585072014e-308)
        + loop_metric("stalls_total", "decode", "d", 3)
        + loop_metric("longest_stall_seconds", "ingress", "a", 0.02),
        loop_metric("stalls_total", "ingress", "a", 1)
        + loop_metric("longest_stall_seconds", "ingress", "a", 5.01),
        loop_metric("stalls_total", "ingress", "b", 1),  # this ingress replaces the first
    ]
    stopped_twice = measured_rows({}, {}, *metrics, ingress=2)
    row = stopped_twice["ingress"]
    assert (row["stalls"], row["stops"], row["longest_stall_s"]) == (2, 2, 5.01)
    assert not find_problems(list(stopped_twice.values()))
    (what,) = find_problems(list(measured_rows({}, {}, *metrics, ingress=1).values()))
    assert what == "ingress: its event loop was blocked 2 times, stopped 1 times"
