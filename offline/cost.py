"""Write the cost of a model's decode step on a GPU, from kernel times that NVIDIA measured.

    python -m offline.cost --model Qwen/Qwen3-30B-A3B --gpu h100_sxm --out cost.json

It needs no GPU, but NVIDIA's Python package aiconfigurator-core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.files import require_folders
from eldr_serve.gpu_cost import kernel_times
from eldr_serve.gpu_cost.fitting import StepCostFit, fit
from eldr_serve.gpu_cost.readings import Setting
from loadgen.results import print_table

_PLOTS = (".png", ".svg", ".pdf")
_MAX_NUMBER = 100_000  # upper limit of a request's KV tokens, and of a step's requests


def cost(
    model: Annotated[
        str | None, typer.Option(help="Name that NVIDIA's package knows, or a config.json or its folder.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Name of the GPU in NVIDIA's package, such as h100_sxm.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size: 1, or a divisor of --tp.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Weights: {', '.join(kernel_times.DTYPES)}; default: as the model's config says."),
    ] = None,
    context: Annotated[
        str, typer.Option(help="KV tokens of a request in the fitted steps, comma-separated.")
    ] = ",".join(map(str, kernel_times.CONTEXTS)),
    batches: Annotated[str, typer.Option(help="Requests of the fitted steps, comma-separated.")] = ",".join(
        map(str, kernel_times.BATCHES)
    ),
    out: Annotated[Path | None, typer.Option(help="Step cost to write (JSON).")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot to write: steps and fit by batch (.png, .svg, .pdf).")
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="List GPUs and models, and fit nothing.")] = False,
) -> None:
    """Fit a step cost to kernel times that NVIDIA measured, for `eldr simulate --cost` and `router.cost`.

    It needs no GPU, but NVIDIA's Python package aiconfigurator-core.
    """
    if names:
        gpus, models = kernel_times.list_gpus(), kernel_times.list_models()
        typer.echo("\n".join(["GPUs:", *gpus, "", "models:", *models]))
        return
    if model is None or gpu is None or out is None:
        raise UserInputError("give --model, --gpu and --out, or --list")
    require_folders(out, plot)
    if plot is not None and plot.suffix not in _PLOTS:
        raise UserInputError(f"--plot must end in {', '.join(_PLOTS)}, got {plot}")
    readings = kernel_times.read(
        Setting(model, gpu, tp, ep, dtype),
        _parse_numbers("--batches", batches),
        _parse_numbers("--context", context),
    )
    fitted = fit(readings)
    print_table(f"{fitted.file().source}: step, and error of the fit", fitted.table())
    fitted.file().save(out)
    if plot is not None:
        _plot(fitted, plot)
    summary = fitted.summary()
    typer.echo(
        f"{_describe_terms(fitted)}; error {summary['error_rms']:.1%} rms, "
        f"at most {summary['error_max_even']:.1%} with even and {summary['error_max_skewed']:.1%} with "
        f"skewed routing, {summary['error_rms_prompts']:.0%} rms with prompts; wrote {out}"
    )


def _parse_numbers(option: str, words: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in words.split(",")})
    except ValueError:
        raise UserInputError(f"{option} must be comma-separated whole numbers, got {words!r}") from None
    if numbers[0] < 1 or numbers[-1] > _MAX_NUMBER:
        raise UserInputError(f"{option} must be numbers from 1 to {_MAX_NUMBER}, got {words!r}")
    return numbers


def _describe_terms(fitted: StepCostFit) -> str:
    """Return the terms that are not 0, in words."""

    def us(value: float) -> str:
        return f"{value:.3g} us" if value < 1000 else f"{value:,.0f} us"

    terms = [(name, value) for name, value in fitted.summary().items() if name.endswith("_us") and value]
    words = [f"{name.removesuffix('_us').replace('_', ' ')} {us(value)}" for name, value in terms]
    if table := fitted.cost.batch_s:
        words.append(f"a batch of {max(table)} {us(1e6 * table[max(table)])} more than one of {min(table)}")
    return ", ".join(words)


def _plot(fitted: StepCostFit, path: Path) -> None:
    from matplotlib.figure import Figure

    from loadgen.plots import save

    steps = fitted.readings.steps
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for panel, routing in zip(axes, ("even", "skewed"), strict=True):
        for number, context in enumerate(sorted({step.context for step in steps})):
            points = [
                (step.requests, 1e3 * step.seconds, 1e3 * step.seconds * (1 + error))
                for step, error in zip(steps, fitted.errors, strict=True)
                if (step.routing, step.context) == (routing, context)
            ]
            batch, real, predicted = zip(*points, strict=True)
            panel.plot(batch, real, "o", color=f"C{number}", label=f"{context:,} tokens")
            panel.plot(batch, predicted, "-", color=f"C{number}")
        panel.set(title=f"{routing} routing", xlabel="requests", xscale="log")
    axes[0].set(ylabel="decode step, ms (lines: fit)", ylim=(0, None))
    axes[0].legend(title="KV tokens each")
    save(figure, path)


if __name__ == "__main__":
    run(cost)
