"""Reproduce the papers' figures and tables in simulation, beside the paper's numbers.

eldr reproduce                                       lists the papers and their figures
eldr reproduce eldr rates --trace trace.safetensors
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.papers.figures import (
    balanceroute,
    balanceroute_proxy,
    director,
    director_forecast,
    director_forms,
    eldr,
    eldr_domains,
    eldr_gates,
    eldr_parallel,
    eldr_signatures,
    grace,
    grace_forms,
    metro,
    metro_kernel,
    predicted,
    together,
    whole,
)
from benchmarks.papers.figures.common import Options, PaperFigure
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling.cost_file import FittedCost
from loadgen.results import publish

PAPERS = {
    "eldr": eldr.FIGURES
    | eldr_parallel.FIGURES
    | eldr_signatures.FIGURES
    | eldr_domains.FIGURES
    | eldr_gates.FIGURES,
    "balanceroute": balanceroute.FIGURES | balanceroute_proxy.FIGURES,
    "grace": grace.FIGURES | grace_forms.FIGURES,
    "metro": metro.FIGURES | metro_kernel.FIGURES,
    "director": director.FIGURES | director_forms.FIGURES | director_forecast.FIGURES,
    "together": together.FIGURES,
    "predicted": predicted.FIGURES,
    "whole": whole.FIGURES,
}


def reproduce(
    paper: Annotated[str | None, typer.Argument(help="Paper; if left out, papers are listed.")] = None,
    figure: Annotated[str | None, typer.Argument(help="Figure; if left out, figures are listed.")] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Input file; repeatable. eldr, grace, metro, director: a calibration trace with routes, or "
            "published routes; balanceroute: request traces; together, whole: routes, then a request trace; "
            "predicted: a calibration trace with token ids, but for gptoss the routes of GPT-OSS-20B."
        ),
    ] = None,
    cost: Annotated[
        Path | None, typer.Option(help="Step cost, a file that `eldr simulate --calibrate-from` wrote.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=10, help="Requests; default: by figure.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions, each with another seed.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON to write; default out/PAPER_FIGURE.json.")] = None,
) -> None:
    """Run one figure's simulations, print a table, and write JSON and a plot."""
    if paper is None or figure is None:
        for name in [paper] if paper else PAPERS:
            titles = (f"\n  {figure:14} {entry.title}" for figure, entry in _figures(name).items())
            typer.echo(f"{name}{''.join(titles)}")
        return
    chosen_figure = _figures(paper).get(figure)
    if chosen_figure is None:
        raise UserInputError(f"{paper} has no figure {figure!r}; choose from {', '.join(_figures(paper))}")
    path = out or Path("out") / f"{paper}_{figure}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    fitted = FittedCost.load(cost).cost if cost is not None else None
    options = Options(tuple(trace or ()), fitted, requests, tuple(range(seeds)))
    rows = chosen_figure.run(options)
    typer.echo(f"{chosen_figure.title}\npaper: {chosen_figure.paper}")
    publish(
        f"{paper}_{figure}",
        rows,
        seed=0,
        out=path,
        inputs={
            "traces": [file.name for file in options.traces],
            "requests": requests,
            "seeds": seeds,
            "cost": fitted.as_dict() if fitted else None,
        },
        notes=f"simulated. {chosen_figure.title}. Paper: {chosen_figure.paper}",
    )
    if chosen_figure.plot is not None:
        chosen_figure.plot(rows, path.with_suffix(".png"))


def _figures(paper: str) -> dict[str, PaperFigure]:
    if paper not in PAPERS:
        raise UserInputError(f"unknown paper {paper!r}; choose from {', '.join(PAPERS)}")
    return PAPERS[paper]


if __name__ == "__main__":
    run(reproduce)
