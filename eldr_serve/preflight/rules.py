"""The rules for a deployment on a cluster; each function yields violations, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.errors import UserInputError
from eldr_serve.ingress.port import port_state
from eldr_serve.limits.keys import KeysError, read_keys
from eldr_serve.preflight.deployment import Deployment, EngineDeployment
from eldr_serve.preflight.engines import ProbeResult
from eldr_serve.preflight.machine import ACCELERATOR, GIB, Gpu, NodePool
from eldr_serve.preflight.node_assignment import NodeAssignment, total_resources
from eldr_serve.router.expert_placements import parse_placements
from eldr_serve.scheduling import make_policy
from eldr_serve.scheduling.policies.base import QueuedPolicy

# Ports in use on every node of a cluster by default settings of `ray start` and the kernel.
_PORTS_IN_USE = (
    (6379, 6379, "Ray's control store"),
    (8080, 8080, "Ray's metrics"),
    (8265, 8265, "Ray's dashboard"),
    (10001, 19999, "Ray's client and workers"),
    (32768, 60999, "outgoing connections"),
)
_MIN_DRAIN_S = 60.0


@dataclass(frozen=True)
class Finding:
    """A fault, or a note for the operator.

    Attributes:
        severity: an error prevents the deployment from starting or from serving correctly.
        sentence: the fault and its remedy.
    """

    severity: Literal["error", "warning"]
    sentence: str


def check_resources(deployment: Deployment, node_pools: Sequence[NodePool]) -> Iterator[Finding]:
    """Yield an error for each requested resource that no node has."""
    offered = {name for pool in node_pools for name in pool.resources}
    kinds = sorted(name.removeprefix(ACCELERATOR) for name in offered if name.startswith(ACCELERATOR))
    for demand in (*(engines.replicas for engines in deployment.engines), deployment.ingress):
        for name in sorted({name for bundle in demand.bundles for name, amount in bundle.items() if amount}):
            if name in offered:
                continue
            if name.startswith(ACCELERATOR):
                yield _error(
                    f"{demand.name} needs accelerator_type {name.removeprefix(ACCELERATOR)}, "
                    f"but the nodes have {' and '.join(kinds) or 'no GPU'}"
                )
            elif name == "GPU":
                yield _error(f"{demand.name} needs GPUs, but no node has any")
            else:
                yield _error(f"{demand.name} needs the resource {name!r}, which no node has")


def check_assignment(deployment: Deployment, assignment: NodeAssignment) -> Iterator[Finding]:
    """Yield an error for each deployment whose replicas find no node or would spread over several nodes."""
    for demand in (*(engines.replicas for engines in deployment.engines), deployment.ingress):
        missing = assignment.missing.get(demand.name, 0)
        if missing:
            needed = ", ".join(
                name if name.startswith(ACCELERATOR) else f"{amount:g} {name}"
                for name, amount in total_resources(demand.bundles).items()
                if amount
            )
            yield _error(
                f"{missing} of {demand.count} {demand.name} replicas find no node: each needs {needed}"
                + (f" by {demand.strategy}" if len(demand.bundles) > 1 else "")
                + (
                    f"; the cluster file's max_workers is {assignment.max_workers}, "
                    f"of which {assignment.num_workers} are in use: raise it if they are too few"
                    if assignment.max_workers is not None
                    else ""
                )
            )
        spread = assignment.spread.get(demand.name, 0)
        if spread:
            yield _error(
                f"{spread} of {demand.count} {demand.name} replicas would each spread over several nodes, "
                "whose ranks communicate in every layer: set placement_group_config's strategy to STRICT_PACK"
            )


def check_gpus(engines: EngineDeployment) -> Iterator[Finding]:
    """Yield an error if a replica's number of GPUs is not its number of ranks.

    Skip replicas that request a fraction of a GPU.
    """
    amounts = [bundle["GPU"] for bundle in engines.bundles if bundle.get("GPU")]
    has_shares = not all(float(amount).is_integer() for amount in amounts)
    if engines.spec.device == "cpu" or has_shares or sum(amounts) == engines.spec.ranks:
        return
    yield _error(
        f"a {engines.role} replica requests {sum(amounts):g} GPUs, but tensor_parallel_size x "
        f"data_parallel_size is {engines.spec.ranks}: request one GPU per rank, as num_gpus of "
        "ray_actor_options for data-parallel ranks, and in placement_group_config for other ranks"
    )


def check_memory(engines: EngineDeployment, gpu: Gpu | None, result: ProbeResult) -> Iterator[Finding]:
    """Yield an error if vLLM or eldr_serve's extension would refuse an engine."""
    kind = gpu.kind if gpu else "CPU"
    hidden = [name for name, reveals_experts in result.kernels if not reveals_experts]
    if hidden:
        yield _error(
            f"{engines.role} on {kind} would run {hidden[0]}, whose router runs inside the kernel, so the "
            "chosen experts cannot be read: set moe_backend in engine_kwargs to another kernel"
        )
    elif result.weights and result.kv <= 0 and gpu is not None:
        yield _error(
            f"{engines.role} does not fit on {kind}: weights {result.weights / GIB:.1f} GiB and a reserve of "
            f"{result.reserve / GIB:.1f} GiB exceed gpu_memory_utilization by {-result.kv / GIB:.1f} GiB"
        )
    elif result.refusal:
        names_argument = result.refusal.startswith(engines.arguments_name)
        sentence = f"{engines.role} on {kind} is refused: {result.refusal}"
        yield _error(result.refusal if names_argument else sentence)
    elif result.weights and not result.kernels:
        yield _error(f"{engines.spec.model_source} has no MoE layer, so there are no experts to count")
    elif result.weights and not result.kv_tokens:
        yield _error(
            f"{engines.role}'s KV cache of {result.kv / GIB:.1f} GiB on {kind} holds no sequence of "
            f"max_model_len {result.max_model_len}: "
            + (
                "lower max_model_len, or raise gpu_memory_utilization"
                if gpu
                else f"raise {engines.spec.host_kv_variable} in {engines.section}.runtime_env.env_vars, "
                "or lower max_model_len"
            )
        )


