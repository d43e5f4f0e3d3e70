"""Small tables, counts, requests and hosts of experts for tests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import SignatureSpec
from eldr_serve.scheduling import PlacementRequest


def unit_table(
    k: int, *, model: str = "m", num_layers: int = 2, num_experts: int = 8, band: float = 0.1
) -> RoutingTable:
    """Return a table whose centroid c points at expert c of layer 0."""
    spec = SignatureSpec(np.ones((num_layers, num_experts), np.float32), np.arange(num_layers))
    centroids = np.eye(k, spec.dim, dtype=np.float32)
    return RoutingTable(model, spec, centroids, np.ones(k, np.int64), [f"domain{c}" for c in range(k)], band)


def counts_for(centroid: int, num_layers: int = 2, num_experts: int = 8) -> np.ndarray:
    """Return uint32[L,E] counts whose signature equals this centroid of unit_table."""
    counts = np.zeros((num_layers, num_experts), np.uint32)
    counts[0, centroid] = 5
    return counts


def request(
    name: str = "r", prompt_tokens: int = 10, max_new_tokens: int = 20, **fields: Any
) -> PlacementRequest:
    return PlacementRequest(name, prompt_tokens, max_new_tokens, **fields)


def save_placements(
    folder: Path,
    positions: Iterable[int],
    *,
    model: str = "m",
    num_layers: int = 2,
    num_experts: int = 8,
    ranks: int = 2,
    redundant: int = 0,
) -> list[ExpertPlacement]:
    """Save an expert placement of each position, as `eldr place --cluster-of` names them, and return them."""
    placements = []
    for position in positions:
        row = np.resize(np.roll(np.arange(num_experts), position), num_experts + redundant)
        rows = np.tile(row, (num_layers, 1))
        placement = ExpertPlacement(rows, ranks, num_experts, model=model, method="by hand")
        placement.save(folder / f"placement.{position}.json")
        placements.append(placement)
    return placements


def random_hosts(rng: np.random.Generator, *shape: int, density: float = 0.4) -> np.ndarray:
    """Draw which ranks hold an expert, bool[..., E, G]. Each expert has a host."""
    hosts = rng.uniform(size=shape) < density
    np.put_along_axis(hosts, rng.integers(shape[-1], size=shape[:-1])[..., None], True, axis=-1)
    return hosts


def fail(error: Exception) -> None:
    """Raise the error that a placer reports."""
    raise error
