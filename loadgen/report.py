"""The report of a comparison: one self-contained HTML page, and the same table for a terminal."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure

from eldr_serve.dashboard import style
from loadgen.figures import changes_by_round, measured_records, step_figure_by_round
from loadgen.plots import MetricChange, changes, policy_colour, render
from loadgen.results import cell
from loadgen.trial import Trial

_PAGES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)

_SHOWN = {
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "end_p50_ms": "end to end p50, ms",
    "end_p99_ms": "end to end p99, ms",
    "handover_p50_ms": "hand-over p50, ms",
    "handover_p99_ms": "hand-over p99, ms",
    "goodput_rps": "goodput, requests/s",
}

_STEPS = {
    "active_experts": "experts per decode step",
    "engine_ms_per_token": "step time per token, ms",
    "experts_per_token": "experts per step / batch size",
    "step_ms_per_token": "step that a token waits for, ms",
    "h100_ms_per_token": "predicted step time per token on an H100, ms",
}
_COUNTED = ("requests", "failures", "late_p99_ms", "batch_size", "most_similar_worker_share")


def figures_table(rows: list[dict[str, Any]], keys: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return one row per figure and one column per policy: value, interval, change against the baseline.

    Args:
        rows: rows of loadgen.figures.
        keys: the figures, in this order; by default all that the rows have.
    """
    formats: dict[str, tuple[str, Callable[[dict[str, Any], str], str]]] = {
        **{key: (name, _format_step) for key, name in _STEPS.items()},
        **{key: (name, _format_with_interval) for key, name in _SHOWN.items()},
        **{key: (key.replace("_", " "), _format_number) for key in _COUNTED},
    }
    return [
        {"figure": formats[key][0]} | {row["policy"]: formats[key][1](row, key) for row in rows}
        for key in keys or [key for key in formats if any(key in row for row in rows)]
    ]


def placement_effects(rows: list[dict[str, Any]], trials: list[Trial], clock: str = "engine time") -> Figure:
    """Return a plot of the effects of placement: changes of experts and of time per step, by policy.

    Args:
        rows: rows of loadgen.figures.
        trials: trials of the comparison.
        clock: name of the time that engines report: "CPU time" on CPUs, else "engine time".
    """
    panels = []
    for key, title in (
        ("active_experts", "Experts read per decode step"),
        ("engine_ms_per_token", f"{clock} per token"),
    ):
        by_policy = []
        for row in rows:
            if row.get(f"{key}_change_pct") is None:
                continue
            value, *ends = (row[f"{key}_change_pct{end}"] for end in ("", "_low", "_high"))
            low, high = (math.nan if end is None else end for end in ends)
            each = changes_by_round(row["policy"], row[f"{key}_baseline"], trials, key)
            by_policy.append(MetricChange(row["policy"], value, low, high, each))
        against = next((row[f"{key}_baseline"] for row in rows if f"{key}_baseline" in row), "the baseline")
        panels.append((title[0].upper() + title[1:], f"change against {against}, %", by_policy))
    return changes(panels)


def render_page(
    title: str,
    rows: list[dict[str, Any]],
    explanation: str,
    pictures: Sequence[tuple[str, Figure]],
    settings: dict[str, Any],
    *,
    sentences: Sequence[str] = (),
    lead: tuple[str, Figure] | None = None,
    remarks: Sequence[str] = (),
    verdict: str = "",
    bad: bool = False,
) -> str:
    """Render a self-contained HTML page without external resources.

    Args:
        rows: rows of the table. The keys of the first row are the columns.
        sentences: paragraphs at the top.
        lead: picture after the sentences, with its description.
        remarks: sentences between picture and table.
        verdict: sentence after the remarks. If `bad`, it is shown first and in red.
    """
    return _PAGES.get_template("report.html").render(
        style=style(),
        title=title,
        sentences=sentences,
        lead=lead and (lead[0], _encode_png(lead[1])),
        remarks=remarks,
        verdict=verdict,
        bad=bad,
        rows=_format_rows(rows),
        explanation=explanation,
        pictures=[(heading, _encode_png(figure)) for heading, figure in pictures],
        settings=_format_rows([{"setting": key, "value": value} for key, value in settings.items()]),
    )


def html_report(
    rows: list[dict[str, Any]],
    trials: list[Trial],
    *,
    sentences: Sequence[str],
    remarks: Sequence[str],
    verdict: str,
    bad: bool,
    notes: str,
    settings: dict[str, Any],
    warm_up_s: int,
    seconds: int,
) -> str:
    """Return the page of a comparison.

    Args:
        rows: rows of loadgen.figures.
        sentences, remarks: results of step_sentences and client_sentences of loadgen.sentences.
        verdict: whether the run can be trusted.
    """
    policies = [row["policy"] for row in rows]
    return render_page(
        "Policies compared",
        figures_table(rows),
        "[low, high]: 95 % interval. Below it, the difference in % to the best load balancer in that figure, "
        "with its own interval: an interval that contains 0 shows no difference. The best of several "
        "equivalent balancers is biased low; 'to all' is the difference to all their requests. " + notes,
        [
            ("Time per output token", _percentiles(rows, "tpot")),
            ("Distributions", distributions(policies, trials, warm_up_s, seconds)),
            ("Experts of a decode step", _active(policies, trials)),
            ("Load over time", load_over_time(policies, trials)),
        ],
        settings,
        sentences=sentences,
        lead=("What placement changes in the engines", placement_effects(rows, trials)),
        remarks=remarks,
        verdict=verdict,
        bad=bad,
    )


