"""Place experts on the ranks of an expert-parallel engine, on CPU, from observed routes.

    python -m offline.place --trace trace.safetensors --method grace --ranks 8 --nodes 2 --redundant 8 \\
        --out placement.json

offline/expert_placement/methods.py lists the methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from eldr_serve.arrays import Ints
from eldr_serve.commands.run import run
from eldr_serve.commands.settings import command_of_settings
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology, hosts_of
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.files import require_folders, write_all
from eldr_serve.validation import unknown_name
from loadgen.results import print_table
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.evaluate import ReplicaRule, evaluate, metro_rule, sample_batches, serve_even
from offline.expert_placement.grace import slots_per_rank
from offline.expert_placement.locality import local_rule
from offline.expert_placement.methods import METHODS, Problem, Report
from offline.scenario import read_calibration_trace

BATCHES = 64  # held-out decode steps that evaluate a placement


Trace = Annotated[
    Path, typer.Option(help="CalibrationTrace with routes, or published routes of a known model.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Decode workers; each gets a placement from its cluster's steps.")
]
ClusterOf = Annotated[
    Path | None, typer.Option(help="RoutingTable that assigns requests to workers; default: fitted here.")
]
Export = Annotated[Literal["vllm"] | None, typer.Option(help="Also write vLLM's format (NAME.vllm.jsonl).")]
Cost = Annotated[
    Path | None, typer.Option(help="LayerCost (JSON, s): also report layer times; director needs it.")
]
TokenBytes = Annotated[float, typer.Option(min=1, help="Bytes of a token's hidden state, for --cost.")]
ExpertBytes = Annotated[
    float | None, typer.Option(min=1, help="Bytes of an expert's weights: also report memory.")
]


@dataclass(frozen=True)
class PlaceSettings:
    """The options of the command."""

    trace: Trace
    method: Annotated[str, typer.Option(help=f"Placement method: {', '.join(METHODS)}.")]
    ranks: Annotated[int, typer.Option(min=1, help="EP ranks (GPUs) of the engine.")]
    out: Annotated[Path, typer.Option(help="Placement to write (.json), with its sidecar (.meta.json).")]
    nodes: Annotated[int, typer.Option(min=1, help="Machines with an equal number of ranks.")] = 1
    redundant: Annotated[int | None, typer.Option(min=0, help="Slots beyond one for each expert.")] = None
    slots: Annotated[int | None, typer.Option(min=1, help="Total slots, instead of --redundant.")] = None
    groups: Annotated[int, typer.Option(min=1, help="Expert groups of the model (eplb).")] = 1
    workers: Workers = None
    cluster_of: ClusterOf = None
    export: Export = None
    batch: Annotated[int, typer.Option(min=1, help="Tokens of a decode step, over all ranks.")] = 64
    cost: Cost = None
    token_bytes: TokenBytes = 4096
    expert_bytes: ExpertBytes = None
    seed: Annotated[int, typer.Option(help="Seed of held-out split, clustering and batches.")] = 0
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the report, write nothing.")] = False


class WorkerSplit(NamedTuple):
    """The requests of a trace from which the placement of a worker is computed.

    Attributes:
        worker: number of the worker; "all" if all workers have the same placement.
        path: file of the placement.
        to_fit: indices of the requests that the placement is fitted to.
        to_evaluate: indices of the requests that it is evaluated on.
    """

    worker: str
    path: Path
    to_fit: Ints
    to_evaluate: Ints


@command_of_settings
def place(settings: PlaceSettings) -> None:
    """Fit a placement to half of the requests, report on the other half, and write it."""
    _check_method(settings.method, settings.groups)
    require_folders(settings.out)
    topology = _make_topology(settings.ranks, settings.nodes)
    layer_cost = None if settings.cost is None else LayerCost.load(settings.cost)
    trace = read_calibration_trace(settings.trace)
    num_experts = trace.prefill_counts.shape[2]
    num_slots = _count_slots(num_experts, settings.slots, settings.redundant)
    slots_per_rank(num_experts, num_slots, settings.ranks)
    fingerprint = trace.fingerprint
    rows: list[Report] = []
    files: dict[Path, bytes] = {}
    for split in _split_by_worker(settings, trace):
        problem = Problem(
            routes=trace.decode_routes(split.to_fit),
            num_experts=num_experts,
            slots=num_slots,
            topology=topology,
            batch=settings.batch,
            groups=settings.groups,
            cost=layer_cost,
            token_bytes=settings.token_bytes,
            seed=settings.seed,
        )
        placement = _place_and_evaluate(settings, problem, trace, split, fingerprint)
        rows += placement.report["held_out"]
        files |= placement.files(split.path)
        if settings.export == "vllm":
            files[split.path.with_suffix(".vllm.jsonl")] = placement.to_vllm()
    print_table(f"{settings.method}, {num_slots} slots on {settings.ranks} ranks, held-out half", rows)
    if settings.dry_run:
        typer.echo(f"dry run: {', '.join(path.name for path in files)} not written")
        return
    write_all(files)
    typer.echo(f"wrote {', '.join(str(path) for path in files)}")


def _check_method(method: str, groups: int) -> None:
    if method not in METHODS:
        raise UserInputError(unknown_name("", method, METHODS, "method"))
    if groups != 1 and method != "eplb":
        raise UserInputError(f"--groups is an option of method eplb, not of {method}")


def _place_and_evaluate(
    settings: PlaceSettings, problem: Problem, trace: CalibrationTrace, split: WorkerSplit, fingerprint: str
) -> ExpertPlacement:
    """Return the method's placement; its report compares it with the linear one on held-out requests."""
    slots, report = METHODS[settings.method](problem)
    batches = sample_batches(trace, split.to_evaluate, problem.batch, BATCHES, seed=problem.seed + 1)
    rows = [
        {"worker": split.worker, "placement": label} | row
        for label, candidate in (("linear", _linear(problem)), (settings.method, slots))
        for row in _evaluate_by_rule(problem, candidate, batches, settings.expert_bytes)
    ]
    return ExpertPlacement(
        slots,
        ranks=problem.topology.ranks,
        num_experts=problem.num_experts,
        model=trace.model,
        method=settings.method,
        nodes=problem.topology.nodes,
        fingerprint=fingerprint,
        report=report | {"held_out": rows},
        expected_tokens=np.round(problem.load * problem.batch / len(problem.routes), 4),
    )


