"""The expert placements of a deployment's decode engines, one for each position of a decode worker."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from eldr_serve.artifact_metadata import ArtifactError, require
from eldr_serve.engine.experts_change import ExpertPlacementOfPosition, ExpertsChange
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.routing_table import RoutingTable

_FILE = re.compile(r".+\.(\d+)\.json")


def load_placements(folder: Path) -> tuple[bytes, ...]:
    """Return the bodies of a folder's placements, by position.

    The folder has a file `NAME.POSITION.json` and its sidecar for each position, as `eldr place --cluster-of`
    writes them.

    Raises:
        ArtifactError: a file is invalid, or positions are missing or have two placements.
    """
    require(folder.is_dir(), f"{folder} is not a folder of expert placements")
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(path.name):
            position = int(match[1])
            require(position not in paths, f"{folder} has two placements of position {position}")
            paths[position] = path
    require(bool(paths), f"{folder} has no expert placement NAME.0.json: eldr place --cluster-of makes them")
    missing = set(range(max(paths))).difference(paths)
    require(not missing, f"{folder} has no expert placement of position {min(missing, default=0)}")
    return tuple(ExpertsChange.encode(ExpertPlacement.load(paths[position])) for position in sorted(paths))


def parse_placements(bodies: Sequence[bytes]) -> list[ExpertPlacement]:
    """Return the placements of these bodies; raise BadRequestError if one is invalid."""
    return [ExpertsChange.parse(body)[1] for body in bodies]


def check_placements(placements: Sequence[ExpertPlacement], table: RoutingTable) -> None:
    """Raise ArtifactError unless each cluster has a placement that fits the table and the others."""
    require(
        len(placements) == len(table.centroids),
        f"there are {len(placements)} expert placements, but the table has {len(table.centroids)} clusters",
    )
    table_shape = (table.model, table.num_layers, table.num_experts)
    for position, placement in enumerate(placements):
        layers, slots = placement.physical_to_logical.shape
        placement_shape = (placement.model, layers, placement.num_experts)
        if placement_shape != table_shape:
            raise ArtifactError(
                f"the expert placement of position {position} is for {_describe(*placement_shape)}, but the "
                f"table is for {_describe(*table_shape)}"
            )
        first = placements[0]
        require(
            (placement.ranks, slots) == (first.ranks, first.physical_to_logical.shape[1]),
            f"the expert placement of position {position} has {slots} slots on {placement.ranks} ranks, but "
            f"position 0 has {first.physical_to_logical.shape[1]} slots on {first.ranks} ranks",
        )


def _describe(model: str, layers: int, experts: int) -> str:
    return f"{model} with {layers} x {experts} experts"


def expert_placement_of(
    bodies: Sequence[bytes], workers: Sequence[str | None], worker: str, digest: str
) -> ExpertPlacementOfPosition | None:
    """Return the placement of a worker's position; None without placements or without a position.

    Position i has placement i modulo the number of placements, as with the centroids of a table.

    Args:
        bodies: bodies of the placements, by position.
        workers: the worker in each position.
        worker: name of the worker.
        digest: digest of the worker's last placement.
    """
    if not bodies or worker not in workers:
        return None
    position = workers.index(worker)
    body = bodies[position % len(bodies)]
    new_digest = hashlib.sha256(body).hexdigest()
    return ExpertPlacementOfPosition(position, new_digest, None if new_digest == digest else body)
