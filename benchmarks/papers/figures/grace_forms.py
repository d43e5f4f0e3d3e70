"""GRACE-MoE's grouping and polling weights: the paper's form beside ours, on observed routes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.papers.figures.common import Options, PaperFigure, Rows, bar_plot, change_pct
from benchmarks.papers.figures.grace import (
    PANELS,
    Bools,
    fit_each_topology,
    mean_over_seeds,
    name_of,
    nearest_replica,
    traffic_and_load,
)
from eldr_serve.arrays import Floats
from eldr_serve.experts.calibration_trace import CalibrationTrace
from offline.expert_placement.evaluate import ReplicaRule, evaluate, serve_even
from offline.expert_placement.grace import knee_ratio
from offline.expert_placement.grace_paper import PAPER_GROUPING, controlled_groups, polling_weights_as_written
from offline.expert_placement.grouping import OUR_GROUPING, hierarchical_groups
from offline.expert_placement.locality import polling_weights, route_weighted

GROUPINGS = {
    "ours": OUR_GROUPING,
    "labels of k-means": replace(OUR_GROUPING, labels="kmeans"),
    "Algorithm 2 as written": replace(OUR_GROUPING, bound=controlled_groups, least_slack=1),
    "as in the paper": PAPER_GROUPING,
}


def forms(options: Options) -> Rows:
    """Compare groupings before and after replication, and the two predictions behind the polling weights."""

    def rows(trace: CalibrationTrace, seed: int) -> Rows:
        result: Rows = []
        for topology, fit, batches in fit_each_topology(trace, options, seed):
            arms: list[tuple[str, str, Bools, ReplicaRule]] = []
            for name, grouping in GROUPINGS.items():
                ratio = knee_ratio(fit.affinity, topology, grouping=grouping)
                groups = [
                    hierarchical_groups(matrix, topology, ratio=ratio, grouping=grouping)
                    for matrix in fit.affinity
                ]
                primary = np.stack(groups)
                replicated = fit.replicate(primary, None)
                arms.append(("grouping", name, fit.hosts(primary), serve_even))
                arms.append(("all", name, replicated, nearest_replica(fit, replicated, seed)))
                if name == "ours":
                    weights = polling_weights(fit.load, replicated)
                    arms.append(("polling", name, replicated, _weighted(weights, seed)))
                    layers = zip(fit.load, primary, replicated, strict=True)
                    weights = np.stack([polling_weights_as_written(*layer) for layer in layers])
                    arms.append(("polling", "as in the paper", replicated, _weighted(weights, seed)))
            columns = [traffic_and_load(evaluate(batches, hosts, topology, rule)) for *_, hosts, rule in arms]
            base = {part: c for (part, form, *_), c in zip(arms, columns, strict=True) if form == "ours"}
            for (part, form, *_), column in zip(arms, columns, strict=True):
                row = {"ranks": name_of(topology), "part": part, "form": form} | column
                for key in ("copies", "load_std_pct", "idle_pct"):
                    row[f"{key.removesuffix('_pct')}_change_pct"] = change_pct(column[key], base[part][key])
                result.append(row)
        return result

    return mean_over_seeds(options, rows)


def _weighted(weights: Floats, seed: int) -> ReplicaRule:
    """Return the rule that draws replicas in proportion to weights [L, G] (Algorithm 3)."""
    rng = np.random.default_rng(seed)
    return lambda layer, experts, _, hosts: route_weighted(experts, hosts, weights[layer], rng)


FIGURES = {
    "forms": PaperFigure(
        "The paper's grouping (4.1, Algorithm 2) and polling weights (Equation 3) beside ours",
        "k-means labels, groups by total affinity, and W_max / (1 + n) for each instance",
        forms,
        bar_plot("{form}, {part}", "copies", PANELS),
    ),
}
