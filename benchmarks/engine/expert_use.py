"""Show which experts the demo model uses for real prompts (the paper's Figures 1, 3, 4, 7, 8, 9).

    python -m benchmarks.engine.expert_use NAME --prompts DIR

- activation_by_domain (1): each domain over-activates certain experts. The result is the decode activation of
  each expert by domain, relative to the mean over domains, at the layer where the domains differ most.
  `own_experts` is the number of the layer's experts that the domain uses more than any other domain.
  `own_to_mean_ratio` is the domain's use of these experts over the mean of the domains.
- prefill_decode (3): prefill shows which experts decode will use. One correlation is over experts (normalised
  activation pooled over the domains, with a point for each expert of each layer). The other is over requests:
  rho, the rank correlation of pairwise distances (the paper's Eq. 1).
- same_domain (4): batches of one domain activate fewer experts than mixed batches. Batches are drawn at
  random, each request at a random decode step of its real routes. A domain counts as often as it occurs.
  Domains with fewer requests than two batches are left out of that batch size.
- signature_quality (7, 8): rho of each transform of the counts with all layers, and with the layers that
  greedy selection keeps. `layer_mask.json` has the curve over the number of layers. Layers are selected and
  measured on the same requests, as in the paper. Held-out rho is in `prefill_decode`.
- signature_space (9): signatures on their first two principal components with the balanced centroids.
  `purity` is the share of requests in a cluster that belong to its main domain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr

from benchmarks.lib import options
from benchmarks.lib.captured_routes import TASKS, CapturedRoutes, load_or_capture
from eldr_serve.commands.run import run
from eldr_serve.experts.fitting.quality import signature_quality as rho_of
from eldr_serve.experts.fitting.table import compare_transforms, fit_signature, fit_table
from eldr_serve.experts.signature import DEFAULT_TRANSFORM
from loadgen.plots import bars, lines, save
from loadgen.plots import signature_space as draw_space
from loadgen.results import publish
from offline.simulation.requests import expert_bits

BENCHMARKS = {
    "activation_by_domain": "default",
    "prefill_decode": "default",
    "same_domain": "default",
    "signature_quality": "default",
    "signature_space": "default",
}

LANGUAGES = ("en", "zh", "ru", "fr", "es", "de", "ar", "ja")
WORKLOADS = ("task", "language")
SIZES = (4, 8, 16, 32, 64, 128)  # batch sizes
DRAWS = 1000  # batches drawn for each size and kind
CLUSTERS = 8  # one per decode worker
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """Result of one measurement: a table, a function that draws it at a PNG's path, and notes."""

    rows: Rows
    draw: Callable[[Path], None]
    notes: str
    inputs: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # name of a second result


def _command(measure: Callable[[CapturedRoutes, int], list[Result]]) -> Callable[..., None]:
    """Make a command that publishes and draws the results of a measurement."""

    def command(
        prompts: options.Prompts = options.PROMPTS,
        requests: options.CapturedRequests = 2400,
        work: options.Work = options.WORK,
        seed: options.Seed = 0,
        out: options.Out = None,
    ) -> None:
        data = load_or_capture(prompts, work, requests=requests, seed=seed)
        for result in measure(data, seed):
            inputs = {"captured": requests} | result.inputs
            file = out.with_stem(f"{out.stem}_{result.name}") if out and result.name else out
            name = result.name or measure.__name__
            path = publish(name, result.rows, inputs=inputs, seed=seed, notes=result.notes, out=file)
            result.draw(path.with_suffix(".png"))

    command.__name__, command.__doc__ = measure.__name__, measure.__doc__
    return command


@_command
def activation_by_domain(data: CapturedRoutes, seed: int) -> list[Result]:
    """Measure decode activation of experts by domain."""
    trace = data.trace
    domains = np.array(trace.domains)
    rows: Rows = []
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = zip(figure.subplots(2, 1), WORKLOADS, (TASKS, LANGUAGES), strict=True)
    for axes, workload, names in panels:
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
            is_own = owner == number
            share_in_layer = share[number, layer]
            row: dict[str, Any] = {"workload": workload, "domain": name, "layer": layer}
            row |= {"requests": int((domains == name).sum()), "own_experts": int(is_own.sum())}
            row["own_to_mean_ratio"] = float(relative[number, layer][is_own].mean()) if is_own.any() else 0.0
            rows.append(
                row | {"share_on_own_experts": float(share_in_layer[is_own].sum() / share_in_layer.sum())}
            )
    return [Result(rows, partial(save, figure), "decode counts of the demo model on real prompts")]


def _activation(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return float[L, E]: the share of each expert in a layer's choices, mean over requests."""
    share = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1)
    return np.asarray(share.mean(axis=0))


