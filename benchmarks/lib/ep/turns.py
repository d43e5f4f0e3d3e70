"""Measurements of settings (*arms*) that take turns on one EP engine, kept in a journal.

The model is the demo model with wide experts and an extra head, in 32 bits, so that all arms give equal
answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from benchmarks.lib.ep.engine import DecodedBatch
from eldr_serve.arrays import Ints
from eldr_serve.errors import UserInputError
from examples.demo_model import WEIGHTS
from loadgen.journal import Journal

Key = TypeVar("Key", bound=tuple[Hashable, ...])
EngineT = TypeVar("EngineT")
NUM_HEADS = 4  # attention heads of the model; 2 and 4 ranks divide them
MAX_PROMPT_TOKENS = 65  # longer prompts are cut, since only decode is measured
SKIPPED_STEPS = 2  # decode steps after the prefill that no figure includes
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


def measure_in_turns(
    journal: Journal,
    keys: Iterable[Key],
    engine: Callable[[], AbstractContextManager[EngineT]],
    measure: Callable[[EngineT, Key], Any],
    minutes: float | None,
) -> dict[Key, Any]:
    """Return the measurement of each key, in this order. Measure only those that the journal lacks.

    Args:
        engine: called if anything is left to measure. It returns a context manager of the engine.
        measure: function that returns a JSON-serialisable result.
        minutes: time limit, after which UserInputError is raised; None: no limit.
    """
    start, keys = monotonic(), list(keys)
    missing = [key for key in keys if journal.get(_name(key)) is None]
    if missing:
        with engine() as running_engine:
            for key in missing:
                if minutes is not None and monotonic() - start > 60 * minutes:
                    raise UserInputError(
                        "the time is up; results are kept; run the command again to continue"
                    )
                journal.put(_name(key), measure(running_engine, key))
    return {key: journal.get(_name(key)) for key in keys}


def _name(key: tuple[Hashable, ...]) -> str:
    return "/".join(map(str, key))


def draw_disjoint_batches(requests: Ints, size: int, number: int, rng: np.random.Generator) -> list[Ints]:
    """Return `number` batches of `size`, which share no request while enough requests are left."""
    batches: list[Ints] = []
    unused = requests[:0]
    for _ in range(number):
        if len(unused) < size:
            unused = rng.permutation(requests)
        batches.append(unused[:size])
        unused = unused[size:]
    return batches


def choose_homes(counts: ArrayLike, placement: Ints, ranks: int) -> Ints:
    """Return a rank for each prompt, int[N], that holds many of its experts; ranks get equal numbers.

    Args:
        counts: int[N, L, E], tokens per expert of each prompt.
        placement: int[L, P], experts in the slots of all ranks; -1: an empty slot.
        ranks: G, number of ranks.
    """
    tokens = np.asarray(counts, np.float64)
    _, layers, experts = tokens.shape
    holds = (placement.reshape(layers, ranks, -1, 1) == np.arange(experts)).any(axis=2)  # [L, G, E]
    share_at_home = np.einsum("nle,lge->ng", tokens / tokens.sum(axis=(1, 2), keepdims=True), holds)
    places = np.arange(len(tokens)) % ranks
    return places[linear_sum_assignment(share_at_home[:, places], maximize=True)[1]]


def summarise_batch(decoded: DecodedBatch) -> dict[str, Any]:
    """Return a batch's figures: medians over steps for times, otherwise means over steps and layers."""
    columns = np.moveaxis(decoded.log[:, SKIPPED_STEPS:], -1, 0)
    tokens, activated, pairs, served_at_home, moved_tokens = columns
    return {
        "step_ms": 1e3 * float(np.median(decoded.seconds[SKIPPED_STEPS:])),
        "steps": len(decoded.seconds),
        "worst_rank_experts": float(activated.max(axis=0).mean()),
        "experts_all_ranks": float(activated.sum(axis=0).mean()),
        "worst_rank_pairs": float(pairs.max(axis=0).mean()),
        "pairs_off_home_pct": 100 * (1 - float(served_at_home.sum() / pairs.sum())),
        "other_ranks_per_token": float(moved_tokens.sum() / tokens[0].sum()),
        "answers": [hashlib.sha256(answer.tobytes()).hexdigest()[:16] for answer in decoded.answers],
    }
