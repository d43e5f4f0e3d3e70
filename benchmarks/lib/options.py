"""Command-line options that several benchmarks share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import make_policy

Prompts = Annotated[Path, typer.Option(envvar="ELDR_PROMPTS", help="Folder of JSONL prompts with domains.")]
PROMPTS = Path("examples/demo_model/prompts")
PerWorker = Annotated[int, typer.Option(min=4, help="Requests per decode worker.")]
Batch = Annotated[str, typer.Option(help="Target batch sizes of the arrival rates, comma-separated.")]
Output = Annotated[int, typer.Option(min=2, help="Tokens generated per request.")]
Intermediate = Annotated[int, typer.Option(min=32, help="Neurons per expert; 1024 are 0.98 MB.")]
MeanOutput = Annotated[
    int, typer.Option(min=2, help="Mean tokens generated per request, drawn from 0.5 to 1.5 times it.")
]
CapturedRequests = Annotated[int, typer.Option(min=16, help="Prompts captured, half tasks, half languages.")]
Workers = Annotated[str, typer.Option(help="Numbers of decode workers, comma-separated.")]
Groups = Annotated[str, typer.Option(help="Workloads, comma-separated, of: all, language, task.")]
Work = Annotated[Path, typer.Option(help="Folder for the capture and the widened model.")]
Repeats = Annotated[int, typer.Option(min=1, help="Replays of each schedule; times are their medians.")]
Engines = Annotated[int, typer.Option(min=1, help="Engines side by side, each on its own core; 2 GiB each.")]
Device = Annotated[
    Literal["cpu", "cuda", "cuda-eager"],
    typer.Option(help="Where the engine runs; cuda-eager: decode steps outside of CUDA graphs."),
]
Seed = Annotated[int, typer.Option(help="Seed of prompts, arrivals, policies and bootstrap.")]
CpuOrCuda = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model, or its layer, runs.")]
Out = Annotated[Path | None, typer.Option(help="JSON file to write; default in benchmarks/results.")]
WORK = Path("out/bench")
FitRequests = Annotated[
    int, typer.Option(min=12, help="Requests that fit the step cost before the replay; few fit it coarsely.")
]
StepsOut = Annotated[
    Path | None, typer.Option(help="Write the fitted steps, for `eldr simulate --calibrate-from`.")
]
RouterVenv = Annotated[Path | None, typer.Option(help="Virtual environment with vllm-router; none: skipped.")]
Policies = Annotated[str, typer.Option(help="Policies, comma-separated.")]
TwoPolicies = Annotated[str, typer.Option(help="Two policies; the first is compared with the second.")]
Port = Annotated[int, typer.Option(help="HTTP port.")]
Ports = Annotated[int, typer.Option(help="First of two HTTP ports.")]
Record = Annotated[Path | None, typer.Option(help="Journal of all trials, read and added to.")]
InFlight = Annotated[int, typer.Option(min=1, help="Requests in flight, closed loop.")]
Deployment = Annotated[Path, typer.Option(help="Deployment YAML.")]
Interval = Annotated[int, typer.Option(min=1, help="Tokens per chunk of an answer.")]
BurnIn = Annotated[int, typer.Option(min=0, help="Load on newly started engines, s; no figure includes it.")]
Longest = Annotated[int, typer.Option(min=1, help="Maximum tokens of a prompt; longer ones are left out.")]


def two_policies(value: str) -> tuple[str, str]:
    """Return the two names of `--policies`. Raise UserInputError unless there are two different ones."""
    names = value.split(",")
    if len(names) != 2 or len(set(names)) != 2:
        raise UserInputError(f"--policies are {value}: name two")
    return names[0], names[1]


def policy(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return name and parameters of NAME,KEY=VALUE,... and raise UserInputError for a wrong policy."""
    name, *pairs = text.split(",")
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UserInputError(f"{option} {text} has {wrong[0]!r}, which is no KEY=VALUE")
    parameters = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    make_policy(name, **parameters)
    return name, parameters


def ratios(option: str, value: str) -> list[float]:
    """Return the numbers of 1 or more of an option, separated by commas. Raise UserInputError on others."""
    try:
        found = [float(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= ratio < math.inf for ratio in found):
        raise UserInputError(f"{option} must be comma-separated numbers of 1 or more, got {value!r}")
    return found


def numbers(option: str, value: str) -> list[int]:
    """Return the positive numbers of an option, separated by commas. Raise UserInputError on others."""
    parts = value.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise UserInputError(f"{option} must be comma-separated positive numbers, got {value!r}")
    return [int(part) for part in parts]
