"""GRACE-MoE's parts against brute force, and what must hold whatever the routes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import synthetic_trace

from eldr_serve.expert_placement import Topology, hosts_of
from offline.placement.affinity import co_activation, expert_load
from offline.placement.cost import LayerCost
from offline.placement.evaluate import (
    evaluate,
    forwarded_copies,
    home_ranks,
    metro_rule,
    sample_batches,
    serve_even,
    served,
)
from offline.placement.grace import grace_placement
from offline.placement.grouping import (
    bounded_groups,
    hierarchical_groups,
    knee,
    ratio_curve,
    size_bounds,
    spectral_groups,
    utilisation,
)
from offline.placement.locality import local_rule, polling_weights, route_local, route_weighted, weighted_rule
from offline.placement.replication import fill_slots, hot_experts, load_skew, num_replicas, with_replicas
from studies.figures import grace
from studies.figures.common import Options
from studies.reproduce import reproduce
from tools.cli import bad_input_exits

quick = settings(deadline=None, max_examples=20)
TOPOLOGY = Topology(ranks=4, nodes=2)


def random_routes(seed: int, experts: int = 8, tokens: int = 60, layers: int = 2, k: int = 2) -> np.ndarray:
    """Tokens of two kinds, each with its half of the experts."""
    rng = np.random.default_rng(seed)
    taste = 3 * (np.arange(experts) % 2 == rng.integers(2, size=(tokens, 1, 1)))
    return np.argsort(-(taste + rng.gumbel(size=(tokens, layers, experts))), axis=-1)[..., :k]


def planted(groups: int, size: int, within: float = 10.0, between: float = 1.0) -> np.ndarray:
    """Affinity of groups whose experts are dealt out in turn: expert e is of group e modulo `groups`."""
    group = np.arange(groups * size) % groups
    affinity = np.where(group[:, None] == group, within, between)
    np.fill_diagonal(affinity, 0)
    return affinity


# -- affinity and groups --------------------------------------------------------------------------


@quick
@given(seed=st.integers(0, 999))
def test_affinity_and_load_count_tokens(seed: int) -> None:
    routes = random_routes(seed, experts=5, tokens=12)
    affinity, load = co_activation(routes, 5), expert_load(routes, 5)
    for layer, i, j in itertools.product(range(2), range(5), range(5)):
        both = sum(i in token[layer] and j in token[layer] for token in routes)
        assert affinity[layer, i, j] == (both if i != j else 0)
        assert load[layer, i] == (routes[:, layer] == i).sum()


@quick
@given(
    seed=st.integers(0, 9999),
    n=st.integers(4, 14),
    groups=st.integers(1, 4),
    low=st.integers(1, 4),
    high=st.integers(1, 9),
)
def test_groups_keep_their_bounds(seed: int, n: int, groups: int, low: int, high: int) -> None:
    rng = np.random.default_rng(seed)
    half = rng.exponential(size=(n, n))
    affinity, initial = half + half.T, rng.integers(0, groups, n)
    if not groups * low <= n <= groups * high:
        with pytest.raises(ValueError, match="do not go into"):
            bounded_groups(affinity, initial, groups, low, high)
        return
    label = bounded_groups(affinity, initial, groups, low, high)
    size = np.bincount(label, minlength=groups)
    assert len(size) == groups
    assert low <= size.min() <= size.max() <= high
    if low <= np.bincount(initial, minlength=groups).min() <= np.bincount(initial).max() <= high:
        assert np.array_equal(label, initial)


def test_the_weakest_member_goes_where_it_is_wanted() -> None:
    affinity = np.zeros((6, 6))
    for i, j, value in ((0, 1, 9), (0, 2, 9), (1, 2, 9), (2, 3, 1), (3, 5, 5), (3, 4, 2)):
        affinity[i, j] = affinity[j, i] = value
    label = bounded_groups(affinity, np.array([0, 0, 0, 0, 1, 2]), 3, 1, 3)
    assert label.tolist() == [0, 0, 0, 2, 1, 2]  # expert 3 to the group of expert 5
    label = bounded_groups(affinity, np.array([0, 0, 0, 0, 0, 2]), 3, 1, 5)
    assert label.tolist() == [0, 0, 0, 0, 1, 2]  # the empty group gets the one that loses least


@pytest.mark.parametrize(
    ("arguments", "bounds"),
    [
        ((16, 4, 0.0), (4, 4)),
        ((17, 4, 0.0), (4, 5)),
        ((16, 4, 0.5), (2, 6)),
        ((16, 4, 0.01), (3, 5)),
        ((16, 4, 1.0), (1, 8)),
        ((16, 4, 1.0, 5), (1, 5)),
    ],
)
def test_size_bounds_follow_the_ratio(arguments: Any, bounds: tuple[int, int]) -> None:
    assert size_bounds(*arguments) == bounds


def test_planted_groups_are_found() -> None:
    found = spectral_groups(planted(3, 5), 3)
    assert len({(int(found[e]), e % 3) for e in range(15)}) == 3


def test_the_hierarchy_puts_near_groups_on_one_node() -> None:
    near = planted(2, 8, within=8, between=0.1)  # experts of one parity go together, and of them
    rank = hierarchical_groups(near + planted(4, 4, within=30, between=0), TOPOLOGY, ratio=0.3)
    assert len({(int(rank[e]), e % 4) for e in range(16)}) == 4
    assert len({(int(rank[e]) // 2, e % 2) for e in range(16)}) == 2


def test_experts_that_nobody_used_are_placed_too() -> None:
    rank = hierarchical_groups(np.zeros((8, 8)), TOPOLOGY, ratio=0.0)
    assert np.bincount(rank, minlength=4).min() >= 1


@quick
@given(seed=st.integers(0, 999))
def test_utilisation_is_equation_1(seed: int) -> None:
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


def test_the_knee_is_where_affinity_stops_to_grow() -> None:
    curve = np.array([[0.3, 0.0], [0.6, 1.0], [0.62, 2.0], [0.64, 4.0]])
    assert knee(curve) == 1
    assert knee(np.array([[0.3, 1.0], [0.3, 1.0]])) == 0
    sizes = ratio_curve([planted(2, 8)], 2, ratios=(0.0, 1.0))[:, 1]
    assert sizes.tolist() == [0.0, 0.0]  # planted groups are of one size: the ratio changes nothing


# -- replicas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew", "ranks", "replicas"),
    [(1.0, 4, 1), (1.9, 4, 1), (2.0, 4, 2), (3.7, 8, 3), (3.7, 3, 2), (9, 8, 7)],
)
def test_replicas_are_equation_2(skew: float, ranks: int, replicas: int) -> None:
    assert num_replicas(skew, ranks) == replicas


@quick
@given(seed=st.integers(0, 999), replicas=st.integers(1, 3))
def test_hot_experts_are_the_fewest_that_carry_the_share(seed: int, replicas: int) -> None:
    load = np.random.default_rng(seed).exponential(size=9)
    members = np.array([1, 3, 4, 6, 8])
    hot = hot_experts(load, members, replicas)
    wanted = load[members].sum() * replicas / (1 + replicas)
    fewest = min(
        len(some)
        for size in range(1, 6)
        for some in itertools.combinations(members, size)
        if load[list(some)].sum() > wanted
    )
    assert set(hot) <= set(members)
    assert load[hot].sum() > wanted
    assert len(hot) == fewest


@quick
@given(
    seed=st.integers(0, 9999),
    capacity=st.sampled_from([None, 4, 6]),
    replicas=st.sampled_from([None, 1]),
)
def test_replicas_go_beside_the_first_copies(seed: int, capacity: int | None, replicas: int | None) -> None:
    rng = np.random.default_rng(seed)
    load, primary = rng.exponential(size=12), rng.permutation(np.arange(12) % 4)
    hosts = with_replicas(load, primary, 4, replicas=replicas, capacity=capacity)
    assert hosts[np.arange(12), primary].all()
    by_rank = np.bincount(primary, load, minlength=4)
    heaviest = int(by_rank.argmax())
    assert set(np.flatnonzero(hosts.sum(axis=1) > 1)) <= set(np.flatnonzero(primary == heaviest))
    assert hosts[:, heaviest].sum() == 3  # nothing comes to the heaviest rank
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


def test_spare_slots_take_the_busiest_expert_of_another_rank() -> None:
    hosts = np.eye(4, dtype=bool)
    filled = fill_slots(np.array([8.0, 3.0, 2.0, 1.0]), hosts, 2)
    assert filled[:, 3].tolist() == [True, False, False, True]
    assert (filled.sum(axis=0) == 2).all()


# -- the placement --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 999), redundant=st.sampled_from([0, 4, 8, 24]), ratio=st.sampled_from([None, 0.5]))
def test_grace_places_every_expert_in_equal_slots(seed: int, redundant: int, ratio: float | None) -> None:
    routes = random_routes(seed)
    load = expert_load(routes, 8)
    placed, report = grace_placement(co_activation(routes, 8), load, 8 + redundant, TOPOLOGY, ratio=ratio)
    assert placed.shape == (2, 8 + redundant)
    hosts = hosts_of(placed, 8, 4)  # raises if an expert has no slot
    assert (hosts.sum(axis=1) == (8 + redundant) // 4).all()  # no rank holds an expert twice
    assert report["skew_replicas"] + report["spare_replicas"] == redundant
    assert 0 <= report["affinity_within_ranks"] <= 1
    json.dumps(report)


def test_experts_that_are_used_together_send_less() -> None:
    """Tokens use the experts of one parity; blocks of consecutive experts part them, groups do not."""
    rng = np.random.default_rng(0)
    routes = np.array([[2 * rng.permutation(4)[:2] + parity] for parity in rng.integers(0, 2, 400)])
    fit, batch = routes[:200], routes[None, 200:]
    placed, _ = grace_placement(co_activation(fit, 8), expert_load(fit, 8), 8, Topology(ranks=2))
    found = {
        name: evaluate(batch, hosts_of(slots, 8, 2), Topology(ranks=2), serve_even)
        for name, slots in (("linear", np.arange(8)[None]), ("grace", placed))
    }
    assert found["grace"]["near_copies"] == pytest.approx(0.5, abs=0.1)  # the other rank, or none
    assert found["linear"]["near_copies"] > found["grace"]["near_copies"] + 0.2


@pytest.mark.parametrize(
    ("slots", "ranks", "sentence"),
    [
        (7, 1, "7 slots are not from 8"),
        (10, 4, "10 slots do not divide"),
        (36, 4, "each expert on every rank"),
    ],
)
def test_slots_that_cannot_be_are_said_before_solving(slots: int, ranks: int, sentence: str) -> None:
    routes = random_routes(0)
    with pytest.raises(ValueError, match=sentence):
        grace_placement(co_activation(routes, 8), expert_load(routes, 8), slots, Topology(ranks=ranks))
    with pytest.raises(ValueError, match="does not go with load"):
        grace_placement(co_activation(routes, 9), expert_load(routes, 8), 8, TOPOLOGY)


# -- routing --------------------------------------------------------------------------------------


def test_polling_weights_are_equation_3() -> None:
    load = np.array([60.0, 20.0, 40.0, 30.0])  # ranks 0, 0, 1, 2; expert 0 has a replica on rank 2
    hosts = np.array([[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
    predicted = [80 - 60 + 60 / 2, 40, 30 + 60 / 2]
    assert polling_weights(load, hosts) == pytest.approx(1 / np.array(predicted))
    assert np.isfinite(polling_weights(np.zeros(4), hosts)).all()


def random_hosts(rng: np.random.Generator, experts: int = 6, ranks: int = 4) -> np.ndarray:
    hosts = rng.uniform(size=(experts, ranks)) < 0.4
    hosts[np.arange(experts), rng.integers(ranks, size=experts)] = True
    return hosts


@quick
@given(seed=st.integers(0, 9999))
def test_every_pair_is_served_once_by_the_nearest_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts, weights = random_hosts(rng), rng.uniform(0.1, 2, 4)
    experts, source = rng.integers(0, 6, (20, 3)), rng.integers(0, 4, 20)
    node = TOPOLOGY.node_of
    anywhere = route_weighted(experts, hosts, weights, np.random.default_rng(seed))
    local = route_local(experts, source, hosts, weights, TOPOLOGY, np.random.default_rng(seed))
    assert hosts[experts, anywhere].all()
    for token, choice in itertools.product(range(20), range(3)):
        held = set(np.flatnonzero(hosts[experts[token, choice]]))
        tiers = ({source[token]}, set(np.flatnonzero(node == node[source[token]])), held)
        assert local[token, choice] in next(tier & held for tier in tiers if tier & held)


def test_replicas_are_polled_in_proportion_to_their_weights() -> None:
    hosts, weights = np.array([[True, True, False, True]]), np.array([1.0, 3.0, 100.0, 4.0])
    experts = np.zeros((40_000, 1), np.int64)
    ranks = route_weighted(experts, hosts, weights, np.random.default_rng(0))
    share = np.bincount(ranks.reshape(-1), minlength=4) / len(ranks)
    assert share == pytest.approx([1 / 8, 3 / 8, 0, 4 / 8], abs=0.01)
    again = route_weighted(experts, hosts, weights, np.random.default_rng(0))
    assert np.array_equal(ranks, again)


# -- evaluation -----------------------------------------------------------------------------------


def test_batches_are_steps_of_these_requests() -> None:
    trace = synthetic_trace(n=9)
    assert trace.routes is not None
    steps = {r: {s.tobytes() for s in trace.decode_routes(np.array([r])).astype(np.int64)} for r in range(9)}
    batches = sample_batches(trace, np.array([2, 5]), 6, 10, seed=0)
    assert batches.shape == (10, 6, 4, 2)
    drawn = {token.tobytes() for batch in batches for token in batch}
    assert drawn <= steps[2] | steps[5]
    assert drawn & steps[2]
    assert drawn & steps[5]
    empty = replace(trace, routes=None, route_offsets=None)
    with pytest.raises(ValueError, match="holds no routes"):
        sample_batches(empty, np.array([2]), 6, 10, seed=0)
    with pytest.raises(ValueError, match="has a decode step"):
        sample_batches(trace, np.array([], np.int64), 6, 10, seed=0)


@quick
@given(seed=st.integers(0, 9999))
def test_an_evaluation_is_what_counting_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts = np.stack([random_hosts(rng) for _ in range(2)])
    batches = random_routes(seed, experts=6, tokens=24)[None].reshape(3, 8, 2, 2)
    load = rng.exponential(size=(2, 6))
    cost = LayerCost(fixed_s=1, per_expert_s=2, per_token_s=3, near_byte_s=0.1, far_byte_s=0.2)
    for rule in (
        serve_even,
        metro_rule(hosts),
        local_rule(load, hosts, TOPOLOGY),
        weighted_rule(load, hosts),
    ):
        found = evaluate(batches, hosts, TOPOLOGY, rule, cost=cost)
        assert found["experts_mean_rank"] <= found["experts_worst_rank"] <= 6
        assert found["token_skew"] >= 1
        assert found["layer_us"] >= 1e6 * (1 + 2 * found["experts_worst_rank"])
    ranks = served(batches, hosts, TOPOLOGY, metro_rule(hosts))
    near = far = near_forwarded = far_forwarded = experts = pairs = 0
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
            pairs += 1
    found = evaluate(batches, hosts, TOPOLOGY, metro_rule(hosts))
    assert found["experts_worst_rank"] == pytest.approx(experts / 6)
    assert found["near_copies"] == pytest.approx(near / pairs)
    assert found["far_copies"] == pytest.approx(far / pairs)
    assert forwarded_copies(ranks, TOPOLOGY) == pytest.approx((near_forwarded / pairs, far_forwarded / pairs))


def test_turns_spread_the_tokens_of_an_expert() -> None:
    hosts = np.array([[True, False, True, True], [False, True, False, False]])
    experts = np.array([[0, 1]] * 6)
    ranks = serve_even(0, experts, np.zeros(6, np.int64), hosts)
    assert ranks.tolist() == [[0, 1], [2, 1], [3, 1]] * 2


# -- the figures ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = synthetic_trace(n=40, domains=4, num_layers=2)
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    replace(trace, domains=[grace.DOMAINS[int(d[1:])] for d in trace.domains]).save(path)
    return path


def of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[k] == v for k, v in wanted.items())]
    return row


def test_components_move_traffic_and_load_as_in_the_paper(observed: Path) -> None:
    rows = grace.components(Options((observed,), requests=8, seeds=(0, 1)))
    for ranks in ("2 x 2", "2 x 4"):
        linear, grouped, replicated, local = (
            of(rows, ranks=ranks, arm=arm) for arm in ("linear", "HG", "HG+DR, WRR", "HG+DR, TAR")
        )
        assert grouped["copies"] < linear["copies"]
        assert replicated["load_std_pct"] < grouped["load_std_pct"]
        assert local["copies"] < replicated["copies"]
        assert local["against"] == "HG+DR, WRR"
        assert grouped["paper_idle_change"] == "+13 / +231 / +147"


def test_the_other_figures_have_their_rows(observed: Path) -> None:
    options = Options((observed,), requests=4)
    strict = grace.strictness(options)
    assert of(strict, part="a", placement="linear")["traffic_change_pct"] == 0
    assert of(strict, part="a", placement="uniform")["copies"] < of(strict, placement="linear")["copies"]
    assert (
        of(strict, placement="16 most active")["load_std_pct"]
        < of(strict, placement="0 most active")["load_std_pct"]
    )
    assert [row["layer"] for row in grace.concentration(options)] == [0, 1]
    curve = [row for row in grace.ratios(options) if row["ranks"] == "2 x 2"]
    assert [row["ratio"] for row in curve] == list(grace.RATIOS)
    assert curve[0]["affinity_within_pct"] <= curve[-1]["affinity_within_pct"] <= 100
    domains = grace.generalisation(options)
    assert of(domains, evaluated_on="code", fitted_on="code")["against_own_domain_pct"] == 0
    worst = of(domains, fitted_on="worst of other domains")["against_own_domain_pct"]
    assert worst == max(row["against_own_domain_pct"] for row in domains if row["fitted_on"] in grace.DOMAINS)


def test_figures_say_what_they_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.safetensors"
    synthetic_trace(n=12).save(trace)
    for traces, figure, sentence in (
        ([], "fig5", "give --trace"),
        ([trace], "fig6", "fewer than two requests of code"),
    ):
        with pytest.raises(typer.Exit):
            bad_input_exits(reproduce)("grace", figure, trace=traces, out=tmp_path / "x.json")
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_eplb_packs_tokens_tighter_and_sends_more(observed: Path) -> None:
    rows = grace.components(Options((observed,), requests=8))
    ours, eplb = (of(rows, ranks="2 x 2", arm=arm) for arm in ("equal slots, TAR", "EPLB, as many slots"))
    assert ours["copies"] < eplb["copies"]
