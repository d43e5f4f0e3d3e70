"""Placements of requests and experts before measurements, and rows of the times, without engines."""

from typing import Any

import numpy as np
import pytest

from benchmarks.lib.captured_routes import CapturedRoutes
from benchmarks.papers.ep_policies import ARMS, BASE, EpWorkload, policy_rows
from tests.support.traces import synthetic_trace


@pytest.fixture(scope="module")
def case() -> EpWorkload:
    trace = synthetic_trace(n=96, num_layers=2, num_experts=8)
    data = CapturedRoutes(trace, [[1]] * 96)
    return EpWorkload(data, "all", workers=2, batch=8, rounds=3, ranks=2, seed=0)


@pytest.mark.parametrize("arm", ARMS)
def test_every_request_of_a_round_is_on_one_worker_with_a_whole_placement(case: EpWorkload, arm: Any) -> None:
    for turn in range(3):
        batches = case.batches(arm, turn)
        assert sorted(np.concatenate([requests for requests, _ in batches])) == sorted(case._rounds[turn])
        for _, placement in batches:
            assert np.sort(placement, axis=1).tolist() == [list(range(8))] * 2
        assert arm[1] != "linear" or all((placed == np.arange(8)).all() for _, placed in batches)


def test_a_workers_own_placement_is_fitted_to_its_earlier_requests(case: EpWorkload) -> None:
    placements = [placement for _, placement in case.batches(("locality-band", "own"), 0)]
    (one, another) = [placement for _, placement in case.batches(("shortest-queue", "one for all"), 0)]
    assert np.array_equal(one, another)
    assert not np.array_equal(placements[0], placements[1])


def test_times_are_compared_with_the_same_request_elsewhere() -> None:
    def batch(step_ms: float, requests: list[int], answers: str, experts: float) -> dict[str, Any]:
        fields = {"step_ms": step_ms, "requests": requests, "answers": list(answers)}
        return fields | {"worst_rank_experts": experts, "experts_all_ranks": 2 * experts}

    arms = {arm: [[batch(10, [1, 2], "ab", 8), batch(20, [3, 4], "cd", 8)]] for arm in ARMS}
    band = "locality-band", "own"
    arms[band] = [[batch(18, [4, 3, 1], "dca", 6), batch(9, [2], "x", 2)]]
    rows = {(row["policy"], row["placement"]): row for row in policy_rows(arms, "language", 0)}
    assert rows[BASE]["p50_pct"] == 0
    assert rows[BASE]["tpot_p50_ms"] == 15
    assert rows[band]["tpot_p50_ms"] == 18
    assert rows[band]["worst_rank_experts"] == 5
    assert rows[band]["requests_equal_pct"] == 75
    assert rows[band]["largest_batch"] == 3
    assert rows[band]["paper_p50_pct"] == "-2.7..-4.3"
    assert policy_rows(arms, "all", 0)[4]["paper_p50_pct"] is None