def _format_rows(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{key: cell(value, ".2f") for key, value in row.items()} for row in rows]


def _encode_png(figure: Figure) -> str:
    return base64.b64encode(render(figure, dpi=110)).decode()


def _format_with_interval(row: dict[str, Any], key: str) -> str:
    if row.get(key) is None:
        return cell(None)
    value, low, high = (cell(row[f"{key}{end}"], ".2f") for end in ("", "_low", "_high"))
    text = f"{value} [{low}, {high}]"
    if row.get(f"{key}_change_pct") is None:
        return text
    change, low, high = (row[f"{key}_change_pct{end}"] for end in ("", "_low", "_high"))
    if low is None or high is None:
        return text
    text = f"{text}\n{change:+.1f} % [{low:+.1f}, {high:+.1f}]"
    pooled = row.get(f"{key}_pooled_change_pct")
    return text if pooled is None else f"{text}\n{pooled:+.1f} % to all"


def _format_number(row: dict[str, Any], key: str) -> str:
    return cell(row[key], ".2f")


def _format_step(row: dict[str, Any], key: str) -> str:
    text = cell(row.get(key), ".2f")
    if row.get(f"{key}_change_pct") is None:
        return text
    change, low, high = (row[f"{key}_change_pct{end}"] for end in ("", "_low", "_high"))
    return f"{text}\n{change:+.1f} %" + ("" if low is None or high is None else f" [{low:+.1f}, {high:+.1f}]")


def _figure(columns: int, rows: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def distributions(policies: list[str], trials: list[Trial], warm_up_s: int, seconds: int) -> Figure:
    """Return a figure with ECDFs of TPOT and of TTFT by policy."""
    figure, ((tpot, ttft),) = _figure(2)
    for axes, key in ((tpot, "tpot"), (ttft, "ttft")):
        for policy in policies:
            records = measured_records(policy, trials, warm_up_s, seconds)
            values = [1000 * r[f"{key}_s"] for _, r in records if r.get(f"{key}_s") is not None]
            if values:
                axes.ecdf(values, label=policy)
        axes.set(xlabel=f"{key.upper()}, ms", ylabel="share of requests")
        axes.legend()
    return figure


def _percentiles(rows: list[dict[str, Any]], key: str) -> Figure:
    figure, axes_grid = _figure(2)
    for axes, q in zip(axes_grid[0], ("p50", "p99"), strict=True):
        name = f"{key}_{q}_ms"
        for index, row in enumerate(rows):
            if row[name] is None:
                continue
            low, high = (row[f"{name}_{end}"] for end in ("low", "high"))
            axes.errorbar(
                index,
                row[name],
                yerr=[[max(0, row[name] - low)], [max(0, high - row[name])]],
                fmt="o",
                capsize=5,
            )
        axes.set(ylabel=f"{key.upper()} {q}, ms", xticks=range(len(rows)))
        axes.set_xticklabels([row["policy"] for row in rows], rotation=20)
    return figure


def _active(policies: list[str], trials: list[Trial]) -> Figure:
    figure, ((axes,),) = _figure(1)
    active = {policy: step_figure_by_round(policy, trials, "active_experts").values() for policy in policies}
    for index, policy in enumerate(policies):
        if values := list(active[policy]):
            axes.bar(index, float(np.mean(values)), color=policy_colour(policy), alpha=0.5)
            axes.plot([index] * len(values), values, "k.", label="one trial" if not index else None)
    axes.set(ylabel="experts per decode step, mean over layers", xticks=range(len(policies)))
    axes.set_xticklabels(policies)
    if not any(active.values()):
        axes.text(0.5, 0.5, "the decode engines reported no steps", ha="center", transform=axes.transAxes)
    return figure


def load_over_time(policies: list[str], trials: list[Trial]) -> Figure:
    """Return a figure of requests in flight by worker, in the first trial of each policy."""
    figure, axes_grid = _figure(min(3, len(policies)), -(-len(policies) // 3))
    for axes in axes_grid.flat[len(policies) :]:
        axes.set_visible(False)
    for axes, policy in zip(axes_grid.flat, policies, strict=False):
        trial = next(trial for trial in trials if trial.policy == policy)
        times = [t for t, _ in trial.load]
        for worker in range(max((len(w) for _, w in trial.load), default=0)):
            axes.plot(
                times, [w[worker] if worker < len(w) else 0 for _, w in trial.load], label=f"worker {worker}"
            )
        axes.set(xlabel=f"time in round {trial.round + 1}, s", ylabel="requests in flight", title=policy)
        if trial.load:
            axes.legend(fontsize=8)
    return figure
