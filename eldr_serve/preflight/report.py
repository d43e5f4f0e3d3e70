"""The outcome of a check as tables or JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from eldr_serve.preflight.check import CheckOutcome
from eldr_serve.preflight.deployment import Deployment, EngineDeployment
from eldr_serve.preflight.engines import ProbeResult
from eldr_serve.preflight.machine import GIB, Gpu
from eldr_serve.preflight.node_assignment import NodeAssignment
from eldr_serve.replicas.autoscaling import compute_desired_replicas


def show(outcome: CheckOutcome, console: Console) -> None:
    """Print a table, then one sentence per finding, errors first."""
    if outcome.deployment is not None:
        table = Table("")
        for engines, _, _ in outcome.results:
            table.add_column(engines.role, overflow="fold")
        columns = [_rows(*result, outcome.assignment) for result in outcome.results]
        for name in columns[0]:
            table.add_row(name, *(column[name] for column in columns))
        console.print(table)
        console.print(_ingress(outcome.deployment, outcome.assignment), soft_wrap=True, highlight=False)
    for role, times in outcome.times.items():
        console.print(times.describe(role), soft_wrap=True, highlight=False)
    for finding in outcome.findings:
        console.print(f"{finding.severity}: {finding.sentence}", soft_wrap=True, highlight=False)
    verdict = "would start" if outcome.can_start else "would not start"
    console.print(f"{outcome.path}: {verdict}", soft_wrap=True, highlight=False)


def as_json(outcome: CheckOutcome) -> dict[str, Any]:
    """Return the outcome as JSON types; sizes in bytes, times in s."""
    return {
        "deployment": str(outcome.path),
        "starts": outcome.can_start,
        "findings": [{"severity": f.severity, "sentence": f.sentence} for f in outcome.findings],
        "engines": [_engine(*result) for result in outcome.results],
        "expected_decode_steps": {role: [asdict(s) for s in t.steps] for role, t in outcome.times.items()},
        "nodes": [
            {
                "node": node.name,
                "pool": node.pool.name,
                "replicas": [list(replica) for replica in node.replicas],
            }
            for node in outcome.assignment.nodes
        ],
    }


def _engine(engines: EngineDeployment, gpu: Gpu | None, result: ProbeResult) -> dict[str, Any]:
    options = engines.spec.deployment_config
    return {
        "role": engines.role,
        "model": engines.spec.model_source,
        "replicas": {
            "min": engines.min_replicas,
            "initial": engines.initial_replicas,
            "max": engines.max_replicas,
        },
        "gpu": gpu.kind if gpu else None,
        "ranks": engines.spec.ranks,
        "weight_bytes": result.weights,
        "reserve_bytes": result.reserve,
        "kv_bytes": result.kv,
        "kv_tokens": result.kv_tokens,
        "sequences": result.sequences,
        "max_model_len": result.max_model_len,
        "kernels": [{"name": name, "reveals_experts": reveals} for name, reveals in result.kernels],
        "nixl_ports": engines.nixl_ports,
        "bundles": engines.bundles,
        "strategy": engines.strategy,
        "autoscaling": options.get("autoscaling_config"),
        "health_check_period_s": options.get("health_check_period_s"),
        "health_check_timeout_s": options.get("health_check_timeout_s"),
        "graceful_shutdown_timeout_s": options.get("graceful_shutdown_timeout_s"),
        "hf_home": engines.spec.environment.get("HF_HOME"),
    }


def _rows(
    engines: EngineDeployment, gpu: Gpu | None, result: ProbeResult, assignment: NodeAssignment
) -> dict[str, str]:
    options = engines.spec.deployment_config
    ports = engines.nixl_ports
    return {
        "model": engines.spec.model_source,
        "model cache": engines.spec.environment.get("HF_HOME", "-"),
        "replicas": f"{engines.min_replicas} to {engines.max_replicas}, first {engines.initial_replicas}"
        if engines.is_autoscaled
        else str(engines.max_replicas),
        "an engine": _devices(engines, gpu),
        "nodes": _nodes(engines.role, assignment),
        "weights": _gib(result.weights),
        "reserve (estimate)": _gib(result.reserve),
        "KV cache": _gib(max(0, result.kv)),
        "KV tokens": _tokens(result),
        "MoE kernel": ", ".join(name for name, _ in result.kernels) or "-",
        "experts counted": _counting(result),
        "NIXL ports": f"{ports[0]}-{ports[-1]}" if ports[0] != ports[-1] else str(ports[0]),
        "scales by": _scaling(engines),
        "health check": f"every {options.get('health_check_period_s', 10)} s, "
        f"within {options.get('health_check_timeout_s', 10)} s",
        "time to drain": f"{float(options.get('graceful_shutdown_timeout_s', 0)):g} s",
    }


def _devices(engines: EngineDeployment, gpu: Gpu | None) -> str:
    if gpu is not None:
        return f"{engines.spec.ranks} x {gpu.kind}, {gpu.memory_gib:g} GiB"
    return f"{engines.spec.ranks} x CPU" if engines.spec.device == "cpu" else "-"  # no node has its GPU


def _counting(result: ProbeResult) -> str:
    if not result.weights:  # not probed
        return "-"
    return "yes" if result.kernels and all(reveals for _, reveals in result.kernels) else "no"


def _scaling(engines: EngineDeployment) -> str:
    policy = engines.autoscaling_policy
    if policy is None:
        return "nothing"
    scaling = engines.spec.deployment_config["autoscaling_config"]
    target = f"{scaling.get('target_ongoing_requests', 'Serve default')}"
    return f"requests in flight / {target}" if policy.endswith(compute_desired_replicas.__name__) else policy


def _ingress(deployment: Deployment, assignment: NodeAssignment) -> str:
    name, port, count = deployment.ingress.name, deployment.args.ingress.port, deployment.ingress.count
    own = f", port {port} on each" if port is not None else ""
    proxy = f"; Serve's proxy at port {deployment.proxy[1]}" if deployment.proxy else ""
    return f"{name}: {count} replica{'s' * (count != 1)} on {_nodes(name, assignment)}{own}{proxy}"


def _nodes(name: str, assignment: NodeAssignment) -> str:
    nodes_by_pool = Counter(
        node.pool.name for node in assignment.nodes if any(owner == name for owner, _ in node.replicas)
    )
    return ", ".join(f"{count} {pool}" for pool, count in nodes_by_pool.items()) or "none"


def _tokens(result: ProbeResult) -> str:
    if not result.kv_tokens:
        return "-"
    return f"{result.kv_tokens:,}: {result.sequences:.1f} sequences of {result.max_model_len:,}"


def _gib(size: int) -> str:
    return f"{size / GIB:.{1 if size > GIB else 3}f} GiB per rank" if size else "-"