@_command
def prefill_decode(data: CapturedRoutes, seed: int) -> list[Result]:
    """Correlate prefill with decode activation of experts."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    rows: Rows = []
    for axes, workload in zip(figure.subplots(1, 2), WORKLOADS, strict=True):
        trace = data.trace.subset_without_routes(data.group(workload))
        domains = np.array(trace.domains)
        points = [
            np.mean([_activation(counts[domains == d]) for d in sorted(set(domains))], axis=0).reshape(-1)
            for counts in (trace.prefill_counts, trace.decode_counts)
        ]
        fit, held_out = data.split(workload, 0.5, seed)
        spec = fit_signature(data.trace.subset_without_routes(fit), seed=seed)
        test = data.trace.subset_without_routes(held_out)
        row = {"workload": workload, "requests": len(trace.ids), "pearson": float(pearsonr(*points)[0])}
        rho = rho_of(spec.encode(test.prefill_counts), test.decode_probability, seed=seed)
        rows.append(row | {"spearman": float(spearmanr(*points)[0]), "rho_held_out": rho})
        axes.scatter(*points, s=8, alpha=0.6)
        axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
        axes.set(xlabel="prefill activation", ylabel="decode activation", title=workload)
    return [Result(rows, partial(save, figure), "each point one expert of one layer, mean over domains")]


@_command
def same_domain(data: CapturedRoutes, seed: int) -> list[Result]:
    """Count active experts of same-domain and mixed batches."""
    num_layers, num_experts = data.trace.prefill_counts.shape[1:]
    rng = np.random.default_rng(seed)
    domains = np.array(data.trace.domains)
    rows: Rows = []
    for workload in WORKLOADS:
        members = data.group(workload)
        bits = {int(i): expert_bits(data.routes(int(i)), num_experts) for i in members}

        def active(batch: Any, bits: dict[int, Any] = bits) -> float:
            steps = [bits[int(i)][rng.integers(len(bits[int(i)]))] for i in batch]
            return float(np.bitwise_count(np.bitwise_or.reduce(steps)).sum() / num_layers)

        names, sizes = np.unique(domains[members], return_counts=True)
        for size in SIZES:
            large = sizes >= 2 * size
            if not large.any():
                continue
            weights = sizes[large] / sizes[large].sum()
            pool = members[np.isin(domains[members], names[large])]
            by_domain = {name: members[domains[members] == name] for name in names[large]}
            same = [
                active(rng.choice(by_domain[rng.choice(names[large], p=weights)], size, replace=False))
                for _ in range(DRAWS)
            ]
            mixed = [active(rng.choice(pool, size, replace=False)) for _ in range(DRAWS)]
            rows.append(
                {
                    "workload": workload,
                    "batch_size": size,
                    "domains": int(large.sum()),
                    "same_domain": float(np.mean(same)),
                    "mixed": float(np.mean(mixed)),
                    "change_pct": 100 * float(np.mean(same) / np.mean(mixed) - 1),
                }
            )
    draw = partial(lines, rows, "batch_size", ["same_domain", "mixed"])
    notes = "mean distinct experts of an MoE layer in one decode step"
    return [Result(rows, draw, notes, {"draws": DRAWS})]


@_command
def signature_quality(data: CapturedRoutes, seed: int) -> list[Result]:
    """Measure rho by transform and by number of layers."""
    rows: Rows = []
    curve: Rows = []
    for workload in WORKLOADS:
        trace = data.trace.subset_without_routes(data.group(workload))
        for transform, quality in compare_transforms(trace, seed=seed).items():
            label = {"workload": workload, "transform": transform}
            rows.append(label | {k: quality[k] for k in ("rho_all_layers", "rho_kept_layers", "layers_kept")})
            curve += [
                label | {"layers": n, "layer": layer, "rho": rho}
                for n, (layer, rho) in enumerate(zip(quality["order"], quality["rho"], strict=True), 1)
            ]
    notes = "rho: rank correlation of pairwise distances of signatures and of decode activations"
    draw_curve = partial(lines, curve, "layers", ["rho"], by="transform", xlabel="layers kept, greedy order")
    return [
        Result(rows, partial(bars, rows, "transform", "rho_all_layers"), notes),
        Result(curve, draw_curve, notes, name="layer_mask"),
    ]


@_command
def signature_space(data: CapturedRoutes, seed: int) -> list[Result]:
    """Cluster the signatures of both workloads and plot them."""
    rows: Rows = []
    figures = {}
    for workload in WORKLOADS:
        trace = data.trace.subset_without_routes(data.group(workload))
        table, report = fit_table(trace, CLUSTERS, seed=seed)
        by_domain = np.array(list(report["clusters_by_domain"].values()))
        rows += [
            {"workload": workload, "cluster": c, "requests": int(members.sum())}
            | {"main_domain": table.domains[c], "purity": float(members.max() / members.sum())}
            for c, members in enumerate(by_domain.T)
        ]
        figures[workload] = draw_space(trace, table)

    def draw(path: Path) -> None:
        for workload, figure in figures.items():
            save(figure, path.with_name(f"{path.stem}_{workload}.png"))

    notes = f"balanced K-means over {DEFAULT_TRANSFORM} signatures with the greedy layer mask"
    return [Result(rows, draw, notes, {"clusters": CLUSTERS})]


if __name__ == "__main__":
    run(activation_by_domain, prefill_decode, same_domain, signature_quality, signature_space)
