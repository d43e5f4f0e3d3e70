"""Load policies, and the locality band at its edges."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eldr_serve.scheduling import Decision, Loads, make_policy, policy_names
from eldr_serve.scheduling.policies.base import worker_similarity
from eldr_serve.scheduling.policies.domain import divide_workers
from eldr_serve.scheduling.policies.registry import balancer_names
from tests.support.tables import counts_for, request, unit_table

RNG = np.random.default_rng(0)


def loads(*in_flight: int) -> Loads:
    return Loads.from_counts(in_flight, [100 * n for n in in_flight])


def choose(policy: Any, similarity: list[float], *in_flight: int) -> Decision:
    placement_request = request(similarity=np.array(similarity, np.float32))
    return policy.select(placement_request, loads(*in_flight), np.random.default_rng(0))


def test_each_load_policy_chooses_by_its_own_measure() -> None:
    state = loads(3, 1, 2)
    assert make_policy("shortest-queue").select(request(), state, RNG).position == 1
    tokens = Loads.from_counts([1, 9, 1], [500, 20, 300])
    assert make_policy("least-tokens").select(request(), tokens, RNG).position == 1
    robin = make_policy("round-robin")
    assert [robin.select(request(), state, RNG).position for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    choices = Counter(make_policy("random").select(request(), state, RNG).position for _ in range(600))
    assert min(choices.values()) > 140
    two = Counter(
        make_policy("power-of-two").select(request(), loads(9, 1, 5), RNG).position for _ in range(300)
    )
    assert two[0] == 0  # the fullest is never the emptier of two
    assert two[1] > two[2] > 0


def test_domain_goes_to_the_clusters_of_its_name() -> None:
    policy = make_policy("domain").set_table(unit_table(3))
    assert policy.select(request(domain="domain2"), loads(0, 0, 5), RNG).position == 2
    assert policy.select(request(), loads(4, 0, 5), RNG).reason == "no-domain"
    unknown = [policy.select(request(domain="other"), loads(0, 0, 0), RNG) for _ in range(5)]
    assert len({d.position for d in unknown}) == 1
    without = make_policy("domain")
    assert len({without.select(request(domain="x"), loads(n, 1, 1), RNG).position for n in range(5)}) == 1


def test_domain_divides_the_workers_in_proportion_to_the_mix() -> None:
    policy = make_policy("domain", mix={"code": 50, "law": 25, "maths": 25})
    chosen = {
        name: {policy.select(request(domain=name), loads(*in_flight), RNG).position for in_flight in permuted}
        for permuted in [[tuple(int(w != n) for w in range(8)) for n in range(8)]]
        for name in ("code", "law", "maths")
    }
    assert chosen == {"code": {0, 1, 2, 3}, "law": {4, 5}, "maths": {6, 7}}
    assert policy.select(request(domain="law"), loads(0, 0, 0, 0, 9, 8, 0, 0), RNG).position == 5
    assert policy.select(request(domain="other"), loads(0, 0), RNG).reason == "domain-hash"


@given(st.dictionaries(st.text(max_size=3), st.floats(0.01, 100), min_size=1, max_size=9), st.integers(1, 20))
def test_a_division_of_workers_is_whole_and_fair(mix: dict[str, float], workers: int) -> None:
    blocks = divide_workers(mix, workers)
    assert set(blocks) == set(mix)
    assert set().union(*blocks.values()) == set(range(workers))
    if workers >= len(mix):
        assert sum(map(len, blocks.values())) == workers
        for one, other in itertools.permutations(mix, 2):
            if mix[one] > mix[other]:
                assert len(blocks[one]) >= len(blocks[other])


def test_a_load_cap_removes_full_workers_from_the_band() -> None:
    capped = make_policy("locality-band", band=0.1, max_load_ratio=1.5).set_table(unit_table(3))
    assert choose(capped, [1.0, 0.95, 0.0], 8, 2, 2).position == 1
    decision = choose(capped, [1.0, 0.0, 0.0], 8, 3, 2)
    assert (decision.position, decision.reason) == (2, "load-cap")
    assert choose(capped, [1.0, 0.0, 0.0], 2, 2, 2).position == 0


@given(
    arrays(np.float32, 5, elements=st.floats(-1, 1, width=32)).map(np.ndarray.tolist),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
    st.none() | st.floats(0, 2),
)
@example([0.5, 0.9, 0.8], [0, 99, 0], 0.0)  # the nearest centroid, for any load
@example([-1.0, 1.0, 0.0], [0, 1, 1], 2.0)  # the widest band is shortest-queue
# A worker on the edge is inside; 0.75 and 0.5 are exact in binary.
@example([0.5, 0.75, 0.25], [0, 1, 0], 0.25)
@example([0.5, 0.75, 0.25], [0, 1, 0], 0.2499)
# Ties break by load, then similarity, then number.
@example([0.75, 0.5, 0.75], [2, 1, 2], 0.5)
@example([0.5, 0.75, 0.5], [1, 1, 1], 0.5)
@example([0.75, 0.75, 0.75], [1, 1, 1], 0.5)
@example([0.5, 0.75, 0.0], [0, 1, 0], None)  # the table's own, 0.5
def test_the_least_loaded_worker_within_the_band_is_chosen(
    similarity: list[float], in_flight: list[int], width: float | None
) -> None:
    k = len(similarity)
    policy = make_policy("locality-band", band=width).set_table(unit_table(k, band=0.5))
    decision = choose(policy, similarity, *in_flight)
    if not any(similarity):
        assert decision.reason == "no-counts"
        return
    values = np.float32(similarity).tolist()
    inside = [w for w in range(k) if values[w] >= max(values) - (0.5 if width is None else width)]
    worker = min(inside, key=lambda w: (in_flight[w], -values[w], w))
    assert decision == Decision(
        worker, num_candidates=len(inside), similarity=pytest.approx(values[worker]), reason="locality-band"
    )


@pytest.mark.parametrize(
    ("fields", "table", "reason"),
    [
        ({}, True, "no-counts"),
        ({"expert_counts": counts_for(1)}, False, "no-table"),
        ({"expert_counts": np.zeros((2, 8), np.uint32)}, True, "no-counts"),
        ({"expert_counts": np.ones((5, 8), np.uint32)}, True, "bad-counts"),
        ({"expert_counts": np.ones(3, np.float32)}, True, "bad-counts"),
        ({"similarity": np.ones(9, np.float32)}, True, "bad-counts"),
        ({"similarity": np.full(3, np.nan, np.float32)}, True, "bad-counts"),
    ],
)
def test_load_decides_without_usable_counts(fields: dict[str, Any], table: bool, reason: str) -> None:
    policy = make_policy("locality-band").set_table(unit_table(3) if table else None)
    decision = policy.select(request(**fields), loads(2, 1, 0), RNG)
    assert (decision.position, decision.reason, decision.similarity) == (2, reason, None)


def test_counts_and_their_encoding_give_the_same_placement() -> None:
    table = unit_table(3)
    policy = make_policy("locality-band").set_table(table)
    for signature in (counts_for(2), table.spec.encode(counts_for(2))):
        assert policy.select(request(expert_counts=signature), loads(0, 0, 0), RNG).position == 2


@given(arrays(np.float32, st.integers(1, 12), elements=st.floats(-1, 1, width=32)), st.integers(1, 12))
def test_centroids_are_assigned_for_all_numbers_of_workers(similarity: np.ndarray, workers: int) -> None:
    best = worker_similarity(similarity, workers)
    k = len(similarity)
    for worker in range(workers):
        served = [c for c in range(k) if c % workers == worker] if k >= workers else [worker % k]
        assert best[worker] == max(similarity[c] for c in served)


def test_the_baselines_of_comparisons_are_the_load_balancers() -> None:
    assert balancer_names() == ("random", "round-robin", "shortest-queue", "power-of-two", "least-tokens")


def test_the_policy_names_are_those_documented() -> None:
    assert policy_names() == [
        "balance-band",
        "balance-route",
        "balance-route-horizon",
        "domain",
        "least-tokens",
        "locality-band",
        "marginal-cost",
        "power-of-two",
        "random",
        "round-robin",
        "shortest-queue",
    ]
