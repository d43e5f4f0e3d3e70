"""The cluster on which a deployment is checked: kinds of GPU, and nodes with their resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from eldr_serve.errors import UserInputError
from eldr_serve.validation import unknown_name

GIB = 2**30
ACCELERATOR = "accelerator_type:"  # Ray's resource for a kind of GPU
_MAX_WORKERS = 2  # Ray's default of the global max_workers on AWS, Azure and GCP


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        kind: Ray's name of the GPU, an `accelerator_type`.
        memory_gib: total memory that PyTorch reports, GiB, rounded down.
        capability: CUDA compute capability.
    """

    kind: str
    memory_gib: float
    capability: tuple[int, int]


GPUS = {
    gpu.kind: gpu
    for gpu in (
        Gpu("H100", 79.1, (9, 0)),
        Gpu("H200", 139.8, (9, 0)),
        Gpu("B200", 178.3, (10, 0)),
        Gpu("A100-80G", 79.1, (8, 0)),
        Gpu("L40S", 44.3, (8, 9)),
    )
}


@dataclass(frozen=True)
class NodePool:
    """A group of identical nodes.

    Attributes:
        name: name of the node type.
        nodes: maximum number of nodes.
        resources: Ray resources of one node, by name.
        gpu: kind of the GPUs; None on nodes without GPUs.
        memory_gib: memory of a node without GPUs, GiB; 0 if unknown.
        is_this_machine: whether the node is this machine, so that its ports and files can be checked.
        max_workers: maximum number of nodes in all pools with this attribute together; None for nodes that
            do not count, such as the head, or if there is no maximum.
    """

    name: str
    nodes: int
    resources: Mapping[str, float]
    gpu: Gpu | None = None
    memory_gib: float = 0.0
    is_this_machine: bool = False
    max_workers: int | None = None


def gpu_of(kind: str, memory_gib: float | None = None) -> Gpu:
    """Return a kind of GPU, with this size of memory if given.

    Raises:
        UserInputError: the kind is unknown.
    """
    if kind not in GPUS:
        raise UserInputError(unknown_name("", kind, GPUS, "kind of GPU"))
    return replace(GPUS[kind], memory_gib=memory_gib) if memory_gib else GPUS[kind]


def read_cluster(path: Path) -> list[NodePool]:
    """Return the node pools in a file for `ray up`; the head is a pool of one node.

    The global `max_workers` bounds the nodes of all worker pools together, and is the default of each.

    Raises:
        UserInputError: the file has another format, or a node type lacks the resources (which Ray detects on
            some clouds) or the kind of its GPUs.
        OSError: the file cannot be read.
    """
    try:
        document = yaml.safe_load(path.read_text())
        types: dict[str, Any] = document["available_node_types"]
        head = document["head_node_type"]
        max_workers = int(document.get("max_workers", _MAX_WORKERS))
        for name, kind in types.items():
            if kind.get("resources") is None:
                raise UserInputError(
                    f"{path}: node type {name} has no resources: list CPU, and on nodes with GPUs also GPU "
                    f"and {ACCELERATOR}KIND"
                )
        pools = [
            NodePool(
                name,
                1 if name == head else min(max_workers, int(kind.get("max_workers", max_workers))),
                dict(kind["resources"]),
                max_workers=None if name == head else max_workers,
            )
            for name, kind in types.items()
        ]
    except UserInputError:
        raise
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserInputError(f"{path} is not a cluster file with node types: {error!r}") from error
    return [replace(pool, gpu=_gpu(path, pool.name, pool.resources)) for pool in pools]


def _gpu(path: Path, name: str, resources: Mapping[str, float]) -> Gpu | None:
    if not resources.get("GPU"):
        return None
    kinds = [key.removeprefix(ACCELERATOR) for key in resources if key.startswith(ACCELERATOR)]
    if not kinds:
        raise UserInputError(f"{path}: node type {name} has GPUs but no resource {ACCELERATOR}KIND: add it")
    if len(kinds) > 1:
        raise UserInputError(
            f"{path}: node type {name} has GPUs of the kinds {', '.join(kinds)}: keep one {ACCELERATOR}KIND"
        )
    return gpu_of(kinds[0])


def set_gpu(node_pools: list[NodePool], gpu: Gpu) -> list[NodePool]:
    """Return the node pools with another kind of GPU in the nodes that have GPUs."""
    return [
        replace(pool, gpu=gpu, resources=_replace_accelerator(pool.resources, gpu)) if pool.gpu else pool
        for pool in node_pools
    ]


def _replace_accelerator(resources: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    others = {name: amount for name, amount in resources.items() if not name.startswith(ACCELERATOR)}
    return others | {f"{ACCELERATOR}{gpu.kind}": 1}


def identical_nodes(
    gpu: Gpu | None,
    *,
    nodes: int,
    cpus_per_node: float,
    memory_gib: float,
    gpus_per_node: int = 0,
    resources: Mapping[str, float] | None = None,
) -> list[NodePool]:
    """Return one pool of identical nodes, as the command's options describe them."""
    amounts: dict[str, float] = {"CPU": cpus_per_node, **(resources or {})}
    if gpu is not None:
        amounts |= {"GPU": gpus_per_node, f"{ACCELERATOR}{gpu.kind}": 1}
    return [NodePool("nodes", nodes, amounts, gpu, memory_gib)]
