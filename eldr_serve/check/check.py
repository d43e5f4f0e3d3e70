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


def check(
    path: Path, cluster: Callable[[Literal["gpu", "cpu"]], Sequence[Pool]], model: Path | None = None
) -> Checked:
    """Check one deployment; nothing is started.

    Args:
        path: its YAML.
        cluster: the pools of nodes, by what the engines run on.
        model: see read_deployment.

    Raises:
        OSError: a file cannot be read.
        RuntimeError: vLLM could not be asked.
    """
    try:
        deployment = read_deployment(path, model)
    except ValueError as error:
        return Checked(path, None, Placed([], {}, {}), [], [Finding("error", " ".join(str(error).split()))])
    pools = cluster(deployment.engines[0].device)
    placed = place(pools, [*(engines.replicas for engines in deployment.engines), deployment.ingress])
    answers = _answers(deployment, placed, pools)
    missing = list(findings.resources(deployment, pools))
    found = [
        *missing,
        *(() if missing else findings.placement(deployment, placed)),
        *(
            fault
            for engines, gpu, answer in answers
            for fault in findings.memory(engines, answer, gpu.kind if gpu else "CPU")
        ),
        *findings.host_memory(deployment, placed, [answer for _, _, answer in answers]),
        *findings.network(deployment, placed),
        *(fault for engines in deployment.engines for fault in findings.settings(engines)),
    ]
    return Checked(
        path, deployment, placed, answers, sorted(found, key=lambda fault: fault.severity != "error")
    )


def _answers(
    deployment: Deployment, placed: Placed, pools: Sequence[Pool]
) -> list[tuple[EngineDeployment, Gpu | None, Answer]]:
    asked = [(engines, _gpu(engines, placed, pools)) for engines in deployment.engines]
    engines = {e.role: _engine(e, gpu) for e, gpu in asked if gpu is not None or e.device == "cpu"}
    found = dict(zip(engines, ask(list(engines.values())), strict=True)) if engines else {}
    return [(e, gpu, found.get(e.role, Answer())) for e, gpu in asked]


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
