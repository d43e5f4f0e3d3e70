"""Check a deployment on a cluster, from the file to the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eldr_serve.preflight import findings
from eldr_serve.preflight.deployment import Deployment, EngineDeployment, build_deployment
from eldr_serve.preflight.document import read_document
from eldr_serve.preflight.engines import Answer, Engine, ask
from eldr_serve.preflight.findings import Finding
from eldr_serve.preflight.machine import Gpu, Pool
from eldr_serve.preflight.placement import Placed, place

Cluster = Callable[[Path, Literal["gpu", "cpu"]], Sequence[Pool]]
_NOWHERE = Placed([], {}, {})
_CPU_KV_GIB = 4.0  # vLLM's default


@dataclass(frozen=True)
class Checked:
    """The outcome of checking one deployment on one cluster.

    Attributes:
        path: the deployment YAML.
        deployment: the content of the YAML; None if it could not be read.
        placed: the placement of the replicas.
        answers: (engines, their GPU or None, vLLM's answer) for each role.
        findings: errors first.
    """

    path: Path
    deployment: Deployment | None
    placed: Placed
    answers: Sequence[tuple[EngineDeployment, Gpu | None, Answer]]
    findings: Sequence[Finding]

    @property
    def starts(self) -> bool:
        """Return whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)


def check(paths: Sequence[Path], cluster: Cluster, model: Path | None = None) -> list[Checked]:
    """Check deployments without starting anything, each as if it were alone on the cluster.

    Args:
        paths: deployment YAML files.
        cluster: function that returns the pools of nodes for a file and the hardware of its engines.
        model: see build_deployment.

    Raises:
        ValueError: the cluster cannot be determined.
        OSError: a file cannot be read, or the probe process failed.
    """
    cases = [_place(path, cluster, model) for path in paths]
    # Probe all engines at once: the probe process is slow to start.
    answers = iter(ask([engine for case in cases for engine in case.probed if engine is not None]))
    return [_checked(case, [Answer() if e is None else next(answers) for e in case.probed]) for case in cases]


@dataclass(frozen=True)
class _Case:
    """A deployment before its engines are probed.

    Attributes:
        unreadable: why the file could not be read; empty if it could.
    """

    path: Path
    deployment: Deployment | None = None
    pools: Sequence[Pool] = ()
    placed: Placed = _NOWHERE
    gpus: Sequence[Gpu | None] = ()
    probed: Sequence[Engine | None] = ()
    unreadable: str = ""


def _place(path: Path, cluster: Cluster, model: Path | None) -> _Case:
    try:
        deployment = build_deployment(path, read_document(path), model)
    except ValueError as error:
        return _Case(path, unreadable=" ".join(str(error).split()))
    pools = cluster(path, deployment.engines[0].spec.device)
    placed = place(pools, [*(engines.replicas for engines in deployment.engines), deployment.ingress])
    gpus = [_gpu(engines, placed) for engines in deployment.engines]
    probed = [_engine(engines, gpu) for engines, gpu in zip(deployment.engines, gpus, strict=True)]
    return _Case(path, deployment, pools, placed, gpus, probed)


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
    """Return the smallest GPU on which replicas were placed; None on CPUs, or if none was placed."""
    if engines.spec.device == "cpu":
        return None
    used = [node.pool.gpu for node in placed.nodes if any(name == engines.role for name, _ in node.held)]
    return min((gpu for gpu in used if gpu is not None), key=lambda gpu: gpu.memory_gib, default=None)


def _engine(engines: EngineDeployment, gpu: Gpu | None) -> Engine | None:
    """Return the engine to probe; None if it needs a GPU and none was found."""
    arguments = engines.spec.arguments()
    if gpu is not None:
        return Engine(engines.where, engines.model, arguments, gpu.memory_gib, gpu.capability)
    if engines.spec.device == "gpu":
        return None
    configured = engines.spec.host_kv_gib
    kv_gib = _CPU_KV_GIB if configured is None else configured
    return Engine(engines.where, engines.model, arguments, kv_gib, None)
