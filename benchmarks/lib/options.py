"""Command-line options that several benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from eldr_serve.command_errors import BadInput

Prompts = Annotated[Path, typer.Option(envvar="ELDR_PROMPTS", help="Folder of JSONL prompts with domains.")]
PROMPTS = Path("examples/demo_model/prompts")
PerWorker = Annotated[int, typer.Option(min=4, help="Requests a worker.")]
Batch = Annotated[str, typer.Option(help="Batch sizes that arrival rates aim at, with commas.")]
Output = Annotated[int, typer.Option(min=2, help="Tokens generated a request.")]
Intermediate = Annotated[int, typer.Option(min=32, help="Neurons an expert; 1024 are 0.98 MB.")]
MeanOutput = Annotated[
    int, typer.Option(min=2, help="Mean tokens generated a request, drawn from half to three halves of it.")
]
Captured = Annotated[int, typer.Option(min=16, help="Prompts captured, half tasks, half languages.")]
Workers = Annotated[str, typer.Option(help="Numbers of decode workers, with commas.")]
Groups = Annotated[str, typer.Option(help="Workloads with commas, of: all, language, task.")]
Work = Annotated[Path, typer.Option(help="Folder for the capture and the widened model.")]
Repeats = Annotated[
    int, typer.Option(min=1, help="Replays of each schedule; a request's time is the median of them.")
]
Engines = Annotated[
    int, typer.Option(min=1, help="Replays side by side, each engine on a core of its own; 2 GiB each.")
]
Device = Annotated[
    Literal["cpu", "cuda", "cuda-eager"],
    typer.Option(help="Where the engine runs; cuda-eager: decode steps outside of CUDA graphs."),
]
Seed = Annotated[int, typer.Option(help="Seed of prompts, arrivals, policies and bootstrap.")]
CpuOrCuda = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model, or its layer, runs.")]
Out = Annotated[Path | None, typer.Option(help="JSON file; default in benchmarks/results.")]
WORK = Path("out/bench")
StepsOut = Annotated[
    Path | None,
    typer.Option(
        help="Write the engine's steps that the cost was fitted to, for offline.simulate --calibrate-from."
    ),
]
RouterVenv = Annotated[
    Path | None, typer.Option(help="Virtual environment with vllm-router; none: it is left out.")
]
Record = Annotated[Path | None, typer.Option(help="Journal of all trials, read and added to.")]
InFlight = Annotated[int, typer.Option(min=1, help="Requests in flight, closed loop.")]
Deployment = Annotated[Path, typer.Option(help="Deployment YAML.")]
Interval = Annotated[int, typer.Option(min=1, help="Tokens a chunk of an answer.")]
BurnIn = Annotated[int, typer.Option(min=0, help="Load on engines that have just started, in no figure, s.")]
Longest = Annotated[int, typer.Option(min=1, help="Longer prompts are left out, tokens.")]


def two_policies(value: str) -> tuple[str, str]:
    """Return the two names of `--policies`; raise BadInput if it has not exactly two."""
    names = value.split(",")
    if len(names) != 2 or len(set(names)) != 2:
        raise BadInput(f"--policies are {value}: name two")
    return names[0], names[1]


def numbers(option: str, value: str) -> list[int]:
    """Return an option's positive numbers, which commas separate; raise BadInput if it has anything else."""
    parts = value.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise BadInput(f"{option} is {value!r}, it must be numbers with commas")
    return [int(part) for part in parts]
