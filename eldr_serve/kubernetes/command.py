"""The command `eldr kubernetes`."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.files import write_whole


def kubernetes(
    deployment: Annotated[Path, typer.Argument(help="Deployment YAML.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the RayService; default: the file's.", show_default=False)
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="Container image of all pods; default: eldr-serve:cpu or :gpu.", show_default=False
        ),
    ] = None,
    secret: Annotated[str, typer.Option(help="Secret with the keys: admin-key and others.")] = "eldr",
    models_claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim that is mounted where engines set HF_HOME.")
    ] = "eldr-models",
    node_selector: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Label of nodes for pods with GPUs; repeatable."),
    ] = None,
    cpus_per_rank: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Cores of each engine process; default: 4, on CPU 0.5.", show_default=False
        ),
    ] = None,
    memory_gib_per_rank: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Its host memory beside a CPU's KV cache, GiB; default: 32, on CPU 3.",
            show_default=False,
        ),
    ] = None,
    shm_gib: Annotated[
        float | None,
        typer.Option(min=0.1, help="/dev/shm of each pod, GiB; default: 8, on CPU 1.", show_default=False),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, or its folder; nothing is downloaded.")
    ] = None,
) -> None:
    """Write a deployment as a RayService, for Kubernetes with KubeRay; nothing is started."""
    labels = dict(_label(word) for word in node_selector or ())
    logging.disable(logging.WARNING)  # Ray and vLLM log their imports at length
    try:
        from eldr_serve.kubernetes.groups import SIZES
        from eldr_serve.kubernetes.manifest import Options, rayservice, text
        from eldr_serve.preflight.deployment import read_deployment

        read = read_deployment(deployment, model_config)
    finally:
        logging.disable(logging.NOTSET)
    device = read.engines[0].spec.device
    given = {
        "cpus_per_rank": cpus_per_rank,
        "memory_gib_per_rank": memory_gib_per_rank,
        "shm_gib": shm_gib,
    }
    sizes = replace(SIZES[device], **{key: value for key, value in given.items() if value is not None})
    options = Options(
        name or deployment.stem.lower().replace("_", "-"),
        image or f"eldr-serve:{device}",
        secret,
        models_claim,
        labels,
        sizes,
    )
    manifest = text(rayservice(read, options))
    head = f"# By `eldr kubernetes {deployment.name}`, eldr-serve {version('eldr-serve')}.\n"
    if out is None:
        typer.echo(head + manifest, nl=False)
    else:
        write_whole(out, head + manifest)


def _label(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not key or not equals:
        raise ValueError(f"--node-selector takes KEY=VALUE, not {word!r}")
    return key, value
