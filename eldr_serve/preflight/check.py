"""Check a deployment on a cluster, from the file to the findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eldr_serve.engine.protocol import EngineRole
from eldr_serve.preflight import findings
from eldr_serve.preflight.deployment import Deployment, EngineDeployment, build_deployment
from eldr_serve.preflight.document import read_document
from eldr_serve.preflight.engines import EngineProbe, ProbeResult, probe_engines
from eldr_serve.preflight.findings import Finding
from eldr_serve.preflight.machine import Gpu, NodePool
from eldr_serve.preflight.placement import ReplicaPlacement, place
from eldr_serve.preflight.step_times import StepTimes, step_times

FindNodePools = Callable[[Path, Literal["gpu", "cpu"]], Sequence[NodePool]]
_NOWHERE = ReplicaPlacement([], {}, {})
_CPU_KV_GIB = 4.0  # vLLM's default


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of checking one deployment on one cluster.

    Attributes:
        path: the deployment YAML.
        deployment: the content of the YAML; None if it could not be read.
        placed: the placement of the replicas.
        results: (engines, their GPU or None, result of their probe) for each role.
        findings: errors first.
        times: expected decode steps, by role of the engines that decode on a GPU.
    """

    path: Path
    deployment: Deployment | None
    placed: ReplicaPlacement
    results: Sequence[tuple[EngineDeployment, Gpu | None, ProbeResult]]
    findings: Sequence[Finding]
    times: Mapping[EngineRole, StepTimes] = field(default_factory=dict)

    @property
    def starts(self) -> bool:
        """Return whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)


def check(
    paths: Sequence[Path], find_node_pools: FindNodePools, model: Path | None = None
) -> list[CheckOutcome]:
    """Check deployments without starting anything, each as if it were alone on the cluster.

    Args:
        paths: deployment YAML files.
        find_node_pools: returns the node pools of the cluster for a file and the hardware of its engines.
        model: see build_deployment.

    Raises:
        UserInputError: the cluster cannot be determined.
        OSError: a file cannot be read, or the probe process failed.
    """
    cases = [_place(path, find_node_pools, model) for path in paths]
    # Probe all engines at once: the probe process is slow to start.
    results = iter(probe_engines([engine for case in cases for engine in case.probed if engine is not None]))
    return [
        _outcome(case, [ProbeResult() if e is None else next(results) for e in case.probed]) for case in cases
    ]


@dataclass(frozen=True)
class _UnprobedDeployment:
    """A deployment before its engines are probed.

    Attributes:
        unreadable: why the file could not be read; empty if it could.
    """

    path: Path
    deployment: Deployment | None = None
    node_pools: Sequence[NodePool] = ()
    placed: ReplicaPlacement = _NOWHERE
    gpus: Sequence[Gpu | None] = ()
    probed: Sequence[EngineProbe | None] = ()
    unreadable: str = ""


def _place(path: Path, find_node_pools: FindNodePools, model: Path | None) -> _UnprobedDeployment:
    try:
        deployment = build_deployment(path, read_document(path), model)
    except ValueError as error:
        return _UnprobedDeployment(path, unreadable=" ".join(str(error).split()))
    node_pools = find_node_pools(path, deployment.engines[0].spec.device)
    placed = place(node_pools, [*(engines.replicas for engines in deployment.engines), deployment.ingress])
    gpus = [_gpu(engines, placed) for engines in deployment.engines]
    probed = [_engine(engines, gpu) for engines, gpu in zip(deployment.engines, gpus, strict=True)]
    return _UnprobedDeployment(path, deployment, node_pools, placed, gpus, probed)


def _outcome(case: _UnprobedDeployment, results: Sequence[ProbeResult]) -> CheckOutcome:
    deployment, placed = case.deployment, case.placed
    if deployment is None:
        return CheckOutcome(case.path, None, placed, [], [Finding("error", case.unreadable)])
    engines = list(zip(deployment.engines, case.gpus, results, strict=True))
    missing = list(findings.resources(deployment, case.node_pools))
    faults = [
        *missing,
        *(() if missing else findings.placement(deployment, placed)),
        *(fault for e, gpu, result in engines for fault in findings.memory(e, gpu, result)),
        *findings.host_memory(deployment, placed, results),
        *findings.agreement(engines),
        *findings.network(deployment, placed),
        *(fault for pool in case.node_pools if pool.here for fault in findings.this_machine(deployment)),
        *findings.keys_file(deployment, case.node_pools),
        *(fault for e in deployment.engines for fault in findings.settings(e)),
        *findings.drain("ingress", deployment.args.ingress_deployment_config),
        *(Finding("warning", sentence) for sentence in deployment.ignored),
    ]
    faults.sort(key=lambda fault: fault.severity != "error")
    times = {e.role: step for e, gpu, _ in engines if (step := step_times(e, gpu)) is not None}
    return CheckOutcome(case.path, deployment, placed, engines, faults, times)


def _gpu(engines: EngineDeployment, placed: ReplicaPlacement) -> Gpu | None:
    """Return the smallest GPU on which replicas were placed; None on CPUs, or if none was placed."""
    if engines.spec.device == "cpu":
        return None
    used = [node.pool.gpu for node in placed.nodes if any(name == engines.role for name, _ in node.replicas)]
    return min((gpu for gpu in used if gpu is not None), key=lambda gpu: gpu.memory_gib, default=None)


def _engine(engines: EngineDeployment, gpu: Gpu | None) -> EngineProbe | None:
    """Return the engine to probe; None if it needs a GPU and none was found."""
    arguments = engines.spec.arguments()
    if gpu is not None:
        return EngineProbe(engines.where, engines.model, arguments, gpu.memory_gib, gpu.capability)
    if engines.spec.device == "gpu":
        return None
    configured = engines.spec.host_kv_gib
    kv_gib = _CPU_KV_GIB if configured is None else configured
    return EngineProbe(engines.where, engines.model, arguments, kv_gib, None)
