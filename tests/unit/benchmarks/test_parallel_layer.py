"""An MoE layer on real gloo processes gives the result of one process for every placement and routing."""

import itertools
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.lib.ep.network import Network, RankTraffic
from benchmarks.lib.ep.parallel_layer import (
    ParallelLayer,
    Products,
    Routing,
    all_replicas,
    first_of_each_node,
    one_replica,
    slots_of,
    top_k_gate,
    vllm_products,
)
from benchmarks.lib.ep.ranks import read_experts, read_gate, run_on_ranks
from benchmarks.lib.ep.replica_choice import route_even, route_optimal
from benchmarks.lib.ep.timing import LayerArm, RankJob
from eldr_serve.experts.expert_placement import Topology, hosts_of
from eldr_serve.experts.parallel.metro import MetroPlan
from examples.demo_model import WEIGHTS
from offline.expert_placement.evaluate import forwarded_copies, work_of
from offline.expert_placement.packed_placements import activation_placement, eplb_placement
from tests.support.torch_experts import torch_products

E, TOP_K, LAYER = 64, 4, 2  # the demo model's experts and top-k, and one of its layers
SIZES = ([5, 3, 4, 6], [7, 0, 2, 1], [0, 0, 0, 0], [1, 0, 0, 0])  # tokens by rank; two ranks: the first two
PLACEMENTS = ("eplb", "activation", "replicated")
GATE = top_k_gate(read_gate(WEIGHTS, LAYER).float(), TOP_K)
ROUTINGS = ("even", "metro", "optimal", "home")
NODES = {"exchanged": 1, "once a node": 2}  # nodes between which a dispatch forwards


def placement(name: str, ranks: int) -> np.ndarray:
    load = np.random.default_rng(0).exponential(size=(1, E))
    if name == "activation":
        return activation_placement(load, ranks)[0]
    slots = E if name == "eplb" else 3 * E // 2
    return eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks)[0]


def routing(name: str, hosts: np.ndarray) -> Routing:
    if name == "even":
        return all_replicas(hosts)
    if name == "home":  # the own rank if it holds the expert, else the first rank that does
        ranks = np.arange(hosts.shape[1])
        nearest = np.where(hosts.T, ranks[:, None], hosts.argmax(axis=1))  # [home, expert]
        return lambda experts, home: nearest[home[:, None], experts]
    choose = {
        "metro": MetroPlan.from_hosts(hosts).route,
        "optimal": lambda tokens: route_optimal(tokens, hosts),
    }
    return one_replica(choose[name], len(hosts))


def hidden_states(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, 160, generator=torch.Generator().manual_seed(seed))


def reference_output(x: Tensor) -> Tensor:
    """Compute the layer by its definition: each token through each of its experts."""
    weights, experts = GATE(x)
    w13, w2 = (w.float() for w in read_experts(WEIGHTS, LAYER, range(E)))
    out = torch.zeros_like(x)
    for token, choice in itertools.product(range(len(x)), range(TOP_K)):
        expert = int(experts[token, choice])
        gate, up = (w13[expert] @ x[token]).chunk(2)
        out[token] += weights[token, choice] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


class LayerCase(NamedTuple):
    placement: str
    routing: str
    sizes: tuple[int, ...]
    dispatch: str


@cache
def products(slots: tuple[int, ...]) -> Products:
    w13, w2 = read_experts(WEIGHTS, LAYER, slots)
    return torch_products(w13.float(), w2.float())


