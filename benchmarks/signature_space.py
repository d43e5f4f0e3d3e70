"""Domains lie apart in signature space, and centroids among them (counterpart of the paper's Figure 9).

    python -m benchmarks.signature_space --prompts DIR

Two plots (task, language) of signatures on their first two principal components with the balanced
centroids. In the table, `purity` is the share of requests in a cluster that are of its main domain.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import options
from benchmarks.harness.capture import captured
from offline.fitting import fit_table
from tools.cli import run
from tools.plots import save
from tools.plots import signature_space as draw
from tools.results import publish


def signature_space(
    prompts: options.Prompts = options.PROMPTS,
    clusters: Annotated[int, typer.Option(min=2, help="Clusters, one a decode worker.")] = 8,
    requests: options.Captured = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Cluster the signatures of both workloads and plot them."""
    data = captured(prompts, work, requests=requests, seed=seed)
    rows: list[dict[str, Any]] = []
    figures = {}
    for workload in ("task", "language"):
        trace = data.trace.subset(data.group(workload))
        table, report = fit_table(trace, clusters, seed=seed)
        by_domain = np.array(list(report["clusters_by_domain"].values()))
        rows += [
            {
                "workload": workload,
                "cluster": c,
                "requests": int(by_domain[:, c].sum()),
                "main_domain": table.domains[c],
                "purity": float(by_domain[:, c].max() / by_domain[:, c].sum()),
            }
            for c in range(clusters)
        ]
        figures[workload] = draw(trace, table)
    path = publish(
        "signature_space", rows, inputs={"captured": requests, "clusters": clusters}, seed=seed, out=out,
        notes="balanced K-means over count-idf signatures with the greedy layer mask",
    )  # fmt: skip
    for workload, figure in figures.items():
        save(figure, path.with_name(f"{path.stem}_{workload}.png"))


if __name__ == "__main__":
    run(signature_space)
