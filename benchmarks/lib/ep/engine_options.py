"""Options of the benchmarks of one EP engine.

The engine's model is the demo model with wide experts and an extra head, in 32 bits, so that all settings
give equal answers.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from eldr_serve.errors import UserInputError
from examples.demo_model import WEIGHTS

NUM_HEADS = 4  # attention heads of the model; 2 and 4 ranks divide them
MAX_PROMPT_TOKENS = 65  # longer prompts are cut, since only decode is measured
Ranks = Annotated[int, typer.Option(min=2, help="Ranks of the engine; each wants a core.")]
DataParallel = Annotated[
    int | None, typer.Option(min=2, help="Data-parallel ranks, instead of --ranks tensor-parallel ones.")
]
Tokens = Annotated[int, typer.Option(min=8, help="Tokens generated per request.")]
Rounds = Annotated[int, typer.Option(min=2, help="Rounds of all arms, each with other prompts.")]
MovesPerSlice = Annotated[int, typer.Option(min=1, help="Experts that move between two steps.")]
Minutes = Annotated[float | None, typer.Option(min=0.1, help="Time limit; the same command resumes.")]


def resolve_ranks(benchmark: str, ranks: int, data_parallel: int | None) -> tuple[str, int, str]:
    """Return the name of the result, the number of ranks, and the kind of their attention.

    Raises:
        UserInputError: the ranks do not divide the model's heads or, if they are data-parallel, its experts.
    """
    result, attention = benchmark, "tensor-parallel"
    option, number, what = "--ranks", NUM_HEADS, "attention heads"
    if data_parallel is not None:
        result, ranks, attention = f"{benchmark}_dp", data_parallel, "data-parallel"
        config = json.loads((WEIGHTS / "config.json").read_text())
        option, number, what = "--data-parallel", config["num_local_experts"], "experts"
    if number % ranks:
        raise UserInputError(
            f"{option} is {ranks}: set it to a number that divides the model's {number} {what}"
        )
    return result, ranks, attention