def outputs_of_rank(rank: int, cases: list[LayerCase]) -> list[np.ndarray]:
    """Return this rank's outputs of each case."""
    outputs = []
    for seed, case in enumerate(cases):
        ranks = len(case.sizes)
        rows = placement(case.placement, ranks)
        layer = ParallelLayer(
            GATE,
            products(tuple(rows.reshape(ranks, -1)[rank].tolist())),
            rows,
            num_experts=E,
            route=routing(case.routing, hosts_of(rows[None], E, ranks)[0]),
        )
        x = hidden_states(sum(case.sizes), seed).split(case.sizes)[rank]
        if case.dispatch == "gathered":
            outputs.append(layer.run_gathered(x, case.sizes).numpy())
        else:
            outputs.append(layer.run_exchanged(x, nodes=NODES[case.dispatch]).numpy())
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.benchmarks)])
def test_ranks_together_compute_the_result_of_one_process(ranks: int) -> None:
    sizes = [tuple(some[:ranks]) for some in SIZES]
    every = itertools.product(PLACEMENTS, ROUTINGS, sizes, ("gathered", *NODES))
    cases = list(itertools.starmap(LayerCase, every))
    results = zip(*run_on_ranks(ranks, outputs_of_rank, cases), strict=True)
    for seed, (case, parts) in enumerate(zip(cases, results, strict=True)):
        assert [len(part) for part in parts] == list(case.sizes)
        expected = reference_output(hidden_states(sum(case.sizes), seed)).numpy()
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-4, err_msg=str(case))


def traffic_of_rank(rank: int, nodes: int) -> np.ndarray:
    """Return this rank's traffic between two nodes of two ranks, with 8 tokens on each rank."""
    rows, traffic = placement("replicated", 4), RankTraffic(rank, 4, Network(2))
    layer = ParallelLayer(
        GATE,
        products(tuple(rows.reshape(4, -1)[rank].tolist())),
        rows,
        num_experts=E,
        route=routing("even", hosts_of(rows[None], E, 4)[0]),
        on_exchange=traffic.add,
    )
    layer.run_exchanged(hidden_states(32, 0).split(8)[rank], nodes=nodes)
    return traffic.counts


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES.values())
def test_a_dispatch_sends_the_copies_that_placements_are_evaluated_by(nodes: int) -> None:
    topology = Topology(ranks=4, nodes=2)
    experts = GATE(hidden_states(32, 0))[1].numpy()
    route = routing("even", hosts_of(placement("replicated", 4)[None], E, 4)[0])
    parts = [route(part, np.full(8, home)) for home, part in enumerate(np.split(experts, 4))]
    ranks = np.concatenate(parts)[None, :, None]
    if nodes == 2:
        near, far = 32 * np.array(forwarded_copies(ranks, topology))
    else:
        work = work_of(experts[None, :, None], ranks, topology, num_experts=E)
        near, far = work.near_bytes.sum(), work.far_bytes.sum()
    near_messages, near_bytes, far_messages, far_bytes = np.sum(
        run_on_ranks(4, traffic_of_rank, nodes), axis=0
    )
    token_bytes = 2 * 160 * 4 + TOP_K * (4 + 8)  # the state there and back; weights and pairs there
    assert near_bytes == pytest.approx(near * token_bytes + 8 * 4 * nodes)  # each rank's counts
    assert far_bytes == pytest.approx(far * token_bytes + 8 * 8)
    assert 0 < far_messages <= 3 * 8  # counts, tokens and results, from each rank to two others
    assert 0 < near_messages <= 3 * 4 * nodes


@pytest.mark.parametrize(
    ("row", "word"), [([0, 1, 2], "cannot be divided"), ([0, 1, 2, -1], "empty"), ([[0], [1]], "shape")]
)
def test_slots_that_no_layer_can_use_are_refused(row: list[Any], word: str) -> None:
    assert slots_of([1, 0, 2, 1], 3, ranks=2).tolist() == [[1, 0, -1], [-1, 1, 0]]
    with pytest.raises(ValueError, match=word):
        slots_of(row, 3, ranks=2)


