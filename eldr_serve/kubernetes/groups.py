"""Which pods a deployment's replicas run in, and what such a pod asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from eldr_serve.check.deployment import Deployment, EngineDeployment
from eldr_serve.check.machine import ACCELERATOR
from eldr_serve.check.placement import total

_ANYWHERE = {"CPU", "GPU", "memory"}  # of these many nodes have some, so they tell no pods apart


@dataclass(frozen=True)
class Sizes:
    """What replicas take of a machine beside GPUs; not measured on Kubernetes.

    Attributes:
        cpus_per_rank: cores of each process of an engine.
        memory_gib_per_rank: its memory beside the KV cache, GiB.
        ingress_cpus, ingress_gib: of an ingress replica.
        head_cpus, head_gib: of the head, where no replica runs.
        shm_gib: size of /dev/shm of each pod, GiB, beyond the memory of what runs there.
    """

    cpus_per_rank: float
    memory_gib_per_rank: float
    ingress_cpus: float
    ingress_gib: float
    head_cpus: float
    head_gib: float
    shm_gib: float


SIZES = {
    "cpu": Sizes(0.5, 3, ingress_cpus=0.5, ingress_gib=2, head_cpus=0.5, head_gib=3, shm_gib=1),
    "gpu": Sizes(4, 32, ingress_cpus=2, ingress_gib=4, head_cpus=4, head_gib=16, shm_gib=8),
}


@dataclass(frozen=True)
class Group:
    """Pods that are alike.

    Attributes:
        name: of the group.
        least, initial, most: pods.
        cpus: cores that a pod asks for.
        memory_gib: memory of a pod, GiB, /dev/shm included.
        gpus: GPUs of a pod.
        resources: Ray's other resources of a pod, by name.
        answers: whether an ingress replica runs there.
    """

    name: str
    least: int
    initial: int
    most: int
    cpus: float
    memory_gib: float
    gpus: int
    resources: dict[str, int]
    answers: bool


def groups(deployment: Deployment, sizes: Sizes) -> list[Group]:
    """A pod for each replica; one pod for all where no replica asks for more than cores.

    Raises:
        ValueError: replicas could come to the pods of others.
    """
    found = [_ingress(deployment, sizes), *(_engine(engines, sizes) for engines in deployment.engines)]
    if not any(group.gpus or group.resources for group in found):
        found = [_together(found)]
    else:
        for group in found:
            others = {name for other in found if other is not group for name in _own(other)}
            if not _own(group) - others:
                raise ValueError(
                    f"{group.name} replicas name no resource of their own, so that they could come to the "
                    f"pods of others: ask for one more, such as {group.name}: 1, as deployments/ do"
                )
    return [replace(group, memory_gib=group.memory_gib + sizes.shm_gib) for group in found]


def _own(group: Group) -> set[str]:
    return {name for name in group.resources if not name.startswith(ACCELERATOR)}


def _ingress(deployment: Deployment, sizes: Sizes) -> Group:
    asked, count = total(deployment.ingress.bundles), deployment.ingress.count
    cpus = max(asked.get("CPU", 0), sizes.ingress_cpus)
    return Group(
        "ingress", count, count, count, cpus, sizes.ingress_gib, _gpus(asked), _named(asked), answers=True
    )


def _engine(engines: EngineDeployment, sizes: Sizes) -> Group:
    asked = total(engines.bundles)
    kv_gib = (engines.spec.host_kv_gib or 0) if engines.spec.device == "cpu" else 0
    return Group(
        engines.role,
        engines.least,
        engines.initial,
        engines.most,
        max(asked.get("CPU", 0), engines.spec.ranks * sizes.cpus_per_rank),
        engines.spec.ranks * (kv_gib + sizes.memory_gib_per_rank),
        _gpus(asked),
        _named(asked),
        answers=False,
    )


def _together(found: Sequence[Group]) -> Group:
    """One pod, as large as all of them may become."""
    cpus = sum(group.most * group.cpus for group in found)
    memory_gib = sum(group.most * group.memory_gib for group in found)
    return Group("all", 1, 1, 1, cpus, memory_gib, 0, {}, answers=True)


def _gpus(asked: dict[str, float]) -> int:
    return math.ceil(asked.get("GPU", 0))


def _named(asked: dict[str, float]) -> dict[str, int]:
    """Whole amounts, as KubeRay and its autoscaler take no others."""
    return {name: math.ceil(amount) for name, amount in asked.items() if amount and name not in _ANYWHERE}


def accelerators(found: Sequence[Group]) -> Iterator[str]:
    """Kinds of GPU that pods must have, as Ray names them."""
    names = {name for group in found for name in group.resources}
    yield from sorted(name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR))
