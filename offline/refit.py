"""Fit a table for the decode replicas that serve now, and swap it in under load.

    python -m offline.refit --trace trace.safetensors --swap

Without --swap it only writes the table. The router takes a table whole or not at all; requests in
flight keep their workers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer

from eldr_serve.calibration_trace import CalibrationTrace
from eldr_serve.errors import SwapRefused
from eldr_serve.fitting.table import fit_table
from eldr_serve.serving.decode_router import actor_name, find
from tools.cli import BadInput, run


def refit(
    trace: Annotated[Path, typer.Option(help="CalibrationTrace file.")],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Decode workers; default: those that live now.")
    ] = None,
    swap: Annotated[bool, typer.Option(help="Make the new table the live one.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the table to this file.")] = None,
    application: Annotated[str, typer.Option(help="`name` in the deployment's args.")] = "eldr",
    band: Annotated[float, typer.Option(min=0.0, max=2.0, help="Band width, cosine similarity.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the clustering.")] = 0,
) -> None:
    """Fit for the present decode replicas and hot-swap the table."""
    if not swap and out is None:
        raise BadInput("nothing to do: give --swap, --out or both")
    if workers is None and not swap:
        raise BadInput("give --workers, or --swap to fit for the replicas that live now")
    loaded = CalibrationTrace.load(trace)
    router = _router(application) if swap else None
    if workers is None:
        workers = len(ray.get(router.status.remote())["workers"])  # type: ignore[union-attr]
        if workers == 0:
            raise BadInput(f"application {application!r} has no decode replica now; give --workers")
    start = time.perf_counter()
    table, report = fit_table(loaded, workers, band=band, seed=seed)
    typer.echo(
        f"fitted {workers} clusters of sizes {report['cluster_sizes']} from {len(loaded.ids)} requests "
        f"in {time.perf_counter() - start:.1f} s; prefill foretells decode "
        f"with rho {report['rho']:.3f} (1: in full)"
    )
    if out is not None:
        table.save(out)
        typer.echo(f"wrote {out}")
    if router is not None:
        settings = _swap(router, table.to_bytes())
        typer.echo(f"table version {settings.table_version} is live")


def _router(application: str) -> Any:
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    try:
        return find(actor_name(application))
    except ValueError:
        raise BadInput(f"no application {application!r} runs on this Ray cluster") from None


def _swap(router: Any, table: bytes) -> Any:
    try:
        return ray.get(router.swap_table.remote(table))
    except SwapRefused as error:
        raise BadInput(f"the router keeps its table: {getattr(error, 'cause', error)}") from None


if __name__ == "__main__":
    run(refit)
