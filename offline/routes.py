"""Convert published expert choices of a real model to a calibration trace, on CPU, in seconds.

    python -m offline.routes deepseek_v2_lite_routes.jsonl.gz --model deepseek-v2-lite --out trace.safetensors

offline/route_files.py describes the format of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from eldr_serve.commands.run import run
from eldr_serve.commands.settings import command_of_settings
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.files import require_folders, write_all
from loadgen.progress import progress_bar
from loadgen.results import print_table
from offline.route_files import (
    MODELS,
    Cut,
    Sample,
    find_model,
    read_samples,
    select_long_enough,
    trace_of_routes,
)

Model = Annotated[str | None, typer.Option(help=f"Model: {', '.join(MODELS)}; default: by the records.")]
PromptShare = Annotated[
    float | None,
    typer.Option(help="Share of a sample that is its prompt, above 0 and below 1; default: the model's."),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Prompt tokens, instead of --prompt-share; default: the model's."),
]
OutputTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum output tokens of a sample; default: the model's, or all."),
]
MinOutputTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Leave out samples with fewer output tokens; default: the model's, or 1."),
]


@dataclass(frozen=True)
class RouteSettings:
    """The options of the command."""

    file: Annotated[Path, typer.Argument(help="Samples with routes, JSON lines, plain or .gz.")]
    out: Annotated[Path, typer.Option(help="CalibrationTrace file to write (.safetensors).")]
    model: Model = None
    prompt_share: PromptShare = None
    prompt_tokens: PromptTokens = None
    output_tokens: OutputTokens = None
    min_output_tokens: MinOutputTokens = None
    domain: Annotated[
        list[str] | None, typer.Option(help="Only samples of this domain; repeatable; default: all.")
    ] = None
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of each domain, drawn by --seed; default: all.")
    ] = None
    held_out: Annotated[
        float,
        typer.Option(help="Share of each domain's samples to write to NAME.held_out.safetensors instead."),
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws for --samples and --held-out.")] = 0


@command_of_settings
def routes(settings: RouteSettings) -> None:
    """Write a model's published routes as a calibration trace, and show its domains.

    deepseek-v2-lite: the first half of a sample is its prompt. gpt-oss-20b: the first 96 steps are the
    prompt, the next 64 the answer. Shorter samples are left out.
    """
    route_model = None if settings.model is None else find_model(settings.model)
    _check_shares(settings)
    out = settings.out
    require_folders(out)
    if out.suffix != ".safetensors":
        raise UserInputError(f"--out must end in .safetensors, got {out.name}")
    with progress_bar() as progress:
        bar = progress.add_task("reading samples", total=None)
        route_model, all_samples = read_samples(settings.file, route_model, lambda: progress.advance(bar))
    cut = _change_cut(route_model.cut, settings)
    usable = select_long_enough(all_samples, cut)
    trace_samples, held_out_samples = _split_samples(settings, usable, len(all_samples))
    traces = {out: trace_of_routes(route_model, trace_samples, cut)}
    if held_out_samples:
        traces[out.with_stem(f"{out.stem}.held_out")] = trace_of_routes(route_model, held_out_samples, cut)
    write_all({path: trace.to_bytes() for path, trace in traces.items()})
    print_table(route_model.name, [row for path, trace in traces.items() for row in _rows(path, trace)])
    typer.echo(f"wrote {', '.join(map(str, traces))}")


def _check_shares(settings: RouteSettings) -> None:
    prompt_share, held_out = settings.prompt_share, settings.held_out
    if prompt_share is not None and settings.prompt_tokens is not None:
        raise UserInputError("give --prompt-share or --prompt-tokens, not both")
    if prompt_share is not None and not 0 < prompt_share < 1:
        raise UserInputError(f"--prompt-share must be above 0 and below 1, got {prompt_share:g}")
    if not 0 <= held_out < 1:
        raise UserInputError(f"--held-out must be at least 0 and below 1, got {held_out:g}")
    if held_out and settings.samples == 1:
        raise UserInputError("--samples is 1, which leaves none to hold out: take 2 or more")


def _change_cut(cut: Cut, settings: RouteSettings) -> Cut:
    """Return the model's cut, changed by the options that were given."""
    output, minimum = settings.output_tokens, settings.min_output_tokens
    if settings.prompt_share is not None:
        cut = replace(cut, prompt_tokens=None, prompt_share=settings.prompt_share)
    if settings.prompt_tokens is not None:
        cut = replace(cut, prompt_tokens=settings.prompt_tokens)
    if output is not None:
        cut = replace(cut, output_tokens=output, min_output_tokens=min(cut.min_output_tokens, output))
    if minimum is not None:
        if cut.output_tokens is not None and minimum > cut.output_tokens:
            raise UserInputError(
                f"--min-output-tokens is {minimum}, but at most {cut.output_tokens} output tokens are kept: "
                "raise --output-tokens"
            )
        cut = replace(cut, min_output_tokens=minimum)
    return cut


def _split_samples(
    settings: RouteSettings, usable: list[Sample], total: int
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of the trace and those held out, by domain, each in the order of the file."""
    file, number, held_out = settings.file, settings.samples, settings.held_out
    if not usable:
        raise UserInputError(
            f"{file}: none of {total} samples is long enough: cut a shorter prompt or answer"
        )
    by_domain: dict[str, list[int]] = {}
    for index, sample in enumerate(usable):
        by_domain.setdefault(str(sample.record["domain"]), []).append(index)
    needed = max(number or 1, 2 if held_out else 1)
    chosen: list[int] = []
    others: list[int] = []
    for name in dict.fromkeys(settings.domain or sorted(by_domain)):
        members = by_domain.get(name, [])
        if len(members) < needed:
            raise UserInputError(
                f"{file} has {len(members)} samples of domain {name!r} that are long enough, not {needed}: "
                f"lower --samples, or choose by --domain from {', '.join(sorted(by_domain))}"
            )
        order = np.random.default_rng([settings.seed, *name.encode()]).permutation(members)[:number].tolist()
        num_held_out = min(len(order) - 1, max(1, round(held_out * len(order)))) if held_out else 0
        others += order[:num_held_out]
        chosen += order[num_held_out:]
    return [usable[i] for i in sorted(chosen)], [usable[i] for i in sorted(others)]


def _rows(path: Path, trace: CalibrationTrace) -> list[dict[str, Any]]:
    domains = np.array(trace.domains)
    return [
        {"trace": path.name, "domain": name, "samples": int((domains == name).sum())}
        | {"prompt_tokens_p50": float(np.median(trace.prompt_tokens[domains == name]))}
        | {"output_tokens_p50": float(np.median(trace.decode_steps[domains == name]))}
        for name in sorted(set(trace.domains))
    ]


if __name__ == "__main__":
    run(routes)
