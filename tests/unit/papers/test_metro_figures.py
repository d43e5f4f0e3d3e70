"""METRO's figures at small size: results that hold on every machine."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.papers.figures import metro, metro_kernel
from benchmarks.papers.figures.common import Options
from eldr_serve.experts.parallel.metro import MetroPlan
from offline.expert_placement.cost import LayerWork
from tests.support.traces import favourites_trace

E, TOP_K, N = 32, 2, 40


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    favourites_trace([""], each=N, num_layers=2, num_experts=E, steps=5, others=0.3).save(path)
    return Options((path,), requests=10, seeds=(0, 1))


def test_the_example_equals_the_papers() -> None:
    for row in metro.figure_4(Options()):
        assert row["most_activated_of_a_rank"] == row["paper_most_activated"]
        assert row["most_tokens_of_a_rank"] == 2


def test_every_routing_serves_every_token_on_a_host_of_its_expert(options: Options) -> None:
    half = metro.HalvedTrace.read(options.traces[0], 0)
    # Held-out requests have no influence on the placement.
    assert sorted([*half.fit, *half.test]) == list(range(N))
    plan = half.plan(1.5)
    tokens = half.batches(16, 5, 0)
    assert (tokens.sum(axis=2) == 16 * TOP_K).all()
    for routing in ("even", "greedy", "metro", "optimum"):
        served = metro.tokens_on_ranks(routing, plan, tokens)
        assert np.array_equal(served.sum(axis=-1), tokens)
        assert not served[:, plan.shares < 0].any()
        assert routing == "even" or ((served > 0).sum(axis=-1) <= 1).all()


def test_metro_lies_between_the_optimum_and_eplb(options: Options) -> None:
    rows = metro.figure_8(options)
    for row in rows:
        assert row["optimum"] <= row["metro"] <= row["even"]
        assert row["optimum"] <= row["greedy"] <= row["even"]
        assert row["metro_above_optimum_pct"] <= 10.9
    assert max(row["metro_below_even_pct"] for row in rows) > 20
    for a, b in pairwise(metro.figure_5(options)):
        if a["batch_a_rank"] == b["batch_a_rank"]:
            assert b["most_activated"] > a["most_activated"]
            assert b["tpot_pct"] > a["tpot_pct"]


def test_intensity_is_the_tokens_of_an_active_expert(options: Options) -> None:
    rows = metro.figure_3(options)
    assert [row["batch_size"] for row in rows[:6]] == [1, 4, 16, 64, 256, 1024]
    assert rows[0]["flop_per_byte"] == 1  # one token reads each of its experts for itself
    for fewer, more in pairwise(rows[:6]):
        assert fewer["flop_per_byte"] <= more["flop_per_byte"] <= 4 * fewer["flop_per_byte"]
    assert rows[0]["below_h100"] == pytest.approx(295, rel=0.01)


def test_a_layers_cost_follows_the_models_bytes_and_flops(options: Options) -> None:
    cost = metro.layer_cost(metro.HalvedTrace.read(options.traces[0], 0).trace)
    all_of_a_layer = LayerWork(*(np.array([float(x)]) for x in (E, TOP_K, 0, 0)))
    weights = 3 * 2048 * 768
    expected = 2 * weights * 128 / metro.BYTES_PER_S + 2 * weights * 8 / metro.FLOP_PER_S
    assert cost.rank_s(all_of_a_layer)[0] == pytest.approx(expected)


def test_threads_with_a_common_candidate_choose_in_turn() -> None:
    hosts = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], bool)
    assert metro_kernel.lock_turns(hosts, np.array([0, 2])) == 1
    assert metro_kernel.lock_turns(hosts, np.array([0, 2, 1, 3])) == 2
    assert metro_kernel.lock_turns(hosts, np.array([0, 1, 2, 3])) == 4
    assert metro_kernel.lock_turns(hosts, np.array([], int)) == 0


def test_a_decision_takes_no_more_turns_than_experts(options: Options) -> None:
    for row in metro_kernel.kernel(options):
        assert row["active_experts"] / metro.RANKS <= row["lock_turns"] <= row["active_experts"]
        assert 1 <= row["rounds"] <= row["active_experts"] + 1


def test_the_plan_of_one_layer_is_the_plan_of_its_hosts() -> None:
    rng = np.random.default_rng(0)
    hosts = rng.random((4, 12, 5)) < np.array([0.2, 0.3, 0.6, 0.0])[:, None, None]
    hosts[..., 0] |= ~hosts.any(axis=2)  # the last layer has no replicas
    plan = MetroPlan.from_hosts(hosts)
    for layer in range(4):
        sliced, alone = metro_kernel.plan_of_layer(plan, layer), MetroPlan.from_hosts(hosts[layer])
        assert np.array_equal(sliced.shares, alone.shares)
        assert np.array_equal(sliced.order, alone.order)
