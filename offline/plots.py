"""Pictures for reports."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.artifacts import CalibrationTrace, RoutingTable
from eldr_serve.files import write_whole


def signature_space(trace: CalibrationTrace, table: RoutingTable, path: Path) -> None:
    """Signatures on their first two principal components by domain, with the centroids (Fig. 9)."""
    figure = signature_space_figure(trace, table)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lstrip(".") or "png", dpi=120)
    write_whole(path, content.getvalue())


def signature_space_figure(trace: CalibrationTrace, table: RoutingTable) -> Any:
    """The same as a matplotlib figure."""
    from matplotlib.figure import Figure

    points = table.spec.encode(trace.prefill_counts)
    mean = points.mean(axis=0)
    axes_ = np.linalg.svd(points - mean, full_matrices=False)[2][:2]
    flat, centres = (points - mean) @ axes_.T, (table.centroids - mean) @ axes_.T
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    domains = np.array(trace.domains)
    for number, domain in enumerate(sorted(set(trace.domains))):
        chosen = flat[domains == domain]
        axes.scatter(*chosen.T, s=9, color=f"C{number % 10}", alpha=0.7, label=domain or "(no domain)")
    axes.scatter(*centres.T, marker="*", s=170, color="black", label="centroid")
    for worker, centre in enumerate(centres):
        axes.annotate(f" {worker}", centre)
    axes.set(xlabel="first principal component", ylabel="second principal component")
    axes.set_title(f"{len(points)} prefill signatures, {len(centres)} balanced clusters")
    axes.legend(fontsize=8, ncols=2)
    return figure
