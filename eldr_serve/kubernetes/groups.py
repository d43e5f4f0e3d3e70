"""Group a deployment's replicas into pods, and compute the pods' resources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from eldr_serve.preflight.deployment import Deployment, EngineDeployment
from eldr_serve.preflight.machine import ACCELERATOR
from eldr_serve.preflight.placement import total

_COMMON = {"CPU", "GPU", "memory"}  # resources of many nodes, which do not identify a group of pods


@dataclass(frozen=True)
class Sizes:
    """Cores and host memory of replicas; not measured on Kubernetes.

    Attributes:
        cpus_per_rank: cores per process of an engine.
        memory_gib_per_rank: memory per process beside the KV cache, GiB.
        ingress_cpus, ingress_gib: cores and memory (GiB) of an ingress replica.
        head_cpus, head_gib: cores and memory (GiB) of the head, which runs no replica.
        shm_gib: size of /dev/shm of each pod, GiB, in addition to its processes' memory.
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
    """A group of identical pods.

    Attributes:
        name: name of the group.
        least, initial, most: minimum, initial and maximum number of pods.
        cpus: cores of a pod.
        memory_gib: memory of a pod, GiB, including /dev/shm.
        gpus: GPUs of a pod.
        resources: other Ray resources of a pod, by name.
        answers: whether the pods have an ingress replica.
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
    """Return one pod per replica, or one pod for all replicas if they need only cores.

    Raises:
        ValueError: Ray could place replicas in the pods of another group.
    """
    found = [_ingress(deployment, sizes), *(_engine(engines, sizes) for engines in deployment.engines)]
    if not any(group.gpus or group.resources for group in found):
        found = [_together(found)]
    else:
        for group in found:
            others = {name for other in found if other is not group for name in _own(other)}
            if not _own(group) - others:
                raise ValueError(
                    f"{group.name} replicas name no resource of their own, so Ray could place them in other "
                    f"pods: add one, such as {group.name}: 1, as the files in deployments/ do"
                )
    return [replace(group, memory_gib=group.memory_gib + sizes.shm_gib) for group in found]


def _own(group: Group) -> set[str]:
    return {name for name in group.resources if not name.startswith(ACCELERATOR)}


def _ingress(deployment: Deployment, sizes: Sizes) -> Group:
    requested, count = total(deployment.ingress.bundles), deployment.ingress.count
    cpus = max(requested.get("CPU", 0), sizes.ingress_cpus)
    return Group(
        "ingress",
        count,
        count,
        count,
        cpus,
        sizes.ingress_gib,
        _gpus(requested),
        _named(requested),
        answers=True,
    )


def _engine(engines: EngineDeployment, sizes: Sizes) -> Group:
    requested = total(engines.bundles)
    kv_gib = (engines.spec.host_kv_gib or 0) if engines.spec.device == "cpu" else 0
    return Group(
        engines.role,
        engines.least,
        engines.initial,
        engines.most,
        max(requested.get("CPU", 0), engines.spec.ranks * sizes.cpus_per_rank),
        engines.spec.ranks * (kv_gib + sizes.memory_gib_per_rank),
        _gpus(requested),
        _named(requested),
        answers=False,
    )


def _together(found: Sequence[Group]) -> Group:
    """Return one pod that is large enough for all groups at their maximum."""
    cpus = sum(group.most * group.cpus for group in found)
    memory_gib = sum(group.most * group.memory_gib for group in found)
    return Group("all", 1, 1, 1, cpus, memory_gib, 0, {}, answers=True)


def _gpus(requested: dict[str, float]) -> int:
    return math.ceil(requested.get("GPU", 0))


def _named(requested: dict[str, float]) -> dict[str, int]:
    """Return the other resources, rounded up: KubeRay and its autoscaler accept only whole amounts."""
    return {name: math.ceil(amount) for name, amount in requested.items() if amount and name not in _COMMON}


def accelerators(found: Sequence[Group]) -> Iterator[str]:
    """Yield the kinds of GPU that pods need, by Ray's names."""
    names = {name for group in found for name in group.resources}
    yield from sorted(name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR))
