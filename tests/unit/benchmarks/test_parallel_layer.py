"""An MoE layer on real gloo processes gives the result of one process for every placement and routing."""

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.lib.ep.parallel_layer import (
    ParallelLayer,
    Products,
    Routing,
    all_replicas,
    one_replica,
    top_k_gate,
    vllm_products,
)
from benchmarks.lib.ep.ranks import on_ranks, read_experts, read_gate
from benchmarks.lib.ep.replica_choice import route_even, route_optimal
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.placement import hosts_of
from examples.demo_model import WEIGHTS
from offline.expert_placement.eplb import activation_placement, eplb_placement

E, TOP_K, LAYER = 64, 4, 2  # the demo model's experts and top-k, and one of its layers
SIZES = ([5, 3, 4, 6], [7, 0, 2, 1], [0, 0, 0, 0], [1, 0, 0, 0])  # tokens by rank; two ranks: the first two
PLACEMENTS = ("eplb", "activation", "replicated")
GATE = top_k_gate(read_gate(WEIGHTS, LAYER).float(), TOP_K)
ROUTINGS = ("even", "metro", "optimal", "home")


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


def torch_products(w13: Tensor, w2: Tensor) -> Products:
    """Compute experts in turn with plain torch, from w13 [S, 2I, H] (gate over up) and w2 [S, H, I]."""

    def products(rows: Tensor, slot: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        for number in np.unique(slot.cpu().numpy()).tolist():
            of_expert = slot == number
            gate, up = (rows[of_expert] @ w13[number].T).chunk(2, -1)
            out[of_expert] = (torch.nn.functional.silu(gate) * up) @ w2[number].T
        return out

    return products


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
        gathered = case.dispatch == "gathered"
        outputs.append((layer.run_gathered(x, case.sizes) if gathered else layer.run_exchanged(x)).numpy())
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_compute_the_result_of_one_process(ranks: int) -> None:
    sizes = [tuple(some[:ranks]) for some in SIZES]
    every = itertools.product(PLACEMENTS, ROUTINGS, sizes, ("gathered", "exchanged"))
    cases = list(itertools.starmap(LayerCase, every))
    results = zip(*on_ranks(ranks, outputs_of_rank, cases), strict=True)
    for seed, (case, parts) in enumerate(zip(cases, results, strict=True)):
        assert [len(part) for part in parts] == list(case.sizes)
        expected = reference_output(hidden_states(sum(case.sizes), seed)).numpy()
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-4, err_msg=str(case))


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
        assert np.array_equal(served, route_even(tokens, hosts))
    elif name == "home":
        local = hosts[experts, home[:, None]]
        assert np.array_equal(ranks[local], np.broadcast_to(home[:, None], ranks.shape)[local])
    else:
        assert ((served > 0).sum(axis=1) == (tokens > 0)).all()


def test_the_serving_kernel_equals_plain_torch() -> None:
    w13, w2 = read_experts(WEIGHTS, LAYER, [3, 9, 9])
    rows, slot = hidden_states(12, 0).bfloat16(), torch.tensor([0, 1, 2, 0] * 3)
    expected = torch_products(w13.float(), w2.float())(rows.float(), slot)
    outputs = vllm_products(w13, w2)(rows, slot).float()
    torch.testing.assert_close(outputs, expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)
    assert vllm_products(w13, w2)(rows[:0], slot[:0]).shape == (0, 160)
