"""Parts of GRACE-MoE against brute force, and invariants for all routes."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.arrays import Ints
from eldr_serve.experts.expert_placement import Topology, hosts_of
from eldr_serve.experts.parallel.replica_choice import EvenSpread
from offline.expert_placement.co_activation import co_activation, expert_load
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.evaluate import (
    evaluate,
    forwarded_copies,
    home_ranks,
    metro_rule,
    sample_batches,
    serve,
    serve_even,
)
from offline.expert_placement.grace import grace_placement
from offline.expert_placement.grace_paper import controlled_groups, polling_weights_as_written
from offline.expert_placement.grouping import (
    bounded_groups,
    find_knee,
    hierarchical_groups,
    ratio_curve,
    size_bounds,
    spectral_groups,
    utilisation,
)
from offline.expert_placement.locality import (
    local_rule,
    polling_weights,
    route_local,
    route_weighted,
    weighted_rule,
)
from offline.expert_placement.replication import (
    add_replicas,
    fill_slots,
    hot_experts,
    load_skew,
    num_replicas,
)
from tests.support.tables import random_hosts
from tests.support.traces import synthetic_trace

quick = settings(max_examples=20)
TOPOLOGY = Topology(ranks=4, nodes=2)


def random_routes(seed: int, experts: int = 8, tokens: int = 60, layers: int = 2, k: int = 2) -> np.ndarray:
    """Return routes of tokens of two kinds, each of which prefers half of the experts."""
    rng = np.random.default_rng(seed)
    taste = 3 * (np.arange(experts) % 2 == rng.integers(2, size=(tokens, 1, 1)))
    return np.argsort(-(taste + rng.gumbel(size=(tokens, layers, experts))), axis=-1)[..., :k]


def planted_affinity(groups: int, size: int, within: float = 10.0, between: float = 1.0) -> np.ndarray:
    """Return the affinity of groups, where expert e belongs to group e modulo `groups`."""
    group = np.arange(groups * size) % groups
    affinity = np.where(group[:, None] == group, within, between)
    np.fill_diagonal(affinity, 0)
    return affinity


@quick
@given(seed=st.integers(0, 999))
def test_affinity_and_load_count_tokens(seed: int) -> None:
    routes = random_routes(seed, experts=5, tokens=12)
    affinity, load = co_activation(routes, 5), expert_load(routes, 5)
    for layer, i, j in itertools.product(range(2), range(5), range(5)):
        both = sum(i in token[layer] and j in token[layer] for token in routes)
        assert affinity[layer, i, j] == (both if i != j else 0)
        assert load[layer, i] == (routes[:, layer] == i).sum()


@pytest.mark.parametrize("divide", [bounded_groups, controlled_groups])
@quick
@given(st.integers(0, 9999), st.integers(4, 14), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_groups_keep_their_bounds(
    divide: Callable[..., Ints], seed: int, n: int, groups: int, low: int, high: int
) -> None:
    rng = np.random.default_rng(seed)
    half = rng.exponential(size=(n, n))
    affinity, initial = half + half.T, rng.integers(0, groups, n)
    if not groups * low <= n <= groups * high:
        with pytest.raises(ValueError, match="cannot be divided into"):
            divide(affinity, initial, groups, low, high)
        return
    label = divide(affinity, initial, groups, low, high)
    before, size = (np.bincount(labels, minlength=groups) for labels in (initial, label))
    assert len(size) == groups
    assert low <= size.min() <= size.max() <= high
    if low <= before.min() <= before.max() <= high:
        assert np.array_equal(label, initial)


def test_the_weakest_member_moves_to_the_group_of_highest_affinity() -> None:
    affinity = np.zeros((6, 6))
    for i, j, value in ((0, 1, 9), (0, 2, 9), (1, 2, 9), (2, 3, 1), (3, 5, 5), (3, 4, 2)):
        affinity[i, j] = affinity[j, i] = value
    label = bounded_groups(affinity, np.array([0, 0, 0, 0, 1, 2]), 3, 1, 3)
    assert label.tolist() == [0, 0, 0, 2, 1, 2]  # expert 3 to the group of expert 5
    label = bounded_groups(affinity, np.array([0, 0, 0, 0, 0, 2]), 3, 1, 5)
    assert label.tolist() == [0, 0, 0, 0, 1, 2]  # the empty group gets the expert that loses least


def test_the_paper_moves_an_expert_to_the_group_with_the_highest_total() -> None:
    affinity = np.zeros((8, 8))
    for i, j, value in ((0, 1, 9), (0, 2, 9), (1, 2, 9), (0, 3, 2), (3, 6, 5), (4, 5, 20)):
        affinity[i, j] = affinity[j, i] = value
    initial = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    # Group 1 has the highest total, though expert 3 has affinity to group 2 alone.
    assert controlled_groups(affinity, initial, 3, 1, 3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert bounded_groups(affinity, initial, 3, 1, 3).tolist() == [0, 0, 0, 2, 1, 1, 2, 2]


def test_the_papers_polling_weights_divide_the_load_of_the_whole_group() -> None:
    load, primary = np.array([60.0, 30, 10, 20]), np.array([0, 0, 1, 2])
    hosts = primary[:, None] == np.arange(3)
    hosts[0] = True  # the heaviest rank's expert 0 on all three ranks: W_max 90, W_r 60, W_p 90 / 3
    assert (1 / polling_weights_as_written(load, primary, hosts)).tolist() == [60, 40, 50]
    assert (1 / polling_weights(load, hosts)).tolist() == [50, 30, 40]


def test_group_sizes_and_replicas_equal_the_papers() -> None:
    for arguments, bounds in (
        ((16, 4, 0.0), (4, 4)),
        ((17, 4, 0.0), (4, 5)),
        ((16, 4, 0.5), (2, 6)),
        ((16, 4, 0.01), (3, 5)),
        ((16, 4, 1.0), (1, 8)),
        ((16, 4, 1.0, 5), (1, 5)),
    ):
        assert size_bounds(*arguments) == bounds
    # Equation 2: load skew, ranks, replicas.
    for skew, ranks, replicas in ((1.0, 4, 1), (1.9, 4, 1), (2.0, 4, 2), (3.7, 8, 3), (3.7, 3, 2), (9, 8, 7)):
        assert num_replicas(skew, ranks) == replicas


def test_planted_groups_are_found_and_related_ones_share_a_node() -> None:
    groups = spectral_groups(planted_affinity(3, 5), 3)
    assert len({(int(groups[e]), e % 3) for e in range(15)}) == 3
    near = planted_affinity(2, 8, within=8, between=0.1)  # groups by parity, which contain smaller groups
    rank = hierarchical_groups(near + planted_affinity(4, 4, within=30, between=0), TOPOLOGY, ratio=0.3)
    assert len({(int(rank[e]), e % 4) for e in range(16)}) == 4
    assert len({(int(rank[e]) // 2, e % 2) for e in range(16)}) == 2
    unused = hierarchical_groups(np.zeros((8, 8)), TOPOLOGY, ratio=0.0)
    assert np.bincount(unused, minlength=4).min() >= 1


@quick
@given(seed=st.integers(0, 999))
def test_utilisation_equals_equation_1(seed: int) -> None:
    rng = np.random.default_rng(seed)
    half, label = rng.exponential(size=(7, 7)), rng.integers(0, 3, 7)
    affinity = half + half.T
    np.fill_diagonal(affinity, 0)
    pairs = list(itertools.combinations(range(7), 2))
    within = sum(affinity[i, j] for i, j in pairs if label[i] == label[j])
    use, deviation = utilisation(affinity, label, 3)
    assert use == pytest.approx(within / sum(affinity[i, j] for i, j in pairs))
    sizes = [(label == group).sum() for group in range(3)]
    assert deviation == pytest.approx(np.sqrt(sum((size - 7 / 3) ** 2 for size in sizes) / 3))


def test_the_knee_is_where_affinity_stops_growing() -> None:
    curve = np.array([[0.3, 0.0], [0.6, 1.0], [0.62, 2.0], [0.64, 4.0]])
    assert find_knee(curve) == 1
    assert find_knee(np.array([[0.3, 1.0], [0.3, 1.0]])) == 0
    sizes = ratio_curve([planted_affinity(2, 8)], 2, ratios=(0.0, 1.0))[:, 1]
    assert sizes.tolist() == [0.0, 0.0]  # planted groups have equal sizes, so the ratio has no effect


@quick
@given(seed=st.integers(0, 999), replicas=st.integers(1, 3))
def test_hot_experts_are_the_fewest_that_reach_the_share(seed: int, replicas: int) -> None:
    load = np.random.default_rng(seed).exponential(size=9)
    members = np.array([1, 3, 4, 6, 8])
    hot = hot_experts(load, members, replicas)
    least_load = load[members].sum() * replicas / (1 + replicas)
    subsets = (some for size in range(1, 6) for some in itertools.combinations(members, size))
    assert set(hot) <= set(members)
    assert load[hot].sum() > least_load
    assert len(hot) == min(len(some) for some in subsets if load[list(some)].sum() > least_load)


@quick
@given(st.integers(0, 9999), st.sampled_from([None, 4, 6]), st.sampled_from([None, 1]))
def test_replicas_follow_the_first_copies(seed: int, capacity: int | None, replicas: int | None) -> None:
    rng = np.random.default_rng(seed)
    load, primary = rng.exponential(size=12), rng.permutation(np.arange(12) % 4)
    hosts = add_replicas(load, primary, 4, replicas=replicas, capacity=capacity)
    assert hosts[np.arange(12), primary].all()
    by_rank = np.bincount(primary, load, minlength=4)
    heaviest = int(by_rank.argmax())
    assert set(np.flatnonzero(hosts.sum(axis=1) > 1)) <= set(np.flatnonzero(primary == heaviest))
    assert hosts[:, heaviest].sum() == 3  # the heaviest rank gets no replica
    if capacity is None:
        count = replicas or num_replicas(load_skew(load, primary, 4), 4)
        lightest = np.argsort(by_rank)[:count]
        for expert in hot_experts(load, np.flatnonzero(primary == heaviest), count):
            assert np.flatnonzero(hosts[expert]).tolist() == sorted([heaviest, *lightest.tolist()])
    else:
        assert hosts.sum(axis=0).max() <= capacity
        filled = fill_slots(load, hosts, capacity)
        assert (filled.sum(axis=0) == capacity).all()
        assert (filled | ~hosts).all()


def test_spare_slots_get_the_busiest_expert_of_another_rank() -> None:
    filled = fill_slots(np.array([8.0, 3.0, 2.0, 1.0]), np.eye(4, dtype=bool), 2)
    assert filled[:, 3].tolist() == [True, False, False, True]


@settings(max_examples=8)
@given(seed=st.integers(0, 999), redundant=st.sampled_from([0, 4, 8, 24]), ratio=st.sampled_from([None, 0.5]))
def test_grace_places_every_expert_in_equal_slots(seed: int, redundant: int, ratio: float | None) -> None:
    routes = random_routes(seed)
    affinity, load = co_activation(routes, 8), expert_load(routes, 8)
    rows, report = grace_placement(affinity, load, 8 + redundant, TOPOLOGY, ratio=ratio)
    assert rows.shape == (2, 8 + redundant)
    hosts = hosts_of(rows, 8, 4)  # this raises an error if an expert has no slot
    assert (hosts.sum(axis=1) == (8 + redundant) // 4).all()  # no rank holds an expert twice
    assert report["skew_replicas"] + report["spare_replicas"] == redundant
    assert 0 <= report["affinity_within_ranks"] <= 1
    with pytest.raises(ValueError, match="does not match load"):
        grace_placement(affinity[:, 1:, 1:], load, 8, TOPOLOGY)


def test_polling_weights_equal_equation_3() -> None:
    load = np.array([60.0, 20.0, 40.0, 30.0])  # ranks 0, 0, 1, 2; expert 0 has a replica on rank 2
    hosts = np.array([[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
    predicted = [80 - 60 + 60 / 2, 40, 30 + 60 / 2]
    assert polling_weights(load, hosts) == pytest.approx(1 / np.array(predicted))
    assert np.isfinite(polling_weights(np.zeros(4), hosts)).all()


@quick
@given(seed=st.integers(0, 9999))
def test_every_pair_is_served_once_by_the_nearest_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts, weights = random_hosts(rng, 6, 4), rng.uniform(0.1, 2, 4)
    experts, source = rng.integers(0, 6, (20, 3)), rng.integers(0, 4, 20)
    node = TOPOLOGY.node_of
    anywhere = route_weighted(experts, hosts, weights, np.random.default_rng(seed))
    local = route_local(experts, source, hosts, weights, TOPOLOGY, np.random.default_rng(seed))
    assert hosts[experts, anywhere].all()
    for token, choice in itertools.product(range(20), range(3)):
        host_ranks = set(np.flatnonzero(hosts[experts[token, choice]]))
        tiers = ({source[token]}, set(np.flatnonzero(node == node[source[token]])), host_ranks)
        assert local[token, choice] in next(tier & host_ranks for tier in tiers if tier & host_ranks)


def test_replicas_are_polled_in_proportion_to_their_weights() -> None:
    hosts, weights = np.array([[True, True, False, True]]), np.array([1.0, 3.0, 100.0, 4.0])
    experts = np.zeros((40_000, 1), np.int64)
    ranks = route_weighted(experts, hosts, weights, np.random.default_rng(0))
    share = np.bincount(ranks.reshape(-1), minlength=4) / len(ranks)
    assert share == pytest.approx([1 / 8, 3 / 8, 0, 4 / 8], abs=0.01)
    again = route_weighted(experts, hosts, weights, np.random.default_rng(0))
    assert np.array_equal(ranks, again)


def test_batches_are_steps_of_the_given_requests() -> None:
    trace = synthetic_trace(n=9)
    steps = {r: {s.tobytes() for s in trace.decode_routes(np.array([r])).astype(np.int64)} for r in range(9)}
    batches = sample_batches(trace, np.array([2, 5]), 6, 10, seed=0)
    assert batches.shape == (10, 6, 4, 2)
    tokens = {token.tobytes() for batch in batches for token in batch}
    assert tokens <= steps[2] | steps[5]
    assert tokens & steps[2]
    assert tokens & steps[5]
    empty = replace(trace, routes=None, route_offsets=None)
    with pytest.raises(ValueError, match="holds no routes"):
        sample_batches(empty, np.array([2]), 6, 10, seed=0)
    with pytest.raises(ValueError, match="has a decode step"):
        sample_batches(trace, np.array([], np.int64), 6, 10, seed=0)


@quick
@given(seed=st.integers(0, 9999))
def test_an_evaluation_equals_direct_counting(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts = random_hosts(rng, 2, 6, 4)
    batches = random_routes(seed, experts=6, tokens=24)[None].reshape(3, 8, 2, 2)
    load = rng.exponential(size=(2, 6))
    cost = LayerCost(fixed_s=1, per_expert_s=2, per_token_s=3, near_byte_s=0.1, far_byte_s=0.2)
    local = local_rule(load, hosts, TOPOLOGY)
    for rule in (serve_even, metro_rule(hosts), local, weighted_rule(load, hosts)):
        found = evaluate(batches, hosts, TOPOLOGY, rule, cost=cost)
        assert found["experts_mean_rank"] <= found["experts_worst_rank"] <= 6
        assert found["token_skew"] >= 1
        assert found["layer_us"] >= 1e6 * (1 + 2 * found["experts_worst_rank"])
    ranks = serve(batches, hosts, TOPOLOGY, metro_rule(hosts))
    near = far = near_forwarded = far_forwarded = experts = 0
    for b, layer in itertools.product(range(3), range(2)):
        activated = {(e, r) for e, r in zip(batches[b, :, layer].flat, ranks[b, :, layer].flat, strict=True)}
        experts += max(sum(r == rank for _, r in activated) for rank in range(4))
        for token, home in enumerate(home_ranks(8, TOPOLOGY)):
            visited = set(ranks[b, token, layer].tolist())
            same = {r for r in visited if r // 2 == home // 2}
            near += len(same - {home})
            far += len(visited - same)
            far_forwarded += bool(visited - same)
            near_forwarded += len(same - {home}) + max(0, len(visited - same) - 1)
    figures = evaluate(batches, hosts, TOPOLOGY, metro_rule(hosts))
    assert figures["experts_worst_rank"] == pytest.approx(experts / 6)
    pairs = 3 * 2 * 8
    assert (figures["near_copies"], figures["far_copies"]) == pytest.approx((near / pairs, far / pairs))
    assert forwarded_copies(ranks, TOPOLOGY) == pytest.approx((near_forwarded / pairs, far_forwarded / pairs))
    # The tokens of an expert are spread over its replicas in turn.
    both = np.array([[True, False, True, True], [False, True, False, False]])
    ranks = serve_even(0, np.array([[0, 1]] * 6), np.zeros(6, np.int64), both)
    assert ranks.tolist() == [[0, 1], [2, 1], [3, 1]] * 2


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_the_turns_of_replicas_are_those_of_vllms_hash(replicas: int) -> None:
    experts, row = np.zeros((99, 1), np.int64), np.zeros(replicas, np.int64)  # a slot on each rank
    turns = serve_even(0, experts, np.zeros(99, np.int64), np.ones((1, replicas), bool))
    assert turns.tolist() == EvenSpread(row, 1).slots(torch.from_numpy(experts)).tolist()
