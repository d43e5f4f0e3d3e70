"""Draw the plots of README.md and of the pages in docs, from benchmarks/results.

    python -m benchmarks.lib.plots

The title of a plot is its one message, and p50 stands beside p99. A policy has the same colour in all plots.
Load balancers are grey, and the paper's figure is dashed.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.lib.normalised_time import NORMALISED
from benchmarks.lib.synthetic import LAYERS
from benchmarks.lib.tables import ROOT, Rows, has_result
from loadgen.figures import BASELINES
from loadgen.plots import POLICY_COLOURS, policy_colour, save
from loadgen.results import read_rows

PLOTS = ROOT / "docs/plots"
_GREY = "0.65"
_SHADES = ("C9", "C0", "C2", "C4")  # colours of batches, small to large
_WORKLOADS = ("all", "language", "task")
_BASELINE = "TPOT {} against the best balancer, %"
_PAPER = {"language": (-5.9, -10.0), "task": (-7.0, -13.9)}  # locality-band's medians, Figures 11 and 12


def two_panels(title: str) -> tuple[Figure, Any]:
    """Return a figure with two panels under one title."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(1, 2)


def tpot() -> None:
    """Draw both percentiles, live beside replayed."""
    title = "marginal-cost: median TPOT falls live and replayed; p99 rises live, falls replayed but on tasks"
    figure, panels = two_panels(title)
    live = [row for row in read_rows("live") if row["clock"] == NORMALISED]
    replayed = [row for row in read_rows("decode_replay") if row["workers"] == 8]
    groups = [
        (f"{workload}\n{how}", {row[key]: row for row in rows if row["workload"] == workload}, form)
        for how, rows, key, form in (
            ("live", live, "policy", "tpot_{}_ms_change_pct"),
            ("replayed", replayed, "arm", "{}_change_pct"),
        )
        for workload in _WORKLOADS
    ]
    for axes, percentile in zip(panels, ("p50", "p99"), strict=True):
        for x, (name, by_policy, form) in enumerate(groups):
            for policy, row in by_policy.items():
                change = row.get(form.format(percentile)) or 0.0  # the best balancer has no change
                if policy in POLICY_COLOURS:
                    offset = 0.17 if policy == "locality-band" else -0.17
                    axes.bar(x + offset, change, 0.32, color=policy_colour(policy), label=policy)
                elif policy in BASELINES:
                    axes.plot(x, change, "_", color=_GREY, markersize=18, label="load balancers")
            for paper in _PAPER.get(name.split("\n")[0], ()) if percentile == "p50" else ():
                axes.hlines(paper, x - 0.4, x + 0.4, "black", "dashed", lw=0.8, label="locality-band, paper")
        axes.set_xticks(range(len(groups)), [name for name, _, _ in groups], fontsize=8)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_ylabel(_BASELINE.format(percentile))
    _save(figure, "tpot")


def real_routes() -> None:
    """Draw the policies on published routes of real models, with the step costs of an H100."""
    figure, panels = two_panels(
        "On real routes marginal-cost lowers the median and p99; with tail_power 1 p99 may rise"
    )
    rows = read_rows("tail_price")
    points = list(dict.fromkeys((row["workload"], row["workers"]) for row in rows))
    bar_styles = {"marginal-cost,tail_power=16": (-0.17, "C0"), "marginal-cost,tail_power=1": (0.17, "C9")}
    for axes, percentile in zip(panels, ("p50", "p99"), strict=True):
        column = f"tpot_{percentile}_change_pct"
        for row in rows:
            x, change = points.index((row["workload"], row["workers"])), row[column]
            if row["policy"] in bar_styles:
                offset, colour = bar_styles[row["policy"]]
                spread = [[change - row[f"{column}_low"]], [row[f"{column}_high"] - change]]
                axes.bar(x + offset, change, 0.32, yerr=spread, color=colour, label=row["policy"])
            elif row["policy"] in BASELINES:
                axes.plot(x, change, "_", color=_GREY, markersize=18, label="load balancers")
        names = [f"{name.replace('.held_out', ' held out')}, {workers}" for name, workers in points]
        axes.set_xticks(range(len(points)), names, fontsize=7, rotation=20, ha="right")
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_ylabel(_BASELINE.format(percentile))
    _save(figure, "real_routes")