def check_agreement(engines: Sequence[tuple[EngineDeployment, Gpu | None, ProbeResult]]) -> Iterator[Finding]:
    """Yield an error for each field that must agree but whose values vLLM resolves differently."""
    results = {deployment.role: result for deployment, _, result in engines}
    if "prefill" in results and not any(result.refusal for result in results.values()):
        prefill_arguments, decode_arguments = (
            results[role].shared_arguments for role in ("prefill", "decode")
        )
        for sentence in BACKEND.differences(prefill_arguments, decode_arguments):
            yield _error(sentence)


def check_host_memory(
    deployment: Deployment, assignment: NodeAssignment, results: Sequence[ProbeResult]
) -> Iterator[Finding]:
    """Yield an error for each node whose CPU engines need more memory than it has."""
    needed: dict[str, int] = {
        engines.role: engines.spec.ranks * (result.weights + result.reserve + result.kv)
        for engines, result in zip(deployment.engines, results, strict=True)
        if engines.spec.device == "cpu"
    }
    for node in assignment.nodes:
        total = sum(needed.get(name, 0) for name, _ in node.replicas) / GIB
        if node.pool.memory_gib and total > node.pool.memory_gib:
            yield _error(
                f"the engines on node {node.name} need {total:.1f} GiB, "
                f"but the node has {node.pool.memory_gib:.1f} GiB"
            )


def check_network(deployment: Deployment, assignment: NodeAssignment) -> Iterator[Finding]:
    """Yield an error for each port at which two processes on one node would listen."""
    ports = {engines.role: engines.nixl_ports for engines in deployment.engines}
    for role, numbers in ports.items():
        for first, last, holder in _PORTS_IN_USE:
            if any(first <= number <= last for number in numbers):
                yield _error(
                    f"{role}'s NIXL ports {_span(numbers)} overlap {_span([first, last])} of {holder}: "
                    "set NIXL_SIDE_CHANNEL_PORT_BASE in experimental_configs"
                )
    for role, other in combinations(ports, 2):
        share_a_node = any({role, other} <= {name for name, _ in node.replicas} for node in assignment.nodes)
        if share_a_node and set(ports[role]) & set(ports[other]):
            yield _error(
                f"{role}'s NIXL ports {_span(ports[role])} overlap {other}'s {_span(ports[other])} on one "
                "node: set NIXL_SIDE_CHANNEL_PORT_BASE in experimental_configs"
            )
    for engines in deployment.engines:
        role, numbers = engines.role, ports[engines.role]
        crowded = any(sum(name == role for name, _ in node.replicas) > 1 for node in assignment.nodes)
        if crowded and len(set(numbers)) < len(numbers):
            yield _error(
                f"{role} replicas on one node would share NIXL's port {numbers[0]}: leave "
                f"{engines.spec.fixed_port_variable} to eldr-serve"
            )
    port = deployment.args.ingress.port
    if port and deployment.proxy and port == deployment.proxy[1]:
        yield _error(f"the ingress and Serve's proxy would both listen at port {port}: change ingress.port")


