"""Placement of replicas on nodes, against all possible placements."""

from collections import Counter
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.preflight.machine import NodePool
from eldr_serve.preflight.node_assignment import ReplicaDemand, assign_nodes
from eldr_serve.preflight.rules import check_assignment

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")
sizes = st.integers(1, 3)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodePool]:
    """Draw two pools of nodes with GPUs, one of them with an extra resource, and the maximum of all nodes."""
    most = draw(st.none() | st.integers(0, 3))
    return [
        NodePool("a", draw(st.integers(0, 2)), {"GPU": draw(st.integers(1, 4))}, max_workers=most),
        NodePool(
            "b",
            draw(st.integers(0, 2)),
            {"GPU": draw(st.integers(1, 4)), "extra": draw(st.integers(0, 4))},
            max_workers=most,
        ),
    ]


@st.composite
def replicas(draw: st.DrawFn, name: str = "x") -> ReplicaDemand:
    bundle = {"GPU": draw(sizes)} | ({"extra": 1} if draw(st.booleans()) else {})
    return ReplicaDemand(
        name, draw(st.integers(1, 4)), [bundle] * draw(sizes), draw(st.sampled_from(STRATEGIES))
    )


def max_placeable(pools: list[NodePool], demand: ReplicaDemand) -> int:
    """Return how many replicas can be placed, by trying every node for every bundle."""
    nodes = tuple(
        (*(int(pool.resources.get(name, 0)) for name in ("GPU", "extra")), 0)  # last: whether it is used
        for pool in pools
        for _ in range(pool.nodes)
    )
    most = pools[0].max_workers
    most_used = len(nodes) if most is None else most
    asks = [tuple(int(bundle.get(name, 0)) for name in ("GPU", "extra")) for bundle in demand.bundles]

    @cache
    def most_placed(free: tuple[tuple[int, ...], ...], replicas_left: int) -> int:
        best = 0
        for chosen in product(range(len(free)), repeat=len(asks)) if replicas_left else ():
            distinct = len(set(chosen))
            if demand.strategy == "STRICT_PACK" and distinct > 1:
                continue
            if demand.strategy == "STRICT_SPREAD" and distinct < len(asks):
                continue
            after = [list(node) for node in free]
            for node, ask in zip(chosen, asks, strict=True):
                after[node] = [*(has - amount for has, amount in zip(after[node], ask, strict=False)), 1]
            if all(has >= 0 for node in after for has in node) and sum(n[2] for n in after) <= most_used:
                best = max(best, 1 + most_placed(tuple(sorted(map(tuple, after))), replicas_left - 1))
        return best

    return most_placed(tuple(sorted(nodes)), demand.count)


@settings(max_examples=300)
@given(clusters(), replicas(), replicas("y"))
def test_no_node_exceeds_its_resources_and_every_replica_is_listed(
    pools: list[NodePool], one: ReplicaDemand, other: ReplicaDemand
) -> None:
    placement = assign_nodes(pools, [one, other])
    assert all(amount >= 0 for node in placement.nodes for amount in node.free.values())
    most = pools[0].max_workers
    assert most is None or sum(bool(node.replicas) for node in placement.nodes) <= most
    for demand in (one, other):
        listed = {number for node in placement.nodes for name, number in node.replicas if name == demand.name}
        assert len(listed) + placement.missing.get(demand.name, 0) == demand.count
        nodes = Counter(
            number for node in placement.nodes for name, number in node.replicas if name == demand.name
        )
        assert sum(count > 1 for count in nodes.values()) == placement.spread.get(demand.name, 0)
        if demand.strategy == "STRICT_PACK":
            assert set(nodes.values()) <= {1}
        if demand.strategy == "STRICT_SPREAD":
            assert set(nodes.values()) <= {len(demand.bundles)}