def _linear(problem: Problem) -> Ints:
    """Return the engines' initial placement: equal blocks; the first experts fill spare slots."""
    ranks = problem.topology.ranks
    slots = -(-problem.num_experts // ranks) * ranks
    return np.tile(np.arange(slots) % problem.num_experts, (len(problem.load), 1))


def _make_topology(ranks: int, nodes: int) -> Topology:
    if ranks % nodes:
        raise UserInputError(f"{ranks} ranks cannot be split evenly over {nodes} nodes: change --nodes")
    return Topology(ranks=ranks, nodes=nodes)


def _count_slots(num_experts: int, slots: int | None, redundant: int | None) -> int:
    if slots is not None and redundant is not None:
        raise UserInputError("give --slots or --redundant, not both")
    return slots if slots is not None else num_experts + (redundant or 0)


def _split_by_worker(settings: PlaceSettings, trace: CalibrationTrace) -> list[WorkerSplit]:
    """Return the requests of each placement."""
    order = np.random.default_rng(settings.seed).permutation(len(trace.ids))
    fit, held_out = np.split(order, [len(order) // 2])
    if settings.cluster_of is not None:
        clusters = _read_table(settings.cluster_of, settings.workers, trace)
    elif settings.workers is not None:
        clusters, _ = fit_table(trace.subset_without_routes(fit), settings.workers, seed=settings.seed)
    else:
        return [WorkerSplit("all", settings.out, fit, held_out)]
    cluster = np.array([int(clusters.similarity(counts).argmax()) for counts in trace.prefill_counts])
    splits = []
    for worker in range(len(clusters.centroids)):
        to_fit, to_evaluate = (half[cluster[half] == worker] for half in (fit, held_out))
        if not len(to_fit) or not len(to_evaluate):
            raise UserInputError(
                f"worker {worker} has {len(to_fit)} requests to fit and {len(to_evaluate)} to evaluate: "
                "lower --workers or give a larger trace"
            )
        path = settings.out.with_stem(f"{settings.out.stem}.{worker}")
        splits.append(WorkerSplit(str(worker), path, to_fit, to_evaluate))
    return splits


def _read_table(path: Path, workers: int | None, trace: CalibrationTrace) -> RoutingTable:
    """Return a table for the trace's model, with this number of clusters if one is given."""
    table = RoutingTable.load(path)
    sizes = (table.num_layers, table.num_experts)
    if (table.model, *sizes) != (trace.model, *trace.prefill_counts.shape[1:]):
        shape = trace.prefill_counts.shape
        raise UserInputError(
            f"{path} is for {table.model} with {sizes[0]} layers of {sizes[1]} experts, but "
            f"the trace is for {trace.model} with {shape[1]} layers of {shape[2]} experts"
        )
    if workers not in (None, len(table.centroids)):
        raise UserInputError(f"{path} has {len(table.centroids)} clusters, not {workers}")
    return table


def _evaluate_by_rule(
    problem: Problem, placement: Ints, batches: Ints, expert_bytes: float | None
) -> list[Report]:
    """Return a row for each rule that chooses replicas."""
    topology = problem.topology
    hosts = hosts_of(placement, problem.num_experts, topology.ranks)
    memory: Report = {}
    if expert_bytes is not None:
        memory["gib_a_rank"] = placement.size / topology.ranks * expert_bytes / 2**30
    return [
        {"replicas_by": name}
        | evaluate(batches, hosts, topology, rule, token_bytes=problem.token_bytes, cost=problem.cost)
        | memory
        for name, rule in _rules(problem, hosts)
    ]


def _rules(problem: Problem, hosts: NDArray[np.bool_]) -> list[tuple[str, ReplicaRule]]:
    """Return the rules that can choose a replica; return one rule if there is no choice."""
    if hosts.sum() == hosts.shape[0] * hosts.shape[1]:
        return [("-", serve_even)]
    local = local_rule(problem.load, hosts, problem.topology, seed=problem.seed)
    return [("turn", serve_even), ("metro", metro_rule(hosts)), ("local", local)]


if __name__ == "__main__":
    run(place)
