"""Fit a signature predictor on a calibration trace, on CPU, in seconds.

    python -m offline.fit_predictor --trace trace.safetensors --out predictor.safetensors

The trace must contain token ids, as those of `eldr calibrate` do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.commands.run import run
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.files import require_folders, write_atomically
from loadgen.progress import progress_bar
from offline.predictor import FOLDS, fit_signature_predictor


def fit_predictor(
    trace: Annotated[Path, typer.Option(help="CalibrationTrace file with token ids, from `eldr calibrate`.")],
    out: Annotated[Path, typer.Option(help="SignaturePredictor file to write (safetensors).")],
    rank: Annotated[
        int, typer.Option(min=1, help="Numbers per token id; the file has 4 x rank bytes for each token id.")
    ] = 64,
    report: Annotated[Path | None, typer.Option(help="Write the results of the fit (JSON).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the folds that choose the penalty.")] = 0,
) -> None:
    """Fit what each token adds to a prompt's experts. Print how well it predicts held-out prompts."""
    require_folders(out, report)
    loaded = CalibrationTrace.load(trace)
    with progress_bar() as progress:
        bar = progress.add_task("fitting, fold by fold", total=FOLDS + 1)
        predictor, quality = fit_signature_predictor(
            loaded, rank=rank, seed=seed, on_step=lambda: progress.advance(bar)
        )
    if report is not None:
        write_atomically(report, json.dumps(quality, indent=1) + "\n")
    predictor.save(out)
    typer.echo(
        f"{quality['prompts']} prompts, {quality['token_ids_seen']} of {quality['vocabulary']} token ids seen"
        f"; on held-out prompts: cosine {quality['cosine']:.2f}, gain over the mean {quality['gain']:.2f}; "
        f"rank {quality['rank']}, {quality['mib']:.1f} MiB, {quality['seconds']:.1f} s; wrote {out}"
    )


if __name__ == "__main__":
    run(fit_predictor)