@settings(max_examples=300)
@given(clusters(), replicas())
def test_placed_replicas_never_exceed_the_optimum_and_one_is_placed_if_possible(
    pools: list[NodePool], demand: ReplicaDemand
) -> None:
    num_placed = demand.count - assign_nodes(pools, [demand]).missing.get(demand.name, 0)
    optimum = max_placeable(pools, demand)
    assert num_placed <= optimum
    assert (num_placed > 0) == (optimum > 0)


@settings(max_examples=200)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_equal_engines_fill_equal_nodes(nodes: int, per_node: int, ranks: int, count: int) -> None:
    """Place engines that stay on one node, as in the shipped topologies."""
    pools = [NodePool("a", nodes, {"GPU": per_node * ranks, "decode": per_node * ranks})]
    demand = ReplicaDemand("decode", count, [{"GPU": 1, "decode": 1}] * ranks, "STRICT_PACK")
    assert assign_nodes(pools, [demand]).missing.get("decode", 0) == max(0, count - nodes * per_node)


@pytest.mark.parametrize(("strategy", "nodes", "missing"), [("PACK", 2, 0), ("STRICT_PACK", 0, 1)])
def test_an_engine_of_two_gpus_does_not_fit_nodes_of_one(strategy: str, nodes: int, missing: int) -> None:
    placement = assign_nodes(
        [NodePool("a", 3, {"GPU": 1})], [ReplicaDemand("x", 1, [{"GPU": 1}] * 2, strategy)]
    )
    assert sum(bool(node.replicas) for node in placement.nodes) == nodes
    assert (placement.missing.get("x", 0), placement.spread.get("x", 0)) == (missing, int(nodes == 2))


def test_fractions_of_a_resource_are_counted_exactly() -> None:
    demand = ReplicaDemand("x", 11, [{"CPU": 0.1}])
    assert assign_nodes([NodePool("a", 1, {"CPU": 1})], [demand]).missing == {"x": 1}


def test_worker_nodes_of_all_pools_are_bounded_together() -> None:
    """The head does not count, and replicas still get nodes that have started."""
    pools = [
        NodePool("head", 1, {"ingress": 1}),
        NodePool("a", 4, {"GPU": 1}, max_workers=4),
        NodePool("b", 4, {"GPU": 1, "extra": 1}, max_workers=4),
    ]
    demands = [
        ReplicaDemand("ingress", 1, [{"ingress": 1}]),
        ReplicaDemand("extra", 3, [{"extra": 1}]),
        ReplicaDemand("one", 5, [{"GPU": 1}]),
        ReplicaDemand("two", 1, [{"GPU": 2}]),
    ]
    placement = assign_nodes(pools, demands)
    used = [node.name for node in placement.nodes if node.replicas]
    assert used == ["head-0", "a-0", "b-0", "b-1", "b-2"]
    assert placement.missing == {"one": 1, "two": 1}
    assert (placement.num_workers, placement.max_workers) == (4, 4)


def test_replicas_that_spread_share_a_node_if_no_other_may_start() -> None:
    pools = [NodePool("a", 2, {"GPU": 2}, max_workers=1)]
    placement = assign_nodes(pools, [ReplicaDemand("x", 1, [{"GPU": 1}] * 2, "SPREAD")])
    assert (placement.missing, placement.spread) == ({}, {})


def test_an_error_names_the_maximum_of_worker_nodes() -> None:
    deployment: Any = SimpleNamespace(engines=[], ingress=ReplicaDemand("ingress", 3, [{"CPU": 1}]))

    def sentence(max_workers: int | None) -> str:
        pools = [NodePool("a", 2, {"CPU": 1}, max_workers=max_workers)]
        (finding,) = check_assignment(deployment, assign_nodes(pools, [deployment.ingress]))
        return finding.sentence

    assert sentence(None) == "1 of 3 ingress replicas find no node: each needs 1 CPU"
    assert sentence(1) == (
        "2 of 3 ingress replicas find no node: each needs 1 CPU; the cluster file's max_workers is 1, "
        "of which 1 are in use: raise it if they are too few"
    )