def check_this_machine(deployment: Deployment) -> Iterator[Finding]:
    """Yield a finding for each port of this machine at which another process listens."""
    ingress = deployment.args.ingress
    own = (ingress.host, ingress.port) if ingress.port else None
    for where, address in (("ingress", own), ("http_options", deployment.proxy)):
        if address is None:
            continue
        host, port = address
        try:
            state = port_state(host, port)
        except OSError as error:
            reason = error.strerror or error
            yield _error(f"{where} cannot listen at host {host!r} and port {port}: {reason}")
            continue
        if state == "taken":
            yield _error(
                f"{where}.port is {port}: another process listens there at {host}; stop that "
                "process, or set another port"
            )
        elif state == "shared" and where == "ingress":
            yield Finding(
                "warning",
                f"ingress.port is {port}, and your running service listens there at {host}: you can redeploy "
                "it, but a second service cannot use this port",
            )


def check_keys_file(deployment: Deployment, node_pools: Sequence[NodePool]) -> Iterator[Finding]:
    """Yield a finding if the ingress could not read the key file, as far as this machine can tell."""
    path = deployment.args.ingress.keys_file
    if path is None:
        return
    is_here = all(pool.is_this_machine for pool in node_pools)
    if not is_here and not path.exists():
        sentence = f"ingress.keys_file {path} is not on this machine: each node of the ingress must have it"
        yield Finding("warning", sentence)
        return
    try:
        read_keys(path)
    except KeysError as error:
        yield _error(f"ingress.keys_file: {error}; `eldr keys add` makes such a file")


def check_expert_placements(deployment: Deployment, results: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield an error if the decode engines could not use the expert placements of their positions."""
    placements = parse_placements(deployment.args.router.expert_placements)
    if not placements:
        return
    decode, shape = deployment.engines[-1], results[-1].expert_shape
    layers, experts = len(placements[0].physical_to_logical), placements[0].num_experts
    if decode.max_replicas > len(placements):
        yield _error(
            f"router.expert_placements has placements of positions 0 to {len(placements) - 1}, but there are "
            f"up to {decode.max_replicas} {decode.role} replicas: each position needs its own placement"
        )
        return
    try:
        decode.spec.check_live_expert_placement(placements[0])
    except UserInputError as error:
        yield _error(f"router.expert_placements does not fit {decode.role}: {error}")
    else:
        if any(shape) and shape != (layers, experts):
            yield _error(
                f"router.expert_placements has placements of {layers} x {experts} experts, but the model of "
                f"{decode.role} has {shape[0]} x {shape[1]}"
            )


def check_slots(deployment: Deployment) -> Iterator[Finding]:
    """Yield a warning if the policy fills fewer or more slots than each decode worker has."""
    router, decode = deployment.args.router, deployment.engines[-1]
    policy, slots = (
        make_policy(router.policy, **router.parameters),
        decode.spec.arguments().get("max_num_seqs"),
    )
    assumed = policy.slots_per_worker() if isinstance(policy, QueuedPolicy) and policy.has_queue else None
    if slots is not None and assumed is not None and assumed != slots:
        yield Finding(
            "warning",
            f"the policy {router.policy} assumes {assumed} slots in each worker of {decode.role}, but its "
            f"max_num_seqs is {slots}: set router.parameters.slots to {slots}",
        )


def check_settings(engines: EngineDeployment) -> Iterator[Finding]:
    """Yield a finding for each fault of the engines' Serve settings."""
    options = engines.spec.deployment_config
    if (engines.autoscaling_policy or "").startswith("ray."):
        yield _error(
            f"{engines.role}'s autoscaling policy is Serve's own, which does not count requests that come "
            "through channels: leave `policy` out"
        )
    if engines.is_autoscaled and engines.min_replicas == 0:
        yield _error(
            f"{engines.role} would scale to no replica, and nothing would start a replica again: "
            "set min_replicas to at least 1"
        )
    yield from check_drain(engines.role, options)
    if engines.max_replicas > 1 and "HF_HOME" not in engines.spec.environment and engines.is_on_hub:
        yield Finding(
            "warning",
            f"{engines.max_replicas} {engines.role} replicas would download {engines.spec.model_source} to "
            "as many nodes: set HF_HOME in runtime_env's env_vars to a folder that all nodes share",
        )


def check_drain(name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning if the replicas of a deployment have little time to end their streams."""
    seconds = float(options.get("graceful_shutdown_timeout_s", 0))
    if seconds < _MIN_DRAIN_S:
        yield Finding(
            "warning",
            f"{name} replicas that stop are killed after {seconds:g} s, even with open streams: "
            "raise graceful_shutdown_timeout_s",
        )


def _error(sentence: str) -> Finding:
    return Finding("error", sentence)


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}-{max(numbers)}" if min(numbers) < max(numbers) else str(min(numbers))
