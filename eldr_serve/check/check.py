"""Checks a deployment on a cluster, from the file to the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eldr_serve.check import findings
from eldr_serve.check.deployment import Deployment, EngineDeployment, build_deployment
from eldr_serve.check.document import read_document
from eldr_serve.check.engines import Answer, Engine, ask
from eldr_serve.check.findings import Finding
from eldr_serve.check.machine import Gpu, Pool
from eldr_serve.check.placement import Placed, place

Cluster = Callable[[Path, Literal["gpu", "cpu"]], Sequence[Pool]]
_NOWHERE = Placed([], {}, {})
_CPU_KV_GIB = 4.0  # the engine's own where nobody says


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
    """Check deployments, each as if it had the cluster to itself. Nothing is started.

    Args:
        paths: deployment YAML files.
        cluster: returns the pools of nodes for a file and the hardware that its engines run on.
        model: see build_deployment.

    Raises:
        ValueError: there is no such cluster.
        OSError: a file cannot be read, or vLLM cannot be asked.
    """
    cases = [_place(path, cluster, model) for path in paths]
    # All engines are asked about at once: the process that asks needs long to start.
    answers = iter(ask([engine for case in cases for engine in case.asked if engine is not None]))
    return [_checked(case, [Answer() if e is None else next(answers) for e in case.asked]) for case in cases]


@dataclass(frozen=True)
class _Case:
    """A deployment before vLLM is asked; of one that could not be read, why."""

    path: Path
    deployment: Deployment | None = None
    pools: Sequence[Pool] = ()
    placed: Placed = _NOWHERE
    gpus: Sequence[Gpu | None] = ()
    asked: Sequence[Engine | None] = ()
    unreadable: str = ""


def _place(path: Path, cluster: Cluster, model: Path | None) -> _Case:
    try:
        deployment = build_deployment(path, read_document(path), model)
    except ValueError as error:
        return _Case(path, unreadable=" ".join(str(error).split()))
    pools = cluster(path, deployment.engines[0].spec.device)
    placed = place(pools, [*(engines.replicas for engines in deployment.engines), deployment.ingress])
    gpus = [_gpu(engines, placed) for engines in deployment.engines]
    asked = [_engine(engines, gpu) for engines, gpu in zip(deployment.engines, gpus, strict=True)]
    return _Case(path, deployment, pools, placed, gpus, asked)


def _checked(case: _Case, answers: Sequence[Answer]) -> Checked:
    deployment, placed = case.deployment, case.placed
    if deployment is None:
        return Checked(case.path, None, placed, [], [Finding("error", case.unreadable)])
    engines = list(zip(deployment.engines, case.gpus, answers, strict=True))
    missing = list(findings.resources(deployment, case.pools))
    found = [
        *missing,
        *(() if missing else findings.placement(deployment, placed)),
        *(fault for e, gpu, answer in engines for fault in findings.memory(e, gpu, answer)),
        *findings.host_memory(deployment, placed, answers),
        *findings.agreement(engines),
        *findings.network(deployment, placed),
        *(fault for pool in case.pools if pool.here for fault in findings.this_machine(deployment)),
        *findings.keys_file(deployment, case.pools),
        *(fault for e in deployment.engines for fault in findings.settings(e)),
        *findings.drain("ingress", deployment.args.ingress_deployment_config),
        *(Finding("warning", sentence) for sentence in deployment.ignored),
    ]
    found.sort(key=lambda fault: fault.severity != "error")
    return Checked(case.path, deployment, placed, engines, found)


def _gpu(engines: EngineDeployment, placed: Placed) -> Gpu | None:
    """The smallest GPU that its replicas were placed on; none on a CPU, or if they found no place."""
    if engines.spec.device == "cpu":
        return None
    used = [node.pool.gpu for node in placed.nodes if any(name == engines.role for name, _ in node.held)]
    return min((gpu for gpu in used if gpu is not None), key=lambda gpu: gpu.memory_gib, default=None)


def _engine(engines: EngineDeployment, gpu: Gpu | None) -> Engine | None:
    """What vLLM is asked; nothing of engines without a place."""
    arguments = engines.spec.arguments()
    if gpu is not None:
        return Engine(engines.where, engines.model, arguments, gpu.memory_gib, gpu.capability)
    if engines.spec.device == "gpu":
        return None
    said = engines.spec.host_kv_gib
    kv_gib = _CPU_KV_GIB if said is None else said
    return Engine(engines.where, engines.model, arguments, kv_gib, None)
