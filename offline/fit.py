"""Fit a routing table on a calibration trace, on CPU, in seconds.

    python -m offline.fit --trace trace.safetensors --workers 4 --out table.safetensors

`eldr calibrate` and `eldr routes` write such traces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.commands.run import run
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.clustering import STARTS
from eldr_serve.experts.fitting.table import compare_transforms, fit_table
from eldr_serve.experts.signature import DEFAULT_TRANSFORM, TRANSFORMS
from eldr_serve.files import require_folders, write_atomically
from loadgen.plots import save, signature_space


def fit(
    trace: Annotated[Path, typer.Option(help="CalibrationTrace, from `eldr calibrate` or `eldr routes`.")],
    workers: Annotated[int, typer.Option(min=1, help="Decode workers K, one centroid each.")],
    out: Annotated[Path, typer.Option(help="RoutingTable file to write (safetensors).")],
    report: Annotated[Path | None, typer.Option(help="Write the results of the fit (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the signature space (PNG or SVG).")] = None,
    transform: Annotated[str, typer.Option(help=f"Transform: {', '.join(TRANSFORMS)}.")] = DEFAULT_TRANSFORM,
    band: Annotated[float, typer.Option(min=0.0, max=2.0, help="Band width, cosine similarity.")] = 0.1,
    starts: Annotated[
        int, typer.Option(min=1, help="Starts of balanced K-means, of which the best is kept.")
    ] = STARTS,
    seed: Annotated[int, typer.Option(help="Seed of pairs and clustering.")] = 0,
) -> None:
    """Fit IDF, layer mask and balanced clusters. Write the table and a report."""
    require_folders(out, report, plot)
    loaded = CalibrationTrace.load(trace)
    table, quality = fit_table(loaded, workers, transform=transform, band=band, starts=starts, seed=seed)
    if report is not None:
        quality["transforms"] = compare_transforms(loaded, seed=seed)
        write_atomically(report, json.dumps(quality, indent=1) + "\n")
    if plot is not None:
        save(signature_space(loaded, table), plot)
    table.save(out)
    typer.echo(
        f"{quality['requests']} requests, {len(quality['layers'])} of {table.num_layers} layers, "
        f"rho {quality['rho']:.3f} (all layers {quality['rho_all_layers']:.3f}), "
        f"cluster sizes {quality['cluster_sizes']}, "
        f"{quality['signature_s'] + quality['clustering_s']:.2f} s; wrote {out}"
    )


if __name__ == "__main__":
    run(fit)
