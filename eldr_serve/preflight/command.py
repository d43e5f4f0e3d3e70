"""The command `eldr check`."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eldr_serve.errors import UserInputError
from eldr_serve.preflight.machine import GIB, GPUS, NodePool, gpu_of, identical_nodes, read_cluster, set_gpu

if TYPE_CHECKING:
    from eldr_serve.preflight.check import CheckOutcome

_CLUSTER = "ray_cluster.yaml"
_CPU = "cpu"


Cluster = Annotated[
    Path | None,
    typer.Option(
        help=f"File for `ray up`; default: {_CLUSTER} beside the deployment or in the folder above."
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help=f"Kind of GPU instead of the cluster file's: {', '.join(GPUS)}; {_CPU}: none.",
        show_default=False,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Number of identical nodes, instead of --cluster.", show_default=False),
]
Memory = Annotated[float | None, typer.Option(min=1, help="Memory per node, GiB; default: this machine's.")]
Resource = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=AMOUNT", help="Custom resource of each node, with --nodes; repeatable."),
]
ModelConfig = Annotated[
    Path | None, typer.Option(help="The model's config.json, or its folder; nothing is downloaded.")
]


def check(
    deployments: Annotated[list[Path], typer.Argument(help="Deployment YAMLs.")],
    cluster: Cluster = None,
    gpu: Gpu = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=1, help="Memory of a GPU, GiB.")] = None,
    nodes: Nodes = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node, with --nodes.")] = 8,
    cpus_per_node: Annotated[float, typer.Option(min=0, help="Cores per node, with --nodes.")] = float(
        os.cpu_count() or 1
    ),
    memory_gib: Memory = None,
    resource: Resource = None,
    model_config: ModelConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check whether deployments would start on a cluster; if not, report why, with exit status 1."""
    if nodes is not None and cluster is not None:
        raise UserInputError("--nodes replaces --cluster: give one of them")
    if (resource or gpu == _CPU) and nodes is None:
        raise UserInputError(f"--resource and --gpu {_CPU} describe nodes: give their number with --nodes")
    same_nodes = None
    if nodes is not None:
        same_nodes = identical_nodes(
            None if gpu in (None, _CPU) else gpu_of(gpu, gpu_memory_gib),
            gpus_per_node=gpus_per_node,
            resources=dict(_parse_amount(word) for word in resource or ()),
            **_node_sizes(nodes, cpus_per_node, memory_gib),
        )

    def find_node_pools(path: Path, device: str) -> list[NodePool]:
        if same_nodes is not None:
            return same_nodes
        if device == _CPU and cluster is None:
            pools = identical_nodes(None, **_node_sizes(1, cpus_per_node, memory_gib))
            return [replace(pool, is_this_machine=True) for pool in pools]
        pools = read_cluster(cluster or _find_cluster_file(path))
        return set_gpu(pools, gpu_of(gpu, gpu_memory_gib)) if gpu else pools

    if sys.stderr.isatty():
        typer.echo("probing vLLM, which takes a minute on slow cores", err=True)
    logging.disable(logging.WARNING)  # Ray and vLLM log their imports at length
    try:
        from eldr_serve.preflight.check import check_deployments

        outcomes = check_deployments(deployments, find_node_pools, model_config)
    finally:
        logging.disable(logging.NOTSET)
    _print(outcomes, as_json)
    if not all(outcome.can_start for outcome in outcomes):
        raise typer.Exit(1)


def _find_cluster_file(deployment: Path) -> Path:
    """Return the cluster file beside the deployment or in the folder above."""
    for folder in (deployment.parent, deployment.parent.parent):
        if (folder / _CLUSTER).is_file():
            return folder / _CLUSTER
    raise UserInputError(
        f"there is no {_CLUSTER} beside {deployment}: give a file with --cluster, or use --nodes"
    )


def _print(outcomes: list[CheckOutcome], as_json: bool) -> None:
    from rich.console import Console

    from eldr_serve.preflight import report

    if as_json:
        typer.echo(json.dumps([report.as_json(outcome) for outcome in outcomes], indent=1))
        return
    for outcome in outcomes:
        report.show(outcome, Console(markup=False))


def _node_sizes(nodes: int, cpus: float, memory_gib: float | None) -> dict[str, Any]:
    own_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return {"nodes": nodes, "cpus_per_node": cpus, "memory_gib": memory_gib or own_gib}


def _parse_amount(word: str) -> tuple[str, float]:
    name, _, amount = word.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        raise UserInputError(f"--resource takes NAME=AMOUNT, not {word!r}") from None
