"""Fit a table for the live decode replicas, and swap it in under load.

    eldr refit                                               # the pool fits to recent traffic
    python -m offline.refit --trace trace.safetensors --swap # fits to a calibration trace

A Ray job finds the service on the Ray cluster; otherwise it is at --url. With --trace but without --swap the
table is only written. The router swaps a table atomically; requests in flight keep their workers.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer

from eldr_serve.actors import find_actor
from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.errors import OverloadedError, SwapRefusedError, UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.router.actor import actor_name
from eldr_serve.signatures.coordinator_client import CoordinatorClient

_URL = "http://127.0.0.1:8000"


def refit(
    trace: Annotated[
        Path | None, typer.Option(help="CalibrationTrace file; none: the service's recent traffic.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Decode workers; default: those live now. With --trace.")
    ] = None,
    swap: Annotated[bool, typer.Option(help="With --trace: swap in the new table.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --trace: also write the table to this file.")] = None,
    application: Annotated[str, typer.Option(help="Application's `name` in the deployment.")] = "eldr",
    band: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="With --trace: band width, cosine similarity.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="With --trace: seed of the clustering.")] = 0,
    url: Annotated[
        str | None, typer.Option(help=f"Without --trace: URL of the ingress; default {_URL}.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="ELDR_ADMIN_KEY", help="The service's admin key.", show_default=False),
    ] = None,
) -> None:
    """Fit a table for the current decode replicas and hot-swap it."""
    if trace is None:
        if out is not None or workers is not None:
            raise UserInputError("--out and --workers require --trace: the service fits for its own replicas")
        entry = _refit_to_recent_traffic(application, url, admin_key)
        typer.echo(
            f"table version {entry['version']} is live: {entry['samples']} recent requests, "
            f"{entry['workers']} decode replicas"
        )
        return
    if not swap and out is None:
        raise UserInputError("nothing to do: give --swap, --out or both")
    if workers is None and not swap:
        raise UserInputError("give --workers, or --swap to fit for the live replicas")
    _refit_to_trace(
        CalibrationTrace.load(trace),
        workers=workers,
        swap=swap,
        out=out,
        application=application,
        band=band,
        seed=seed,
    )


def _refit_to_recent_traffic(application: str, url: str | None, admin_key: str | None) -> dict[str, Any]:
    if url is not None or "RAY_ADDRESS" not in os.environ:  # Ray sets this variable in jobs
        return OperatorClient(url or _URL, admin_key).refit()
    _join_cluster()
    try:
        return asyncio.run(CoordinatorClient(application).refit())
    except (SwapRefusedError, OverloadedError) as error:
        raise UserInputError(str(error)) from None


def _refit_to_trace(
    trace: CalibrationTrace,
    *,
    workers: int | None,
    swap: bool,
    out: Path | None,
    application: str,
    band: float,
    seed: int,
) -> None:
    router = _find_router(application) if swap else None
    if workers is None:
        workers = len(ray.get(router.status.remote())["workers"])  # type: ignore[union-attr]
        if workers == 0:
            raise UserInputError(f"application {application!r} has no decode replica now; give --workers")
    start = time.perf_counter()
    table, report = fit_table(trace, workers, band=band, seed=seed)
    typer.echo(
        f"fitted {workers} clusters of sizes {report['cluster_sizes']} from {len(trace.ids)} requests "
        f"in {time.perf_counter() - start:.1f} s; prefill predicts decode "
        f"with rho {report['rho']:.3f} (1: perfectly)"
    )
    if out is not None:
        table.save(out)
        typer.echo(f"wrote {out}")
    if router is not None:
        settings = _swap(router, table.to_bytes())
        typer.echo(f"table version {settings.table_version} is live")


def _join_cluster() -> None:
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="warning")


def _find_router(application: str) -> Any:
    _join_cluster()
    try:
        return find_actor(actor_name(application))
    except ValueError:
        raise UserInputError(f"no application {application!r} runs on this Ray cluster") from None


def _swap(router: Any, table: bytes) -> Any:
    try:
        return ray.get(router.swap_table.remote(table))
    except SwapRefusedError as error:
        raise UserInputError(f"the router keeps its table: {getattr(error, 'cause', error)}") from None


if __name__ == "__main__":
    run(refit)