def at_scale() -> None:
    """Draw TPOT by the number of workers, from copies of observed requests and from mixtures."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle("Against shortest-queue the gain remains up to 1,024 workers", size=11)
    panels = figure.subplots(2, 2)
    colours = {"locality-band": "C1", "marginal-cost,tail_power=16": "C0", "marginal-cost,tail_power=1": "C9"}
    for name, dashes in (("at_scale", "-"), ("at_scale_mixed", "--")):
        requests = "copies" if name == "at_scale" else "mixtures"
        results = read_rows(name)
        sizes = sorted({row["workers"] for row in results})
        for trace, policy in dict.fromkeys((row["arrivals"], row["policy"]) for row in results):
            rows = [row for row in results if (row["arrivals"], row["policy"]) == (trace, policy)]
            by_workers = {row["workers"]: row for row in rows}  # the last one of several divisions
            for axes, percentile in zip(panels[int("mooncake" in trace)], ("p50", "p99"), strict=True):
                if policy in colours:
                    column = f"tpot_{percentile}_change_pct"
                    y = [row[column] for row in by_workers.values()]
                    spread = [
                        [
                            sign * (row.get(column + end, row[column]) - row[column])
                            for row in by_workers.values()
                        ]
                        for end, sign in (("_low", -1), ("_high", 1))
                    ]
                    label = f"{policy.replace(',tail_power=', ', power ')}, {requests}"
                    axes.errorbar(
                        [*by_workers], y, spread, fmt=f"o{dashes}", color=colours[policy], label=label
                    )
                axes.set(xlabel=f"workers, arrivals of {trace.partition('_')[0].title()}", xscale="log")
                axes.set_ylabel(f"change of TPOT {percentile}, %")
                axes.set_xticks(sizes, sizes)
                axes.minorticks_off()
                axes.axhline(0, color="black", linewidth=0.6)
    _save(figure, "at_scale")


def curves(name: str, title: str, rows: Rows, axis: tuple[str, str], forms: tuple[str, str], by: str) -> None:
    """Draw TPOT p50 and p99 by `axis` (column, label), one line per policy."""
    figure, panels = two_panels(title)
    x, xlabel = axis
    column, ylabel = forms
    for axes, percentile in zip(panels, ("p50", "p99"), strict=True):
        for policy in dict.fromkeys(row[by] for row in rows):
            points = [(row[x], row[column.format(percentile)]) for row in rows if row[by] == policy]
            label = policy if policy in POLICY_COLOURS else "load balancers"
            axes.plot(
                *zip(*points, strict=True), "o-", color=policy_colour(policy), markersize=3, label=label
            )
        axes.set(xlabel=xlabel, ylabel=ylabel.format(percentile), xscale="log")
        axes.set_xticks(*[sorted({round(row[x]) for row in rows})] * 2)
        axes.minorticks_off()
    _save(figure, name)


def overload() -> None:
    """Draw throughput against TPOT above saturation."""
    title = (
        "At 120 % of slot capacity marginal-cost serves most without a step barrier, the KV balancers with it"
    )
    figure, panels = two_panels(title)
    for row in read_rows("together_policies"):
        load, barrier = row["workload"].split(", ")
        if load != "load 1.2":
            continue
        label = row["policy"] if row["policy"] in POLICY_COLOURS else "load and KV balancers"
        for axes, percentile in zip(panels, ("p50", "p99"), strict=True):
            point = row[f"tpot_{percentile}_ms"], row["output_tokens_per_s"]
            mark = "s" if barrier == "barrier" else "o"
            axes.plot(*point, mark, color=policy_colour(row["policy"]), label=label)
            axes.set(xlabel=f"TPOT {percentile}, ms (squares: step barrier)", ylabel="throughput, tokens/s")
    _save(figure, "overload")


def experts() -> None:
    """Draw the active experts of a batch, and a layer's time by active experts."""
    figure, (batches, layer) = two_panels(
        "A batch of one language activates a third fewer experts, and a layer's time follows active experts"
    )
    same_domain, layer_latency = read_rows("same_domain"), read_rows("moe_layer_latency")
    for workload, mark in (("language", "o"), ("task", "s")):
        rows = [row for row in same_domain if row["workload"] == workload]
        sizes = [row["batch_size"] for row in rows]
        for column, colour, label in (("same_domain", "C0", "one {}"), ("mixed", _GREY, "mixed {}s")):
            values, named = [row[column] for row in rows], label.format(workload)
            batches.plot(sizes, values, f"{mark}-", color=colour, label=named)
    batches.set(xlabel="batch size, requests", ylabel="active experts of 64")
    for size, shade in ((16, "C0"), (32, "C9"), (64, "C2")):
        rows = [row for row in layer_latency if row["batch_size"] == size]
        times = [row["latency_p50_ms"] for row in rows]
        layer.plot([row["active_experts"] for row in rows], times, "o-", color=shade, label=f"batch {size}")
    layer.set(xlabel="active experts of 128", ylabel="time of a layer p50, ms", ylim=(0, None))
    _save(figure, "experts")


