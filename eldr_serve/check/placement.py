"""How Ray would place replicas on nodes: bundles of resources, strategy by strategy, pool by pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eldr_serve.check.machine import Pool

Bundle = Mapping[str, float]
_PART = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class Replicas:
    """Replicas that are alike.

    Attributes:
        name: of their deployment.
        count: how many there may be.
        bundles: what each asks for; the first holds its actor.
        strategy: PACK, STRICT_PACK, SPREAD or STRICT_SPREAD, as of Ray's placement groups.
    """

    name: str
    count: int
    bundles: Sequence[Bundle]
    strategy: str = "PACK"


@dataclass
class Node:
    """A node, what is left of its resources (in ten-thousandths), and who is on it."""

    name: str
    pool: Pool
    free: dict[str, int]
    held: list[tuple[str, int]] = field(default_factory=list)  # deployment, number of the replica

    def fits(self, bundle: Bundle) -> bool:
        """Whether the bundle's resources are left."""
        return all(
            self.free.get(name, 0) >= round(_PART * amount) for name, amount in bundle.items() if amount
        )

    def take(self, bundle: Bundle) -> None:
        """Give the bundle its resources."""
        for name, amount in bundle.items():
            if amount:
                self.free[name] -= round(_PART * amount)

    def give(self, bundle: Bundle) -> None:
        """Take them back."""
        for name, amount in bundle.items():
            if amount:
                self.free[name] += round(_PART * amount)


@dataclass(frozen=True)
class Placed:
    """Where replicas went.

    Attributes:
        nodes: all, as they were left.
        missing: deployment -> how many of its replicas found no place.
        spread: deployment -> how many of its replicas are on several nodes.
    """

    nodes: Sequence[Node]
    missing: Mapping[str, int]
    spread: Mapping[str, int]


def place(pools: Sequence[Pool], wanted: Sequence[Replicas]) -> Placed:
    """Place all replicas, one after the other, each where least is left over.

    Ray places in the order in which replicas are asked for and moves none later, nor does this.
    """
    nodes = [
        Node(
            f"{pool.name}-{number}",
            pool,
            {name: round(_PART * amount) for name, amount in pool.resources.items()},
        )
        for pool in pools
        for number in range(pool.nodes)
    ]
    missing: Counter[str] = Counter()
    spread: Counter[str] = Counter()
    for replicas in wanted:
        for number in range(replicas.count):
            chosen = _choose(nodes, replicas)
            if chosen is None:
                missing[replicas.name] += 1
                continue
            for node, bundle in zip(chosen, replicas.bundles, strict=True):
                node.take(bundle)
            for node in {node.name: node for node in chosen}.values():
                node.held.append((replicas.name, number))
            spread[replicas.name] += len({node.name for node in chosen}) > 1
    return Placed(nodes, +missing, +spread)


def total(bundles: Sequence[Bundle]) -> dict[str, float]:
    """What bundles ask for together."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _choose(nodes: Sequence[Node], replicas: Replicas) -> list[Node] | None:
    """A node for each bundle, or none if it cannot be."""
    order = sorted(nodes, key=_room)
    if replicas.strategy in ("PACK", "STRICT_PACK"):
        whole = total(replicas.bundles)
        together = next((node for node in order if node.fits(whole)), None)
        if together is not None or replicas.strategy == "STRICT_PACK":
            return [together] * len(replicas.bundles) if together is not None else None
        return _one_by_one(order[::-1], replicas.bundles, apart=False, prefer_used=True)
    strict = replicas.strategy == "STRICT_SPREAD"
    return _one_by_one(order, replicas.bundles, apart=strict, prefer_used=False)


def _one_by_one(
    order: Sequence[Node], bundles: Sequence[Bundle], *, apart: bool, prefer_used: bool
) -> list[Node] | None:
    chosen: list[Node] = []
    try:
        for bundle in bundles:
            fitting = [node for node in order if node.fits(bundle) and not (apart and node in chosen)]
            if not fitting:
                return None
            node = next((n for n in fitting if (n in chosen) == prefer_used), fitting[0])
            node.take(bundle)
            chosen.append(node)
        return chosen
    finally:
        for node, bundle in zip(chosen, bundles, strict=False):
            node.give(bundle)


def _room(node: Node) -> tuple[int, int]:
    """What placing there would waste: GPUs left first, then CPUs."""
    return node.free.get("GPU", 0), node.free.get("CPU", 0)