@given(seed=st.integers(0, 9999), nodes=st.sampled_from([1, 2, 4]), size=st.integers(1, 3))
def test_a_node_has_one_entry_among_the_ranks_that_serve_the_token(seed: int, nodes: int, size: int) -> None:
    is_serving = np.random.default_rng(seed).random((5, nodes * size)) < 0.4
    for home in range(nodes * size):
        entries = first_of_each_node(is_serving, nodes, home).reshape(5, nodes, size)
        for chosen, node_ranks in zip(entries, is_serving.reshape(5, nodes, size), strict=True):
            for of_node, serving in zip(chosen, node_ranks, strict=True):
                order = [(home + step) % size for step in range(size)]
                expected = next(([place] for place in order if serving[place]), [])
                assert np.flatnonzero(of_node).tolist() == expected


def test_messages_between_nodes_wait_for_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("benchmarks.lib.ep.network.time.sleep", waits.append)
    traffic = RankTraffic(1, 4, Network(2, delay_s=1.0, bytes_per_s=10.0))
    traffic.add(np.array([5, 7, 0, 0]), np.array([0, 7, 0, 0]))
    traffic.add(np.array([0, 7, 10, 20]), np.array([9, 9, 30, 40]))
    traffic.add(np.array([0, 0, 0, 40]), np.array([0, 0, 0, 0]))
    assert waits == [8.0, 5.0]
    assert traffic.counts.tolist() == [1, 5, 3, 70]


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_routing_uses_hosts_and_gives_the_counts_of_its_rule(name: str) -> None:
    rng = np.random.default_rng(1)
    rows = placement("replicated", 4)
    hosts = hosts_of(rows[None], E, 4)[0]
    experts = np.stack([rng.permutation(E)[:TOP_K] for _ in range(40)])
    home = rng.integers(4, size=40)
    ranks = routing(name, hosts)(experts, home)
    assert hosts[experts, ranks].all()
    tokens = np.bincount(experts.reshape(-1), minlength=E)
    served = np.zeros((E, 4), int)
    np.add.at(served, (experts, ranks), 1)
    if name == "even":
        assert np.array_equal(served, route_even(tokens, hosts, int(home.min())))
    elif name == "home":
        local = hosts[experts, home[:, None]]
        assert np.array_equal(ranks[local], np.broadcast_to(home[:, None], ranks.shape)[local])
    else:
        assert ((served > 0).sum(axis=1) == (tokens > 0)).all()


def test_ranks_that_choose_for_their_own_tokens_spread_the_remainders() -> None:
    arm = LayerArm(2.0, "even", "all-to-all")
    rows = np.array([[0, 1, 0, 1]])  # both experts on both ranks; there is no placement without replicas
    routes = np.zeros((1, 1, 2, 1), np.int64)  # one token of expert 0 on each rank
    job = RankJob(WEIGHTS, 2, 2, {2.0: rows}, routes, (arm,), rounds=1, seed=0)
    assert job.tokens_by_rank(arm).tolist() == [[[[1, 1], [0, 0]]]]
    gathered = job.tokens_by_rank(arm._replace(dispatch="all-gather"))
    assert gathered.tolist() == [[[[1, 1], [0, 0]]]]
    route = all_replicas(np.ones((3, 4), bool))
    assert [route(np.array([[0, 2]]), np.array([home])).tolist() for home in range(4)] == [
        [[home] * 2] for home in range(4)
    ]
    assert route(np.empty((0, 2), int), np.empty(0, int)).shape == (0, 2)  # a rank without tokens


def test_the_serving_kernel_equals_plain_torch() -> None:
    w13, w2 = read_experts(WEIGHTS, LAYER, [3, 9, 9])
    rows, slot = hidden_states(12, 0).bfloat16(), torch.tensor([0, 1, 2, 0] * 3)
    expected = torch_products(w13.float(), w2.float())(rows.float(), slot)
    outputs = vllm_products(w13, w2)(rows, slot).float()
    torch.testing.assert_close(outputs, expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)
    assert vllm_products(w13, w2)(rows[:0], slot[:0]).shape == (0, 160)
