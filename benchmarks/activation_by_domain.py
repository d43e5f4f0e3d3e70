"""Each domain over-activates experts of its own (counterpart of the paper's Figure 1).

    python -m benchmarks.activation_by_domain --prompts DIR

Decode activation of each expert by domain, relative to the mean over domains, at the layer where the
domains differ most. Read `own_experts`: how many of the layer's experts the domain uses more than any
other does, and `own_excess`: by how much it uses those more than the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.harness import options
from benchmarks.harness.capture import TASKS, captured
from tools.cli import run
from tools.plots import save
from tools.results import publish

LANGUAGES = ("en", "zh", "ru", "fr", "es", "de", "ar", "ja")


def activation_by_domain(
    prompts: options.Prompts = options.PROMPTS,
    requests: options.Captured = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Measure decode activation of experts by domain."""
    trace = captured(prompts, work, requests=requests, seed=seed).trace
    domains = np.array(trace.domains)
    rows: list[dict[str, Any]] = []
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, (workload, names) in zip(
        figure.subplots(2, 1), {"task": TASKS, "language": LANGUAGES}.items(), strict=True
    ):
        present = [name for name in names if (domains == name).any()]
        share = np.stack([_activation(trace.decode_counts[domains == name]) for name in present])
        relative = share / np.maximum(share.mean(axis=0), 1e-9)
        layer = int(share.std(axis=0).sum(axis=1).argmax())
        owner = relative[:, layer].argmax(axis=0)
        order = np.lexsort((-relative[:, layer].max(axis=0), owner))
        axes.imshow(np.maximum(relative[:, layer][:, order], 1), aspect="auto", cmap="Blues", vmin=1, vmax=4)
        axes.set(yticks=range(len(present)), yticklabels=present, xlabel=f"expert of layer {layer}, by owner")
        axes.set_title(f"{workload}: activation over the mean of the domains (white: below, dark: 4x)")
        for number, name in enumerate(present):
            own = owner == number
            rows.append(
                {
                    "workload": workload,
                    "domain": name,
                    "layer": layer,
                    "requests": int((domains == name).sum()),
                    "own_experts": int(own.sum()),
                    "own_excess": float(relative[number, layer][own].mean()) if own.any() else 0.0,
                    "share_on_own_experts": float(
                        share[number, layer][own].sum() / share[number, layer].sum()
                    ),
                }
            )
    path = publish(
        "activation_by_domain", rows, inputs={"captured": requests}, seed=seed, out=out,
        notes="decode counts of the demo model on real prompts",
    )  # fmt: skip
    save(figure, path.with_suffix(".png"))


def _activation(counts: NDArray[Any]) -> NDArray[np.float64]:
    """float[L, E] share of a layer's choices, mean over requests."""
    share = counts / counts.sum(axis=2, keepdims=True)
    return np.asarray(share.mean(axis=0))


if __name__ == "__main__":
    run(activation_by_domain)
