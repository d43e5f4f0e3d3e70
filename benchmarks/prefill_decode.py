"""Prefill tells which experts decode will use (counterpart of the paper's Figure 3).

    python -m benchmarks.prefill_decode --prompts DIR

Correlation over experts (normalised activation pooled over the domains, each expert of each layer a
point), and over requests: rho, the rank correlation of pairwise distances (the paper's Eq. 1).
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import pearsonr, spearmanr

from benchmarks.harness import options
from benchmarks.harness.capture import captured
from offline.fitting import fit_signature
from tools.cli import run
from tools.plots import save
from tools.results import publish
from tools.signature_quality import signature_quality


def prefill_decode(
    prompts: options.Prompts = options.PROMPTS,
    requests: options.Captured = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Correlate prefill with decode activation of experts."""
    data = captured(prompts, work, requests=requests, seed=seed)
    figure = Figure(figsize=(8, 4), layout="constrained")
    rows = []
    for axes, workload in zip(figure.subplots(1, 2), ("task", "language"), strict=True):
        trace = data.trace.subset(data.group(workload))
        domains = np.array(trace.domains)
        points = []
        for counts in (trace.prefill_counts, trace.decode_counts):
            share = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1)
            by_domain = np.stack([share[domains == d].mean(axis=0) for d in sorted(set(domains))])
            points.append(by_domain.mean(axis=0).reshape(-1))
        fit, held_out = data.split(workload, 0.5, seed)
        spec = fit_signature(data.trace.subset(fit), seed=seed)
        test = data.trace.subset(held_out)
        rows.append(
            {
                "workload": workload,
                "requests": len(trace.ids),
                "pearson": float(pearsonr(*points)[0]),
                "spearman": float(spearmanr(*points)[0]),
                "rho_held_out": signature_quality(
                    spec.encode(test.prefill_counts), test.decode_probability, seed=seed
                ),
            }
        )
        axes.scatter(*points, s=8, alpha=0.6)
        axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
        axes.set(xlabel="prefill activation", ylabel="decode activation", title=workload)
    path = publish(
        "prefill_decode", rows, inputs={"captured": requests}, seed=seed, out=out,
        notes="each point one expert of one layer, mean over domains",
    )  # fmt: skip
    save(figure, path.with_suffix(".png"))


if __name__ == "__main__":
    run(prefill_decode)
