"""Expert placement and replica routing against brute force and published examples.

METRO on tensors and in Triton makes the same choices as the plan in numpy. Triton is interpreted here.
"""

import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.ep.replica_choice import route_even, route_optimal
from eldr_serve.experts.expert_placement import hosts_of
from eldr_serve.experts.parallel.metro import EXPERT_LOAD, MAX_PAIRS, MetroPlan, route_metro
from eldr_serve.experts.parallel.metro_torch import TorchMetro
from offline.expert_placement.packed_placements import activation_placement, eplb_placement
from tests.support.processes import python
from tests.support.shipped import ROOT
from tests.support.tables import random_hosts


def test_eplb_reproduces_the_published_example() -> None:
    load = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    rows = eplb_placement(load, 16, groups=4, nodes=2, ranks=8)
    assert rows.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@given(st.integers(0, 999), st.sampled_from([2, 4]), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_eplb_places_every_expert_and_fills_every_slot(
    seed: int, ranks: int, spare: int, groups: int
) -> None:
    load = np.random.default_rng(seed).exponential(size=(3, 8))
    rows = eplb_placement(load, 8 + spare * ranks, groups=groups, nodes=2, ranks=ranks)
    assert hosts_of(rows, 8, ranks).any(axis=2).all()
    assert rows.shape == (3, 8 + spare * ranks)
    for row, slots in zip(load, rows, strict=True):
        replicas = np.bincount(slots, minlength=8)
        spared = replicas > 1
        # With one pool, no expert with a replica to spare would be lighter without it than the heaviest.
        if groups % 2 and spared.any():
            assert (row / replicas).max() <= (row / np.maximum(replicas - 1, 1))[spared].min() + 1e-9


@given(seed=st.integers(0, 999), ranks=st.sampled_from([2, 3, 6]))
def test_activation_placement_balances_what_each_rank_activates(seed: int, ranks: int) -> None:
    activation = np.random.default_rng(seed).uniform(size=(2, 6))
    rows = activation_placement(activation, ranks)
    assert np.sort(rows, axis=1).tolist() == [list(range(6))] * 2
    orders = np.array(list(itertools.permutations(range(6))))
    for row, slots in zip(activation, rows, strict=True):
        worst = row[slots].reshape(ranks, -1).sum(axis=1).max()
        best = row[orders].reshape(len(orders), ranks, -1).sum(axis=2).max(axis=1).min()
        assert best - 1e-9 <= worst <= 1.34 * best  # the bound of greedy scheduling on identical machines


def random_case(seed: int, experts: int = 7, ranks: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 4, experts), random_hosts(rng, experts, ranks, density=0.5)


@given(seed=st.integers(0, 9999))
def test_the_optimum_equals_brute_force_and_greedy_is_feasible(seed: int) -> None:
    tokens, hosts = random_case(seed)
    active = np.flatnonzero(tokens)
    choices = itertools.product(*(np.flatnonzero(hosts[e]) for e in active))
    best = min(max(map(choice.count, range(3))) for choice in choices)
    most_experts = []
    for route in (route_optimal, route_metro):
        rank = route(tokens, hosts)
        assert np.array_equal(rank >= 0, tokens > 0)
        assert hosts[active, rank[active]].all()
        most_experts.append(np.bincount(rank[rank >= 0], minlength=3).max())  # experts of the worst rank
    assert most_experts[0] == best <= most_experts[1] <= max(best + 1, 2 * best)


@given(seed=st.integers(0, 9999), first=st.integers(0, 3))
def test_even_spread_keeps_every_token_and_differs_by_one(seed: int, first: int) -> None:
    tokens, hosts = random_case(seed)
    spread = route_even(tokens, hosts, first)
    assert np.array_equal(spread.sum(axis=1), tokens)
    assert not spread[~hosts].any()
    for expert in range(len(tokens)):
        shares = spread[expert, hosts[expert]]
        assert shares.max() - shares.min() <= 1
        from_first = np.roll(shares, -(first % len(shares)))
        assert (np.diff(from_first) <= 0).all()  # the remainder begins at the first


def test_layers_are_independent() -> None:
    cases = [random_case(seed) for seed in range(5)]
    tokens, hosts = (np.stack(a) for a in zip(*cases, strict=True))
    for route in (route_optimal, route_even):  # METRO's plan is compared layer by layer
        together = route(tokens, hosts)
        for layer, (t, h) in enumerate(cases):
            assert np.array_equal(together[layer], route(t, h))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: eplb_placement([[1.0] * 8], 6, groups=1, nodes=1, ranks=2), "6 slots"),
        (lambda: eplb_placement([[1.0] * 8], 9, groups=1, nodes=1, ranks=2), "9 slots"),
        (lambda: eplb_placement([[float("nan")] * 8], 8, groups=1, nodes=1, ranks=2), "finite"),
        (lambda: activation_placement([[1.0] * 7], 2), "7 experts"),
        (lambda: route_metro([1, 1], [[True], [False]]), "expert 1"),
        (lambda: route_metro([1, 1, 1], [[True], [False]]), "shape"),
        (lambda: route_even([-1], [[True]]), "0 or more"),
    ],
)
def test_bad_input_is_refused(call: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()


@st.composite
def cases(
    draw: st.DrawFn, *, layers: int = 3, experts: int = 24, ranks: int = 9
) -> tuple[np.ndarray, np.ndarray]:
    """Draw tokens int[N, E] and hosts bool[N, E, G]. Every expert has a host."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, layers)), draw(st.integers(1, experts)), draw(st.integers(1, ranks))
    hosts = random_hosts(rng, *shape, density=draw(st.sampled_from([0.0, 0.1, 0.4, 1.0])))
    tokens = rng.integers(0, 4, shape[:2]) * (rng.uniform(size=shape[:2]) < draw(st.sampled_from([0.3, 1.0])))
    return tokens, hosts


@given(case=cases())
def test_tensors_choose_like_the_plan(case: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, hosts = case
    rank = TorchMetro(MetroPlan.from_hosts(hosts)).route(torch.from_numpy(tokens))
    assert np.array_equal(rank.numpy(), route_metro(tokens, hosts))


@given(case=cases())
def test_the_plan_equals_greedy_choice_step_by_step(case: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, hosts = case
    plan = MetroPlan.from_hosts(hosts)
    for layer, rank in enumerate(plan.route(tokens)):
        active = np.flatnonzero(tokens[layer]).tolist()
        turns = sorted(active, key=lambda e: (hosts[layer, e].sum(), e))
        load = np.zeros(hosts.shape[2], np.int64)
        for expert in turns:
            later = turns[turns.index(expert) + 1 :]
            expected = load + np.maximum(plan.shares[layer, later], 0).sum(axis=0)
            choice = min(np.flatnonzero(hosts[layer, expert]), key=lambda g: (expected[g], g))
            assert rank[expert] == choice
            load[choice] += EXPERT_LOAD


@given(case=cases())
def test_algorithm_1_takes_the_experts_by_id_and_counts_only_those_before(
    case: tuple[np.ndarray, np.ndarray],
) -> None:
    tokens, hosts = case
    plan = MetroPlan.as_written(hosts)
    for layer, rank in enumerate(plan.route(tokens)):
        load = [0] * hosts.shape[2]
        for expert in range(hosts.shape[1]):
            if not tokens[layer, expert]:
                assert rank[expert] == -1
                continue
            choice = min(np.flatnonzero(hosts[layer, expert]), key=load.__getitem__)
            load[choice] += 1
            assert rank[expert] == choice
    assert np.array_equal(TorchMetro(plan).route(torch.from_numpy(tokens)).numpy(), plan.route(tokens))


def test_greedy_choice_is_within_three_percent_of_the_optimum_on_average() -> None:
    rng = np.random.default_rng(0)
    hosts = rng.uniform(size=(60, 64, 8)) < 0.12
    hosts[..., 0] |= ~hosts.any(axis=2)
    tokens = (rng.uniform(size=(60, 64)) < 0.5).astype(np.int64)

    def worst(rank: np.ndarray) -> float:
        return float((rank[..., None] == np.arange(8)).sum(axis=1).max(axis=1).mean())

    assert worst(route_metro(tokens, hosts)) <= 1.03 * worst(route_optimal(tokens, hosts))


def test_a_plan_too_large_for_its_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        MetroPlan.from_hosts(np.ones((MAX_PAIRS // 2 + 1, 2), bool))


@pytest.mark.parametrize(("what", "interpreter"), [("interpret", "1"), ("compile", "0")])
def test_the_triton_kernel_chooses_like_the_plan_and_compiles_for_gpus(what: str, interpreter: str) -> None:
    script = ROOT / "tests/support/metro_interpreted.py"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = python(script, what, timeout_s=600, TRITON_INTERPRET=interpreter, PYTHONPATH=path)
    assert not done.returncode, done.stderr
