"""Print the outcome of a check as tables or JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from eldr_serve.preflight.check import Checked
from eldr_serve.preflight.deployment import Deployment, EngineDeployment
from eldr_serve.preflight.engines import Answer
from eldr_serve.preflight.findings import nixl_ports, source
from eldr_serve.preflight.machine import GIB, Gpu
from eldr_serve.preflight.placement import Placed
from eldr_serve.replicas.autoscaling import by_requests_in_flight


def show(checked: Checked, console: Console) -> None:
    """Print a table, then one sentence per finding, errors first."""
    if checked.deployment is not None:
        table = Table("")
        for engines, _, _ in checked.answers:
            table.add_column(engines.role, overflow="fold")
        columns = [_rows(*answer, checked.placed) for answer in checked.answers]
        for name in columns[0]:
            table.add_row(name, *(column[name] for column in columns))
        console.print(table)
        console.print(_ingress(checked.deployment, checked.placed), soft_wrap=True, highlight=False)
    for finding in checked.findings:
        console.print(f"{finding.severity}: {finding.sentence}", soft_wrap=True, highlight=False)
    verdict = "would start" if checked.starts else "would not start"
    console.print(f"{checked.path}: {verdict}", soft_wrap=True, highlight=False)


def as_json(checked: Checked) -> dict[str, Any]:
    """Return the outcome as JSON types; sizes in bytes, times in s."""
    return {
        "deployment": str(checked.path),
        "starts": checked.starts,
        "findings": [{"severity": f.severity, "sentence": f.sentence} for f in checked.findings],
        "engines": [_engine(*answer) for answer in checked.answers],
        "nodes": [
            {"node": node.name, "pool": node.pool.name, "replicas": [list(held) for held in node.held]}
            for node in checked.placed.nodes
        ],
    }


def _engine(engines: EngineDeployment, gpu: Gpu | None, answer: Answer) -> dict[str, Any]:
    options = engines.spec.deployment_config
    return {
        "role": engines.role,
        "model": source(engines),
        "replicas": {
            "min": engines.min_replicas,
            "initial": engines.initial_replicas,
            "max": engines.max_replicas,
        },
        "gpu": gpu.kind if gpu else None,
        "ranks": engines.spec.ranks,
        "weight_bytes": answer.weights,
        "reserve_bytes": answer.reserve,
        "kv_bytes": answer.kv,
        "kv_tokens": answer.kv_tokens,
        "sequences": answer.sequences,
        "max_model_len": answer.max_model_len,
        "kernels": [{"name": name, "hides_choices": hidden} for name, hidden in answer.kernels],
        "nixl_ports": nixl_ports(engines),
        "bundles": engines.bundles,
        "strategy": engines.strategy,
        "autoscaling": options.get("autoscaling_config"),
        "health_check_period_s": options.get("health_check_period_s"),
        "health_check_timeout_s": options.get("health_check_timeout_s"),
        "graceful_shutdown_timeout_s": options.get("graceful_shutdown_timeout_s"),
        "hf_home": engines.spec.environment.get("HF_HOME"),
    }


def _rows(engines: EngineDeployment, gpu: Gpu | None, answer: Answer, placed: Placed) -> dict[str, str]:
    options = engines.spec.deployment_config
    scaling = options.get("autoscaling_config") or {}
    numbers = nixl_ports(engines)
    return {
        "model": source(engines),
        "model cache": engines.spec.environment.get("HF_HOME", "-"),
        "replicas": f"{engines.min_replicas} to {engines.max_replicas}, first {engines.initial_replicas}"
        if engines.scaled
        else str(engines.max_replicas),
        "an engine": f"{engines.spec.ranks} x {gpu.kind}, {gpu.memory_gib:g} GiB"
        if gpu
        else f"{engines.spec.ranks} x CPU",
        "nodes": _nodes(engines.role, placed),
        "weights": _gib(answer.weights),
        "reserve (estimate)": _gib(answer.reserve),
        "KV cache": _gib(max(0, answer.kv)),
        "KV tokens": _tokens(answer),
        "MoE kernel": ", ".join(name for name, _ in answer.kernels) or "-",
        "experts counted": "no"
        if any(hidden for _, hidden in answer.kernels) or not answer.kernels
        else "yes",
        "NIXL ports": f"{numbers[0]}-{numbers[-1]}" if numbers[0] != numbers[-1] else str(numbers[0]),
        "scales by": _scale(scaling) if scaling else "nothing",
        "health check": f"every {options.get('health_check_period_s', 10)} s, "
        f"within {options.get('health_check_timeout_s', 10)} s",
        "time to drain": f"{float(options.get('graceful_shutdown_timeout_s', 0)):g} s",
    }


def _scale(scaling: dict[str, Any]) -> str:
    policy = str(scaling["policy"]["policy_function"])
    target = f"{scaling.get('target_ongoing_requests', 'Serve default')}"
    return f"requests in flight / {target}" if policy.endswith(by_requests_in_flight.__name__) else policy


def _ingress(deployment: Deployment, placed: Placed) -> str:
    name, port, count = deployment.ingress.name, deployment.args.ingress.port, deployment.ingress.count
    own = f", port {port} on each" if port is not None else ""
    proxy = f"; Serve's proxy at port {deployment.proxy[1]}" if deployment.proxy else ""
    return f"{name}: {count} replica{'s' * (count != 1)} on {_nodes(name, placed)}{own}{proxy}"


def _nodes(name: str, placed: Placed) -> str:
    used = Counter(node.pool.name for node in placed.nodes if any(held == name for held, _ in node.held))
    return ", ".join(f"{count} {pool}" for pool, count in used.items()) or "none"


def _tokens(answer: Answer) -> str:
    if not answer.kv_tokens:
        return "-"
    return f"{answer.kv_tokens:,}: {answer.sequences:.1f} sequences of {answer.max_model_len:,}"


def _gib(size: int) -> str:
    return f"{size / GIB:.{1 if size > GIB else 3}f} GiB per rank" if size else "-"
