"""What is wrong with a deployment on a cluster, one sentence a fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from eldr_serve.check import ports
from eldr_serve.check.deployment import Deployment, EngineDeployment
from eldr_serve.check.engines import Answer
from eldr_serve.check.machine import ACCELERATOR, GIB, Gpu, Pool
from eldr_serve.check.placement import Placed, total
from eldr_serve.engine.chosen import ENGINES
from eldr_serve.serving.keys import KeysError, read_keys

# Ports that others hold on every node of a cluster as `ray start` makes it, and the kernel's own.
_TAKEN = (
    (6379, 6379, "Ray's control store"),
    (8080, 8080, "Ray's metrics"),
    (8265, 8265, "Ray's dashboard"),
    (10001, 19999, "Ray's client and workers"),
    (32768, 60999, "outgoing connections"),
)
_LEAST_DRAIN_S = 60.0


@dataclass(frozen=True)
class Finding:
    """A fault, or what an operator should know.

    Attributes:
        severity: an error keeps the deployment from starting, or from serving as it should.
        sentence: what it is, and what to do.
    """

    severity: Literal["error", "warning"]
    sentence: str


def nixl_ports(engines: EngineDeployment) -> list[int]:
    """NIXL's side channel of each replica that there may be."""
    return engines.spec.ports(engines.most)


def resources(deployment: Deployment, pools: Sequence[Pool]) -> Iterator[Finding]:
    """What is asked for by a name that no node has."""
    offered = {name for pool in pools for name in pool.resources}
    kinds = sorted(name.removeprefix(ACCELERATOR) for name in offered if name.startswith(ACCELERATOR))
    for wanted in (*(engines.replicas for engines in deployment.engines), deployment.ingress):
        for name in sorted({name for bundle in wanted.bundles for name, amount in bundle.items() if amount}):
            if name in offered:
                continue
            if name.startswith(ACCELERATOR):
                yield _error(
                    f"{wanted.name} asks for accelerator_type {name.removeprefix(ACCELERATOR)}, "
                    f"and the nodes have {' and '.join(kinds) or 'no GPU'}"
                )
            elif name == "GPU":
                yield _error(f"{wanted.name} asks for GPUs, and no node has any")
            else:
                yield _error(f"{wanted.name} asks for the resource {name!r}, which no node has")


def placement(deployment: Deployment, placed: Placed) -> Iterator[Finding]:
    """Replicas without a place, and engines that would be cut in two."""
    for wanted in (*(engines.replicas for engines in deployment.engines), deployment.ingress):
        missing = placed.missing.get(wanted.name, 0)
        if missing:
            asked = ", ".join(
                name if name.startswith(ACCELERATOR) else f"{amount:g} {name}"
                for name, amount in total(wanted.bundles).items()
                if amount
            )
            yield _error(
                f"{missing} of {wanted.count} {wanted.name} replicas find no node: each asks for {asked}"
                + (f" by {wanted.strategy}" if len(wanted.bundles) > 1 else "")
            )
        spread = placed.spread.get(wanted.name, 0)
        if spread:
            yield _error(
                f"{spread} of {wanted.count} {wanted.name} replicas would each spread over several nodes, "
                "and their ranks talk in every layer: set placement_group_config's strategy to STRICT_PACK"
            )


def memory(engines: EngineDeployment, gpu: Gpu | None, answer: Answer) -> Iterator[Finding]:
    """An engine that vLLM, or ours, refuses."""
    kind = gpu.kind if gpu else "CPU"
    hidden = [name for name, hides in answer.kernels if hides]
    if hidden:
        yield _error(
            f"{engines.role} on {kind} would run {hidden[0]}, which routes inside and hides its choices, so "
            "that experts cannot be counted: set moe_backend in engine_kwargs to one that does not"
        )
    elif answer.weights and answer.kv <= 0 and gpu is not None:
        yield _error(
            f"{engines.role} does not fit on {kind}: weights {answer.weights / GIB:.1f} GiB and a reserve of "
            f"{answer.reserve / GIB:.1f} GiB exceed gpu_memory_utilization by {-answer.kv / GIB:.1f} GiB"
        )
    elif answer.refusal:
        named = answer.refusal.startswith(engines.where)
        yield _error(answer.refusal if named else f"{engines.role} on {kind} is refused: {answer.refusal}")
    elif answer.weights and not answer.kernels:
        yield _error(f"{source(engines)} has no MoE layer, so there are no experts to count")
    elif answer.weights and not answer.kv_tokens:
        yield _error(
            f"{engines.role}'s KV cache of {answer.kv / GIB:.1f} GiB on {kind} holds no sequence of "
            f"max_model_len {answer.max_model_len}: "
            + (
                "lower it, or raise gpu_memory_utilization"
                if gpu
                else f"raise {engines.spec.host_kv_variable} in {engines.config}.runtime_env.env_vars, "
                "or lower max_model_len"
            )
        )


def agreement(engines: Sequence[tuple[EngineDeployment, Gpu | None, Answer]]) -> Iterator[Finding]:
    """Yield the fields that prefill and decode must share but that vLLM resolves to different values."""
    answers = {deployment.role: answer for deployment, _, answer in engines}
    if "prefill" in answers and not any(answer.refusal for answer in answers.values()):
        for sentence in ENGINES.differences(answers["prefill"].agreed, answers["decode"].agreed):
            yield _error(sentence)


