"""Command-line options that several benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PromptsOption = Annotated[
    Path, typer.Option(envvar="ELDR_PROMPTS", help="Folder of JSONL prompts with domains.")
]
PROMPTS = Path("demo_model/prompts")
PerWorkerOption = Annotated[int, typer.Option(min=4, help="Requests a worker.")]
BatchOption = Annotated[str, typer.Option(help="Batch sizes that arrival rates aim at, with commas.")]
OutputOption = Annotated[int, typer.Option(min=2, help="Tokens generated a request.")]
IntermediateOption = Annotated[int, typer.Option(min=32, help="Neurons an expert; 1024 are 0.98 MB.")]
MeanOutputOption = Annotated[
    int, typer.Option(min=2, help="Mean tokens generated a request, drawn from half to three halves of it.")
]
CapturedOption = Annotated[int, typer.Option(min=16, help="Prompts captured, half tasks, half languages.")]
WorkersOption = Annotated[str, typer.Option(help="Numbers of decode workers, with commas.")]
GroupsOption = Annotated[str, typer.Option(help="Workloads with commas, of: all, language, task.")]
WorkOption = Annotated[Path, typer.Option(help="Folder for the capture and the widened model.")]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="Replays of each schedule; a request's time is the median of them.")
]
EnginesOption = Annotated[
    int, typer.Option(min=1, help="Replays side by side, each engine on a core of its own; 2 GiB each.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of prompts, arrivals, policies and bootstrap.")]
OutOption = Annotated[Path | None, typer.Option(help="JSON file; default in benchmarks/results.")]
WORK = Path("out/bench")
StepsOutOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the engine's steps that the cost was fitted to, for offline.simulate --calibrate-from."
    ),
]