def step_cost() -> None:
    """Draw a step of Qwen3-30B-A3B on a GPU by active experts, beside NVIDIA's tables."""
    rows = read_rows("gpu_step_cost")
    figure = Figure(figsize=(6, 3.9), layout="constrained")
    figure.suptitle("On a GPU, too, a decode step's time follows its active experts", fontsize=11)
    axes = figure.subplots()
    points = [row for row in rows if row["level"] == "point"]
    for size, shade in zip(dict.fromkeys(row["batch_size"] for row in points), _SHADES, strict=False):
        of_batch = [row for row in points if row["batch_size"] == size]
        x, y = ([row[key] for row in of_batch] for key in ("active_experts", "forward_p50_ms"))
        axes.plot(x, y, "o-", color=shade, markersize=3, label=f"batch {size}")
    layers = [row for row in rows if row["level"] == "package" and row["of"].endswith("MoE layers")]
    for row, dashes in zip(layers, ("dashed", "dotted"), strict=True):
        ends = [8, 128]
        times = [row["fixed_ms"] + LAYERS * row["per_expert_us"] * end / 1000 for end in ends]
        axes.plot(ends, times, color="black", lw=0.8, ls=dashes, label=f"{row['of']}, aiconfigurator")
    axes.set(xlabel="active experts of 128, each layer", ylabel="forward pass p50, ms", ylim=(0, None))
    _save(figure, "gpu_step_cost")


def _save(figure: Figure, name: str) -> None:
    """Save the figure with one legend for all panels, each name once."""
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    lines = {name: handle for handles, names in legends for handle, name in zip(handles, names, strict=True)}
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=3 if len(lines) > 4 else 4, fontsize=8
    )
    save(figure, PLOTS / f"{name}.png")


def main() -> None:
    """Draw all plots."""
    real_routes()
    at_scale()
    tpot()
    experts()
    overload()
    if has_result("gpu_step_cost"):
        step_cost()
    curves(
        "rates",
        "On languages the median falls further as the rate grows; p99 falls less surely",
        [row for row in read_rows("rates") if row["workload"] == "language" and row["arm"] != "domain"],
        ("rate_per_s", "requests/s, 8 workers, replayed"),
        ("tpot_{}_ms", "TPOT {}, ms"),
        "arm",
    )
    curves(
        "workers",
        "Simulated, languages: marginal-cost gains in both percentiles up to 1,024 workers",
        [row for row in read_rows("eldr_pool-size") if row["workload"] == "language"],
        ("decode_workers", "decode workers"),
        ("tpot_{}_change_pct", "TPOT {} against round-robin, %"),
        "policy",
    )


if __name__ == "__main__":
    main()
