"""Which transform of the counts, and which layers, make a signature (the paper's Figures 7 and 8).

    python -m benchmarks.signature_quality --prompts DIR

rho (Eq. 1) of each transform with all layers, and with the layers that greedy selection keeps. The
curve over the number of layers is in `layer_mask.json`. Layers are selected and measured on the same
requests, as in the paper; held-out rho is in `prefill_decode`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import options
from benchmarks.harness.capture import captured
from benchmarks.harness.gates import gate_scores
from offline.fitting import compare_transforms
from tools.cli import run
from tools.plots import bars, lines
from tools.results import publish


def signature_quality(
    prompts: options.Prompts = options.PROMPTS,
    requests: options.Captured = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Measure rho by transform and by layers kept."""
    data = captured(prompts, work, requests=requests, seed=seed)
    scores = gate_scores(data.tokens, work)
    rows: list[dict[str, Any]] = []
    curve: list[dict[str, Any]] = []
    for workload in ("task", "language"):
        group = data.group(workload)
        for transform, found in compare_transforms(
            data.trace.subset(group), {name: score[group] for name, score in scores.items()}, seed=seed
        ).items():
            rows.append(
                {
                    "workload": workload,
                    "transform": transform,
                    **{key: found[key] for key in ("rho_all_layers", "rho_kept_layers", "layers_kept")},
                }
            )
            curve += [
                {"workload": workload, "transform": transform, "layers": n, "layer": layer, "rho": rho}
                for n, (layer, rho) in enumerate(zip(found["order"], found["rho"], strict=True), 1)
            ]
    inputs = {"captured": requests}
    notes = "rho: rank correlation of pairwise distances of signatures and of decode activations"
    path = publish("signature_quality", rows, inputs=inputs, seed=seed, notes=notes, out=out)
    bars(rows, "transform", "rho_all_layers", path.with_suffix(".png"))
    path = publish(
        "layer_mask", curve, inputs=inputs, seed=seed, notes=notes,
        out=out and out.with_name(f"{out.stem}_layer_mask.json"),
    )  # fmt: skip
    lines(
        curve, "layers", ["rho"], path.with_suffix(".png"), by="transform", xlabel="layers kept, greedy order"
    )


if __name__ == "__main__":
    run(signature_quality)
