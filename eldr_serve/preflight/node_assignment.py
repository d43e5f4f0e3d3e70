"""Assignment of replicas to nodes as Ray would make it, by their placement groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eldr_serve.preflight.machine import NodePool

Bundle = Mapping[str, float]
_PART = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class ReplicaDemand:
    """The replicas of one deployment.

    Attributes:
        name: name of the deployment.
        count: maximum number of replicas.
        bundles: resources of each replica; its actor runs in the first bundle.
        strategy: strategy of Ray's placement groups: PACK, STRICT_PACK, SPREAD or STRICT_SPREAD.
    """

    name: str
    count: int
    bundles: Sequence[Bundle]
    strategy: str = "PACK"


@dataclass
class Node:
    """A node with its free resources (in ten-thousandths) and its replicas."""

    name: str
    pool: NodePool
    free: dict[str, int]
    replicas: list[tuple[str, int]] = field(default_factory=list)  # deployment, number of the replica

    @property
    def must_start(self) -> bool:
        """Return whether Ray would start the node for its first replica, and count it in max_workers."""
        return self.pool.max_workers is not None and not self.replicas

    def fits(self, bundle: Bundle) -> bool:
        """Return whether the bundle's resources are free."""
        return all(
            self.free.get(name, 0) >= round(_PART * amount) for name, amount in bundle.items() if amount
        )

    def take(self, bundle: Bundle) -> None:
        """Allocate the bundle's resources."""
        for name, amount in bundle.items():
            if amount:
                self.free[name] -= round(_PART * amount)

    def give(self, bundle: Bundle) -> None:
        """Free the bundle's resources."""
        for name, amount in bundle.items():
            if amount:
                self.free[name] += round(_PART * amount)


@dataclass(frozen=True)
class NodeAssignment:
    """The nodes of all replicas.

    Attributes:
        nodes: all nodes after the assignment.
        missing: number of replicas without a node, by deployment.
        spread: number of replicas on several nodes, by deployment.
        max_workers: maximum number of worker nodes; None if there is none.
    """

    nodes: Sequence[Node]
    missing: Mapping[str, int]
    spread: Mapping[str, int]
    max_workers: int | None = None

    @property
    def num_workers(self) -> int:
        """Return the number of worker nodes with replicas, if there is a maximum."""
        return _count_workers(self.nodes)


def assign_nodes(node_pools: Sequence[NodePool], demands: Sequence[ReplicaDemand]) -> NodeAssignment:
    """Assign nodes to all replicas, one after the other; each goes where the least resources remain.

    As in Ray, replicas get nodes in the given order and never move. A worker node starts when a replica needs
    it, until there are `max_workers` of them.
    """
    nodes = [
        Node(
            f"{pool.name}-{number}",
            pool,
            {name: round(_PART * amount) for name, amount in pool.resources.items()},
        )
        for pool in node_pools
        for number in range(pool.nodes)
    ]
    max_workers = min((pool.max_workers for pool in node_pools if pool.max_workers is not None), default=None)
    missing: Counter[str] = Counter()
    spread: Counter[str] = Counter()
    for demand in demands:
        for number in range(demand.count):
            num_startable = len(nodes) if max_workers is None else max_workers - _count_workers(nodes)
            chosen = _choose_nodes(nodes, demand, num_startable)
            if chosen is None:
                missing[demand.name] += 1
                continue
            for node, bundle in zip(chosen, demand.bundles, strict=True):
                node.take(bundle)
            for node in {node.name: node for node in chosen}.values():
                node.replicas.append((demand.name, number))
            spread[demand.name] += len({node.name for node in chosen}) > 1
    return NodeAssignment(nodes, +missing, +spread, max_workers)


def total_resources(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Return the sum of the bundles' resources."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _count_workers(nodes: Sequence[Node]) -> int:
    return sum(node.pool.max_workers is not None and not node.must_start for node in nodes)


def _choose_nodes(nodes: Sequence[Node], demand: ReplicaDemand, num_startable: int) -> list[Node] | None:
    """Return a node for each bundle; None if they do not fit.

    Args:
        num_startable: number of further worker nodes that Ray may start.
    """
    order = sorted((node for node in nodes if num_startable or not node.must_start), key=_free_room)
    if demand.strategy in ("PACK", "STRICT_PACK"):
        one_node = next((node for node in order if node.fits(total_resources(demand.bundles))), None)
        if one_node is not None or demand.strategy == "STRICT_PACK":
            return [one_node] * len(demand.bundles) if one_node is not None else None
    else:
        strict = demand.strategy == "STRICT_SPREAD"
        chosen = _choose_one_by_one(order, demand.bundles, num_startable, distinct=strict, prefer_used=False)
        if chosen is not None or strict:
            return chosen  # otherwise bundles of SPREAD may share nodes
    return _choose_one_by_one(order[::-1], demand.bundles, num_startable, distinct=False, prefer_used=True)


def _choose_one_by_one(
    order: Sequence[Node],
    bundles: Sequence[Bundle],
    num_startable: int,
    *,
    distinct: bool,
    prefer_used: bool,
) -> list[Node] | None:
    """Choose the first node that fits for each bundle in turn; return None if a bundle fits on none.

    Args:
        num_startable: number of further worker nodes that Ray may start.
        distinct: whether every bundle needs a different node.
        prefer_used: whether to prefer the nodes already chosen to the others.
    """
    chosen: list[Node] = []
    try:
        for bundle in bundles:
            fitting = [
                node
                for node in order
                if node.fits(bundle)
                and (not distinct if node in chosen else num_startable or not node.must_start)
            ]
            if not fitting:
                return None
            node = next((n for n in fitting if (n in chosen) == prefer_used), fitting[0])
            num_startable -= node.must_start and node not in chosen
            node.take(bundle)
            chosen.append(node)
        return chosen
    finally:
        for node, bundle in zip(chosen, bundles, strict=False):
            node.give(bundle)


def _free_room(node: Node) -> tuple[int, int]:
    """Return the free GPUs and CPUs of a node, which a replica there would waste."""
    return node.free.get("GPU", 0), node.free.get("CPU", 0)