def host_memory(deployment: Deployment, placed: Placed, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Nodes whose CPU engines ask for more memory than there is."""
    needed: dict[str, int] = {
        engines.role: answer.weights + answer.reserve + answer.kv
        for engines, answer in zip(deployment.engines, answers, strict=True)
        if engines.spec.device == "cpu"
    }
    for node in placed.nodes:
        total = sum(needed.get(name, 0) for name, _ in node.held) / GIB
        if node.pool.memory_gib and total > node.pool.memory_gib:
            yield _error(
                f"the engines on node {node.name} need {total:.1f} GiB, "
                f"and it has {node.pool.memory_gib:.1f} GiB"
            )


def network(deployment: Deployment, placed: Placed) -> Iterator[Finding]:
    """Ports that two on one node would listen at."""
    wanted = {engines.role: nixl_ports(engines) for engines in deployment.engines}
    for role, numbers in wanted.items():
        for first, last, holder in _TAKEN:
            if any(first <= number <= last for number in numbers):
                yield _error(
                    f"{role}'s NIXL ports {_span(numbers)} meet those of {holder} ({_span([first, last])}): "
                    "set NIXL_SIDE_CHANNEL_PORT_BASE in experimental_configs"
                )
    for one, other in combinations(wanted, 2):
        together = any({one, other} <= {name for name, _ in node.held} for node in placed.nodes)
        if together and set(wanted[one]) & set(wanted[other]):
            yield _error(
                f"{one}'s NIXL ports {_span(wanted[one])} meet {other}'s {_span(wanted[other])} on one "
                "node: set NIXL_SIDE_CHANNEL_PORT_BASE in experimental_configs"
            )
    for engines in deployment.engines:
        role, numbers = engines.role, wanted[engines.role]
        crowded = any(sum(name == role for name, _ in node.held) > 1 for node in placed.nodes)
        if crowded and len(set(numbers)) < len(numbers):
            yield _error(
                f"{role} replicas on one node would share NIXL's port {numbers[0]}: leave "
                f"{engines.spec.fixed_port} to eldr-serve"
            )
    port = deployment.args.ingress.port
    if port and deployment.proxy and port == deployment.proxy[1]:
        yield _error(f"the ingress and Serve's proxy would both listen at port {port}: change ingress.port")


def this_machine(deployment: Deployment) -> Iterator[Finding]:
    """Yield the ports of this machine at which another process listens."""
    ingress = deployment.args.ingress
    own = (ingress.host, ingress.port) if ingress.port else None
    for where, address in (("ingress", own), ("http_options", deployment.proxy)):
        if address is None:
            continue
        host, port = address
        try:
            found = ports.state(host, port)
        except OSError as error:
            said = error.strerror or error
            yield _error(f"{where} has host {host!r} and port {port}, where none can listen: {said}")
            continue
        if found == "taken":
            yield _error(
                f"{where}.port is {port}: another process listens there at {host}; stop it, "
                "or set another port"
            )
        elif found == "shared" and where == "ingress":
            yield Finding(
                "warning",
                f"ingress.port is {port}, where a service of yours listens at {host}: a start beside it is "
                "refused, one in its place is not",
            )


def keys_file(deployment: Deployment, pools: Sequence[Pool]) -> Iterator[Finding]:
    """Yield the key file if the ingress could not read it, as far as this machine can tell."""
    path = deployment.args.ingress.keys_file
    if path is None:
        return
    here = all(pool.here for pool in pools)
    if not here and not path.exists():
        sentence = f"ingress.keys_file {path} is not on this machine: each node of the ingress must have it"
        yield Finding("warning", sentence)
        return
    try:
        read_keys(path)
    except KeysError as error:
        yield _error(f"ingress.keys_file: {error}; eldr keys add makes one")


def settings(engines: EngineDeployment) -> Iterator[Finding]:
    """What Serve is told of the engines."""
    options = engines.spec.deployment_config
    scaling = options.get("autoscaling_config") or {}
    if str((scaling.get("policy") or {}).get("policy_function", "")).startswith("ray."):
        yield _error(
            f"{engines.role}'s autoscaling policy is Serve's own, which sees none of the requests that come "
            "through channels: leave `policy` out"
        )
    if engines.scaled and engines.least == 0:
        yield _error(
            f"{engines.role} would scale to no replica, and nothing brings the first one back: "
            "set min_replicas"
        )
    yield from drain(engines.role, options)
    if engines.most > 1 and "HF_HOME" not in engines.spec.environment and from_hub(engines):
        yield Finding(
            "warning",
            f"{engines.most} {engines.role} replicas would download {source(engines)} to as many nodes: set "
            "HF_HOME in runtime_env's env_vars to a folder that all nodes share",
        )


def drain(name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """How long the replicas of a deployment have to end their streams, by its options."""
    seconds = float(options.get("graceful_shutdown_timeout_s", 0))
    if seconds < _LEAST_DRAIN_S:
        yield Finding(
            "warning",
            f"{name} replicas are ended {seconds:g} s after they were told to stop, streams or not: "
            "raise graceful_shutdown_timeout_s",
        )


def source(engines: EngineDeployment) -> str:
    """Where the model comes from."""
    return engines.spec.model_source


def from_hub(engines: EngineDeployment) -> bool:
    """Whether it is a name on the model hub, neither a folder nor an address."""
    return not source(engines).startswith(("/", "./", "../")) and "://" not in source(engines)


def _error(sentence: str) -> Finding:
    return Finding("error", sentence)


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}-{max(numbers)}" if min(numbers) < max(numbers) else str(min(numbers))
