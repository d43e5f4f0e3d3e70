"""The check of a deployment on a cluster, from its file to the findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eldr_serve.engine.protocol import EngineRole
from eldr_serve.preflight import rules
from eldr_serve.preflight.deployment import Deployment, EngineDeployment, build_deployment
from eldr_serve.preflight.document import read_document
from eldr_serve.preflight.engines import EngineProbe, ProbeResult, probe_engines
from eldr_serve.preflight.machine import Gpu, NodePool
from eldr_serve.preflight.node_assignment import NodeAssignment, assign_nodes
from eldr_serve.preflight.rules import Finding
from eldr_serve.preflight.step_times import StepTimes, step_times

FindNodePools = Callable[[Path, Literal["gpu", "cpu"]], Sequence[NodePool]]
_NOWHERE = NodeAssignment([], {}, {})
_CPU_KV_GIB = 4.0  # vLLM's default


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of checking one deployment on one cluster.

    Attributes:
        path: the deployment YAML.
        deployment: the content of the YAML; None if it could not be read.
        assignment: the nodes of the replicas.
        results: (engines, their GPU or None, result of their probe) for each role.
        findings: errors first.
        times: expected decode steps, by role of the engines that decode on a GPU.
    """

    path: Path
    deployment: Deployment | None
    assignment: NodeAssignment
    results: Sequence[tuple[EngineDeployment, Gpu | None, ProbeResult]]
    findings: Sequence[Finding]
    times: Mapping[EngineRole, StepTimes] = field(default_factory=dict)

    @property
    def can_start(self) -> bool:
        """Return whether there is no error; there may be warnings."""
        return all(finding.severity != "error" for finding in self.findings)


def check_deployments(
    paths: Sequence[Path], find_node_pools: FindNodePools, model: Path | None = None
) -> list[CheckOutcome]:
    """Check deployments without starting anything, each as if it were alone on the cluster.

    Args:
        paths: deployment YAML files.
        find_node_pools: returns the node pools of the cluster for a file and the hardware of its engines:
            "gpu" if any of them needs a GPU.
        model: see build_deployment.

    Raises:
        UserInputError: the cluster cannot be determined.
        OSError: a file cannot be read, or the probe process failed.
    """
    plans = [_plan(path, find_node_pools, model) for path in paths]
    # Probe all engines at once: the probe process is slow to start.
    probes = [probe for plan in plans for probe in plan.probes if probe is not None]
    results = iter(probe_engines(probes))
    return [
        _check_plan(plan, [ProbeResult() if probe is None else next(results) for probe in plan.probes])
        for plan in plans
    ]


@dataclass(frozen=True)
class _DeploymentPlan:
    """A deployment with the nodes of its replicas, before its engines are probed.

    Attributes:
        path: the deployment YAML.
        deployment: the content of the YAML; None if it could not be read.
        node_pools: the nodes of the cluster.
        assignment: the nodes of the replicas.
        gpus: for each role, the GPU of its engines; None on CPUs, or if no replica was placed.
        probes: for each role, the engine to probe; None if it needs a GPU and none was found.
        unreadable: the reason why the file could not be read; empty if it could.
    """

    path: Path
    deployment: Deployment | None = None
    node_pools: Sequence[NodePool] = ()
    assignment: NodeAssignment = _NOWHERE
    gpus: Sequence[Gpu | None] = ()
    probes: Sequence[EngineProbe | None] = ()
    unreadable: str = ""


def _plan(path: Path, find_node_pools: FindNodePools, model: Path | None) -> _DeploymentPlan:
    try:
        deployment = build_deployment(path, read_document(path), model)
    except ValueError as error:
        return _DeploymentPlan(path, unreadable=" ".join(str(error).split()))
    needs_gpus = any(engines.spec.device == "gpu" for engines in deployment.engines)
    node_pools = find_node_pools(path, "gpu" if needs_gpus else "cpu")
    assignment = assign_nodes(
        node_pools, [*(engines.replicas for engines in deployment.engines), deployment.ingress]
    )
    gpus = [_smallest_gpu(engines, assignment) for engines in deployment.engines]
    probes = [_engine_probe(engines, gpu) for engines, gpu in zip(deployment.engines, gpus, strict=True)]
    return _DeploymentPlan(path, deployment, node_pools, assignment, gpus, probes)


def _check_plan(plan: _DeploymentPlan, results: Sequence[ProbeResult]) -> CheckOutcome:
    deployment, assignment = plan.deployment, plan.assignment
    if deployment is None:
        return CheckOutcome(plan.path, None, assignment, [], [Finding("error", plan.unreadable)])
    probed_engines = list(zip(deployment.engines, plan.gpus, results, strict=True))
    missing_resources = list(rules.check_resources(deployment, plan.node_pools))
    findings = [
        *missing_resources,
        *(() if missing_resources else rules.check_assignment(deployment, assignment)),
        *(finding for engines in deployment.engines for finding in rules.check_gpus(engines)),
        *(finding for probed in probed_engines for finding in rules.check_memory(*probed)),
        *rules.check_host_memory(deployment, assignment, results),
        *rules.check_agreement(probed_engines),
        *rules.check_network(deployment, assignment),
        *(
            finding
            for pool in plan.node_pools
            if pool.is_this_machine
            for finding in rules.check_this_machine(deployment)
        ),
        *rules.check_keys_file(deployment, plan.node_pools),
        *rules.check_expert_placements(deployment, results),
        *rules.check_slots(deployment),
        *(finding for engines in deployment.engines for finding in rules.check_settings(engines)),
        *rules.check_drain("ingress", deployment.args.ingress_deployment_config),
        *(Finding("warning", sentence) for sentence in deployment.ignored),
    ]
    findings.sort(key=lambda finding: finding.severity != "error")
    times_by_role = {engines.role: step_times(engines, gpu) for engines, gpu, _ in probed_engines}
    times = {role: times for role, times in times_by_role.items() if times is not None}
    return CheckOutcome(plan.path, deployment, assignment, probed_engines, findings, times)


def _smallest_gpu(engines: EngineDeployment, assignment: NodeAssignment) -> Gpu | None:
    """Return the smallest GPU on which replicas were placed; None on CPUs, or if none was placed."""
    if engines.spec.device == "cpu":
        return None
    gpus = [
        node.pool.gpu for node in assignment.nodes if any(name == engines.role for name, _ in node.replicas)
    ]
    return min((gpu for gpu in gpus if gpu is not None), key=lambda gpu: gpu.memory_gib, default=None)


def _engine_probe(engines: EngineDeployment, gpu: Gpu | None) -> EngineProbe | None:
    """Return the engine to probe; None if it needs a GPU and none was found."""
    arguments = engines.spec.arguments()
    if gpu is not None:
        return EngineProbe(
            engines.arguments_name, engines.model_config, arguments, gpu.memory_gib, gpu.capability
        )
    if engines.spec.device == "gpu":
        return None
    kv_gib = _CPU_KV_GIB if engines.spec.host_kv_gib is None else engines.spec.host_kv_gib
    return EngineProbe(engines.arguments_name, engines.model_config, arguments, kv_gib, None)
