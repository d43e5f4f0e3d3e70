"""GRACE-MoE's analysis of traffic and load, on observed routes (paper, sections 3, 4.2, 5.3 and 5.4).

Placements are fitted to one half of the requests and judged on steps of 128 tokens of the other half. Traffic
follows the paper's dispatch: a token is sent once to another node, which forwards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.figures.common import (
    Options,
    PaperFigure,
    Rows,
    bar_plot,
    change_pct,
    each_seed,
    line_plot,
)
from eldr_serve.arrays import Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import Topology, hosts_of
from offline.expert_placement.co_activation import co_activation, expert_load
from offline.expert_placement.evaluate import ReplicaRule, evaluate, sample_batches, serve_even
from offline.expert_placement.grace import grace_placement, knee_ratio
from offline.expert_placement.grouping import (
    bounded_groups,
    hierarchical_groups,
    size_bounds,
    spectral_groups,
    utilisation,
)
from offline.expert_placement.locality import local_rule, weighted_rule
from offline.expert_placement.packed_placements import eplb_placement
from offline.expert_placement.replication import add_replicas, hot_experts, load_skew, num_replicas
from offline.scenario import read_calibration_trace

TOKENS = 128  # tokens of a step, the paper's batch size
BATCHES = 100  # held-out steps
TOPOLOGIES = (Topology(ranks=4, nodes=2), Topology(ranks=8, nodes=2))
RATIOS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
DOMAINS = ("code", "math", "medical", "legal")
COPIES = (0, 1, 2, 4, 8, 16)
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ExpertStatistics:
    """Statistics of the experts in the requests that placements are fitted to."""

    affinity: NDArray[np.float64]  # [L, E, E]
    load: NDArray[np.float64]  # [L, E]
    topology: Topology

    @classmethod
    def on(cls, trace: CalibrationTrace, requests: Ints, topology: Topology) -> ExpertStatistics:
        """Compute the statistics of these requests' decode steps."""
        routes, experts = trace.decode_routes(requests), trace.prefill_counts.shape[2]
        return cls(co_activation(routes, experts), expert_load(routes, experts), topology)

    @property
    def linear(self) -> Bools:
        """Return equal blocks of experts: the paper's Vanilla."""
        experts, ranks = self.load.shape[1], self.topology.ranks
        return self.hosts(np.tile(np.arange(experts) * ranks // experts, (len(self.load), 1)))

    def group_experts(self, ratio: float) -> Ints:
        """Return int[L, E], the rank of each expert, hierarchical."""
        return np.stack([hierarchical_groups(a, self.topology, ratio=ratio) for a in self.affinity])

    def hosts(self, rank: Ints) -> Bools:
        """Return bool[L, E, G] with one rank per expert."""
        return np.asarray(rank[..., None] == np.arange(self.topology.ranks))

    def replicate(self, rank: Ints, replicas: int | None) -> Bools:
        """Return bool[L, E, G] with section 4.2's replicas. Their number is dynamic if `replicas` is None."""
        ranks = self.topology.ranks
        layers = zip(self.load, rank, strict=True)
        return np.stack([add_replicas(load, r, ranks, replicas=replicas) for load, r in layers])


def strictness(options: Options) -> Rows:
    """Vary (a) flat groups from uniform to non-uniform; (b) the experts replicated everywhere (Figure 1)."""

    def rows(trace: CalibrationTrace, seed: int) -> Rows:
        topology = TOPOLOGIES[0]
        fit_on, held_out = _halves(trace, seed)
        fit, batches = ExpertStatistics.on(trace, fit_on, topology), _batches(trace, held_out, options, seed)
        experts, ranks = fit.load.shape[1], topology.ranks
        flat = [spectral_groups(a, ranks) for a in fit.affinity]
        arms: list[tuple[str, str, Bools, ReplicaRule, float | None]] = []
        arms.append(("a", "linear", fit.linear, serve_even, None))
        slack = {"uniform": 0.0, "within 30 %": 0.3, "within 100 %": 1.0}
        sizes = {name: size_bounds(experts, ranks, ratio) for name, ratio in slack.items()}
        for name, bounds in (sizes | {"fully non-uniform": (1, experts)}).items():
            grouped = [bounded_groups(a, g, ranks, *bounds) for a, g in zip(fit.affinity, flat, strict=True)]
            arms.append(("a", name, fit.hosts(np.stack(grouped)), serve_even, None))
        primary = fit.group_experts(knee_ratio(fit.affinity, topology))
        by_rank = np.einsum("le,leg->lg", fit.load, fit.hosts(primary))
        heaviest = by_rank.argmax(axis=1)
        partners = (fit.affinity > fit.affinity.mean(axis=(1, 2), keepdims=True)).sum(axis=2)
        for kind, rank_by in (("most active", fit.load), ("most partners", partners)):
            for copies in COPIES:
                hosts = fit.hosts(primary)
                top = np.argsort(-rank_by, axis=1, kind="stable")[:, :copies]
                in_heaviest = np.take_along_axis(primary, top, axis=1) == heaviest[:, None]
                np.put_along_axis(hosts, top[..., None], True, axis=1)
                rule = weighted_rule(fit.load, hosts, seed=seed)
                share = 100 * float(in_heaviest.mean()) if copies else None
                arms.append(("b", f"{copies} {kind}", hosts, rule, share))
        columns_by_arm = [
            traffic_and_load(evaluate(batches, hosts, topology, rule)) for _, _, hosts, rule, _ in arms
        ]
        return [
            {"part": part, "placement": name, **columns, "in_heaviest_pct": share}
            | {"traffic_change_pct": change_pct(columns["copies"], columns_by_arm[0]["copies"])}
            for (part, name, _, _, share), columns in zip(arms, columns_by_arm, strict=True)
        ]

    return mean_over_seeds(options, rows)


def concentration(options: Options) -> Rows:
    """Measure the load of each layer's heaviest group, and how few experts cause it (Figure 3)."""

    def rows(trace: CalibrationTrace, seed: int) -> Rows:
        topology = TOPOLOGIES[0]
        fit = ExpertStatistics.on(trace, _halves(trace, seed)[0], topology)
        primary = fit.group_experts(knee_ratio(fit.affinity, topology))
        result: Rows = []
        for layer, (load, rank) in enumerate(zip(fit.load, primary, strict=True)):
            by_rank = np.bincount(rank, load, minlength=topology.ranks)
            skew = load_skew(load, rank, topology.ranks)
            members = np.flatnonzero(rank == by_rank.argmax())
            hot = hot_experts(load, members, num_replicas(skew, topology.ranks))
            share = 100 * by_rank / by_rank.sum()
            result.append(
                {
                    "layer": layer,
                    "load_skew": skew,
                    "heaviest_group_pct": float(share.max()),
                    "lightest_group_pct": float(share.min()),
                    "experts_in_heaviest": float(len(members)),
                    "replicas": float(num_replicas(skew, topology.ranks)),
                    "hot_experts": float(len(hot)),
                    "hot_load_pct": 100 * float(load[hot].sum() / load[members].sum()),
                }
            )
        return result

    return mean_over_seeds(options, rows)


def ratios(options: Options) -> Rows:
    """Measure affinity in groups and deviation of sizes by non-uniformity ratio, and the knee (Eq. 1)."""

    def rows(trace: CalibrationTrace, seed: int) -> Rows:
        result: Rows = []
        for topology, fit, batches in fit_each_topology(trace, options, seed):
            knee = knee_ratio(fit.affinity, topology)
            for ratio in RATIOS:
                groups = fit.group_experts(ratio)
                columns = traffic_and_load(evaluate(batches, fit.hosts(groups), topology, serve_even))
                layers = zip(fit.affinity, groups, strict=True)
                use, deviation = np.mean([utilisation(a, g, topology.ranks) for a, g in layers], axis=0)
                result.append(
                    {
                        "ranks": name_of(topology),
                        "ratio": ratio,
                        "affinity_within_pct": 100 * float(use),
                        "size_deviation_experts": float(deviation),
                        "knee_ratio": knee,
                    }
                    | columns
                )
        return result

    return mean_over_seeds(options, rows)


# The paper's change of an arm against another, on its three models or their mean, %.
PAPER: dict[str, dict[str, str]] = {
    "HG": {
        "far_forwarded": "-3.3 / -14.6 / -26.0",
        "near_forwarded": "-10.0 / -25.1 / -35.8",
        "load_std": "+37.5 / +75.2 / +11.1",
        "idle": "+13 / +231 / +147",
    },
    "HG+FR, WRR": {"idle": "-42.2 / -39.1 / -35.7"},
    "HG+DR, WRR": {
        "far_forwarded": "mean +17.7",
        "near_forwarded": "mean +2.8",
        "load_std": "-44.8 / -48.0 / -58.3",
        "idle": "-43.3 / -32.3 / -37.8",
    },
    "HG+DR, TAR": {
        "far_forwarded": "-6.3 / -11.6 / -35.2",
        "near_forwarded": "mean -6.7",
        "load_std": "mean +21.4",
        "idle": "mean +5.25",
    },
}
AGAINST = {"HG": "linear", "HG+FR, WRR": "HG", "HG+DR, WRR": "HG", "HG+DR, TAR": "HG+DR, WRR"}


def components(options: Options) -> Rows:
    """Compare grouping, replication and routing, each with its predecessor, and in equal slots (Figure 5)."""

    def rows(trace: CalibrationTrace, seed: int) -> Rows:
        result: Rows = []
        for topology, fit, batches in fit_each_topology(trace, options, seed):
            columns_by_arm = {
                name: (traffic_and_load(evaluate(batches, hosts, topology, rule)), replicas)
                for name, hosts, rule, replicas in _arms(fit, seed)
            }
            for name, (columns, replicas) in columns_by_arm.items():
                base = AGAINST.get(name, "linear")
                row: dict[str, Any] = {"ranks": name_of(topology), "arm": name, "replicas_a_layer": replicas}
                row |= columns | {"against": base}
                for column in ("far_forwarded", "near_forwarded", "load_std_pct", "idle_pct"):
                    key = column.removesuffix("_pct")
                    row[f"{key}_change_pct"] = change_pct(columns[column], columns_by_arm[base][0][column])
                    row[f"paper_{key}_change"] = PAPER.get(name, {}).get(key)
                result.append(row)
        return result

    return mean_over_seeds(options, rows)


def generalisation(options: Options) -> Rows:
    """Measure traffic of placements fitted to other domains, all of GRACE-MoE at 2 x 2 (Figure 6)."""

    def rows(trace: CalibrationTrace, seed: int) -> Rows:
        topology = TOPOLOGIES[0]
        all_domains = set(trace.domains)
        domains = DOMAINS if set(DOMAINS) <= all_domains else sorted(all_domains)
        if len(domains) < 2:
            raise UserInputError(f"the trace of {trace.model} has one domain; a transfer needs two")
        parts = {domain: _halves(trace, seed, domain) for domain in domains}
        fits = {domain: ExpertStatistics.on(trace, fit_on, topology) for domain, (fit_on, _) in parts.items()}
        together = np.concatenate([fit_on for fit_on, _ in parts.values()])
        fits["mixture"] = ExpertStatistics.on(trace, together, topology)
        hosts_by_fit = {
            name: fit.replicate(fit.group_experts(knee_ratio(fit.affinity, topology)), None)
            for name, fit in fits.items()
        }
        result: Rows = []
        for domain, (_, held_out) in parts.items():
            batches = _batches(trace, held_out, options, seed)
            columns_by_fit = {
                name: traffic_and_load(
                    evaluate(batches, hosts, topology, nearest_replica(fits[name], hosts, seed))
                )
                for name, hosts in hosts_by_fit.items()
            }
            linear = traffic_and_load(evaluate(batches, fits[domain].linear, topology, serve_even))["copies"]
            for name, columns in columns_by_fit.items():
                result.append(
                    {
                        "evaluated_on": domain,
                        "fitted_on": name,
                        "copies": columns["copies"],
                        "load_std_pct": columns["load_std_pct"],
                        "against_own_domain_pct": change_pct(
                            columns["copies"], columns_by_fit[domain]["copies"]
                        ),
                        "against_linear_pct": change_pct(columns["copies"], linear),
                    }
                )
        others = [row for row in result if row["fitted_on"] not in ("mixture", row["evaluated_on"])]
        mixture = [row for row in result if row["fitted_on"] == "mixture"]
        for name, group in (("worst of other domains", others), ("worst of mixture", mixture)):
            worst = {key: max(row[key] for row in group) for key in group[0] if not key.endswith("_on")}
            result.append({"evaluated_on": "all", "fitted_on": name} | worst)
        return result

    return mean_over_seeds(options, rows)


def _arms(fit: ExpertStatistics, seed: int) -> list[tuple[str, Bools, ReplicaRule, float]]:
    """Return (name, hosts, rule, replicas per layer) of each arm of figure 5, and its equal-slot variants."""
    topology, experts = fit.topology, fit.load.shape[1]
    primary = fit.group_experts(knee_ratio(fit.affinity, topology))
    one_replica, dynamic = fit.replicate(primary, 1), fit.replicate(primary, None)
    slots = experts + 2 * topology.ranks
    grace, eplb = (
        hosts_of(placement, experts, topology.ranks)
        for placement in (
            grace_placement(fit.affinity, fit.load, slots, topology)[0],
            eplb_placement(fit.load, slots, groups=1, nodes=1, ranks=topology.ranks),
        )
    )
    arms = [
        ("linear", fit.linear, serve_even),
        ("HG", fit.hosts(primary), serve_even),
        ("HG+FR, WRR", one_replica, weighted_rule(fit.load, one_replica, seed=seed)),
        ("HG+DR, WRR", dynamic, weighted_rule(fit.load, dynamic, seed=seed)),
        ("HG+DR, TAR", dynamic, nearest_replica(fit, dynamic, seed)),
        ("equal slots, TAR", grace, nearest_replica(fit, grace, seed)),
        ("EPLB, as many slots", eplb, serve_even),
    ]
    return [(n, hosts, rule, hosts.sum() / len(hosts) - experts) for n, hosts, rule in arms]


def nearest_replica(fit: ExpertStatistics, hosts: Bools, seed: int) -> ReplicaRule:
    return local_rule(fit.load, hosts, fit.topology, seed=seed)


def traffic_and_load(figures: dict[str, float]) -> dict[str, float]:
    """Return the columns of the figures. `copies` is all traffic, per token and layer."""
    columns = ("near_forwarded", "far_forwarded", "load_std_pct", "idle_pct", "experts_worst_rank")
    return {"copies": figures["near_forwarded"] + figures["far_forwarded"]} | {c: figures[c] for c in columns}


def _halves(trace: CalibrationTrace, seed: int, domain: str | None = None) -> tuple[Ints, Ints]:
    """Return requests to fit on, and to judge by."""
    requests = np.flatnonzero([domain in (None, name) for name in trace.domains])
    if len(requests) < 2:
        raise UserInputError(f"the trace has fewer than two requests{f' of {domain}' if domain else ''}")
    order = np.random.default_rng(seed).permutation(requests)
    first, second = np.split(order, [len(order) // 2])
    return first, second


def fit_each_topology(
    trace: CalibrationTrace, options: Options, seed: int
) -> Iterator[tuple[Topology, ExpertStatistics, Ints]]:
    """Yield each topology with statistics from one half of the requests and batches from the other."""
    fit_on, held_out = _halves(trace, seed)
    batches = _batches(trace, held_out, options, seed)
    for topology in TOPOLOGIES:
        yield topology, ExpertStatistics.on(trace, fit_on, topology), batches


def _batches(trace: CalibrationTrace, requests: Ints, options: Options, seed: int) -> Ints:
    return sample_batches(trace, requests, TOKENS, options.requests or BATCHES, seed=seed + 1)


def name_of(topology: Topology) -> str:
    return f"{topology.nodes} x {topology.ranks // topology.nodes}"


def mean_over_seeds(options: Options, make: Callable[[CalibrationTrace, int], Rows]) -> Rows:
    """Return the rows of each trace, with numbers averaged over the seeds."""
    paths = options.all_traces("calibration traces with routes, or published routes")
    traces = {path: read_calibration_trace(path) for path in paths}
    rows: Rows = []
    for path, runs in each_seed(options, traces, lambda path, seed: make(traces[path], seed)):
        for same in zip(*runs, strict=True):
            means = {
                key: float(np.mean([row[key] for row in same])) if isinstance(value, float) else value
                for key, value in same[0].items()
            }
            rows.append({"model": traces[path].model} | means)
    return rows


PANELS = ("model", "ranks")
FIGURES = {
    "fig1": PaperFigure(
        "Strictness of grouping against traffic; which experts to replicate (Figure 1)",
        "non-uniform groups send less than uniform ones, and those less than linear; replicas of highly "
        "active experts balance load better than of widely collaborative ones, until there are too many",
        strictness,
        bar_plot("placement", "load_std_pct", PANELS),
    ),
    "fig3": PaperFigure(
        "Load of the heaviest group and of its experts (Figure 3)",
        "a few groups of a layer carry most tokens, and in the heaviest a few experts do",
        concentration,
        line_plot("layer", "heaviest_group_pct", "lightest_group_pct", "hot_load_pct", panels=PANELS),
    ),
    "ratio": PaperFigure(
        "Non-uniformity ratio: affinity within groups, sizes, traffic and load (Eq. 1, section 4.1)",
        "the knee of U over S is chosen",
        ratios,
        line_plot("size_deviation_experts", "affinity_within_pct", panels=PANELS),
    ),
    "fig5": PaperFigure(
        "Grouping, replication and routing at 2 x 2 and 2 x 4 (Figure 5)",
        "OLMoE / DeepSeek-v2-lite / Qwen3-30B-A3B at 2 x 2, each arm against the one it is added to",
        components,
        bar_plot("arm", "copies", PANELS),
    ),
    "fig6": PaperFigure(
        "Traffic of placements fitted on other domains (Figure 6)",
        "at most +20.1 / +14.2 / +57.1 % against the own data set, at least -17.5 / -18.1 / -14.6 % against "
        "Vanilla; a mixture generalises better than any single data set",
        generalisation,
        bar_plot("{fitted_on} on {evaluated_on}", "against_linear_pct", PANELS),
    ),
}
