"""Checks a deployment on a cluster, from the file to the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eldr_serve.check import findings
from eldr_serve.check.deployment import Deployment, EngineDeployment, read_deployment
from eldr_serve.check.engines import Answer, Engine, ask
from eldr_serve.check.findings import Finding
from eldr_serve.check.machine import Gpu, Pool
from eldr_serve.check.placement import Placed, place

Cluster = Callable[[Path, Literal["gpu", "cpu"]], Sequence[Pool]]
_CPU_KV_GIB = 4.0  # vLLM's own where VLLM_CPU_KVCACHE_SPACE is not set


@dataclass(frozen=True)
class Checked:
    """One deployment on one cluster.

    Attributes:
        path: the YAML.
        deployment: what it says; none if it could not be read.
        placed: where replicas went.
        answers: (engines, GPU or none, what vLLM said), a role at a time.
        findings: errors first.
    """

    path: Path
    deployment: Deployment | None
    placed: Placed
    answers: Sequence[tuple[EngineDeployment, Gpu | None, Answer]]
    findings: Sequence[Finding]

    @property
    def starts(self) -> bool:
        """Whether nothing is in the way."""
        return all(finding.severity != "error" for finding in self.findings)


def check(paths: Sequence[Path], cluster: Cluster, model: Path | None = None) -> list[Checked]:
    """Check deployments, each as if it had the cluster to itself; nothing is started.

    Args:
        paths: their YAMLs.
        cluster: the pools of nodes, by the file and by what its engines run on.
        model: see read_deployment.

    Raises:
        ValueError: there is no such cluster.
        OSError: a file cannot be read, or vLLM cannot be asked.
    """
    read: list[_Placed | Finding] = []
    for path in paths:
        try:
            deployment = read_deployment(path, model)
        except ValueError as error:
            read.append(Finding("error", " ".join(str(error).split())))
            continue
        pools = cluster(path, deployment.engines[0].device)
        placed = place(pools, [*(engines.replicas for engines in deployment.engines), deployment.ingress])
        gpus = [_gpu(engines, placed, pools) for engines in deployment.engines]
        read.append(_Placed(deployment, pools, placed, gpus))
    # All engines are asked about at once: the process that asks needs long to start.
    asked = [
        (number, engines, gpu)
        for number, found in enumerate(read)
        if isinstance(found, _Placed)
        for engines, gpu in zip(found.deployment.engines, found.gpus, strict=True)
        if gpu is not None or engines.device == "cpu"
    ]
    said = ask([_engine(engines, gpu) for _, engines, gpu in asked]) if asked else []
    answers = {(number, e.role): answer for (number, e, _), answer in zip(asked, said, strict=True)}
    return [
        Checked(path, None, Placed([], {}, {}), [], [found])
        if isinstance(found, Finding)
        else _checked(
            path, found, [answers.get((number, e.role), Answer()) for e in found.deployment.engines]
        )
        for number, (path, found) in enumerate(zip(paths, read, strict=True))
    ]


@dataclass(frozen=True)
class _Placed:
    deployment: Deployment
    pools: Sequence[Pool]
    placed: Placed
    gpus: Sequence[Gpu | None]


def _checked(path: Path, given: _Placed, answers: Sequence[Answer]) -> Checked:
    deployment, placed = given.deployment, given.placed
    engines = list(zip(deployment.engines, given.gpus, answers, strict=True))
    missing = list(findings.resources(deployment, given.pools))
    found = [
        *missing,
        *(() if missing else findings.placement(deployment, placed)),
        *(
            fault
            for e, gpu, answer in engines
            for fault in findings.memory(e, answer, gpu.kind if gpu else "CPU")
        ),
        *findings.host_memory(deployment, placed, answers),
        *findings.network(deployment, placed),
        *(fault for e in deployment.engines for fault in findings.settings(e)),
    ]
    return Checked(
        path, deployment, placed, engines, sorted(found, key=lambda fault: fault.severity != "error")
    )


def _gpu(engines: EngineDeployment, placed: Placed, pools: Sequence[Pool]) -> Gpu | None:
    """The smallest GPU that its replicas were placed on; of those that found no place, of the cluster."""
    if engines.device == "cpu":
        return None
    used = [node.pool.gpu for node in placed.nodes if any(name == engines.role for name, _ in node.held)]
    kinds = [gpu for gpu in used or [pool.gpu for pool in pools] if gpu is not None]
    return min(kinds, key=lambda gpu: gpu.memory_gib, default=None)


def _engine(engines: EngineDeployment, gpu: Gpu | None) -> Engine:
    memory = gpu.memory_gib if gpu else float(engines.environment.get("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_GIB))
    return Engine(
        engines.model, engines.config.get_engine_config().engine_kwargs, memory, gpu and gpu.capability
    )
