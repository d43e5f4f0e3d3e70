"""Arrival times of requests. They depend only on the seed, so every process gets the same stream.

A stream is an iterator of Arrival. Each process of a distributed load generator makes the whole stream and
takes its share, so that together they send what one process would.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eldr_serve.errors import UserInputError
from loadgen.workload import WorkloadPrompt


@dataclass(frozen=True)
class Arrival:
    """A request and its arrival time."""

    number: int  # index in the whole stream, from 0
    due_s: float | None  # time since the start of the load, s; None: as soon as a user is free
    prompt: WorkloadPrompt
    max_tokens: int  # output tokens, at most


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Return endless arrival times, s, with exponential gaps.

    Args:
        rate: mean requests/s, above 0.

    Raises:
        UserInputError: the rate is not above 0.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise UserInputError(f"the rate must be above 0 requests/s, got {rate}")
    return _poisson(rate, random.Random(f"{seed}/arrivals"))


def output_lengths(max_tokens: int, *, min_tokens: int | None = None, seed: int = 0) -> Iterator[int]:
    """Return endless output lengths, tokens, uniform from `min_tokens` (None: `max_tokens`) to `max_tokens`.

    Raises:
        UserInputError: `min_tokens` is below 1 or above `max_tokens`.
    """
    if min_tokens is None:
        return itertools.repeat(max_tokens)
    if not 1 <= min_tokens <= max_tokens:
        raise UserInputError(
            f"the minimum output must be from 1 token to the maximum ({max_tokens}), got {min_tokens}"
        )
    rng = random.Random(f"{seed}/lengths")
    return (rng.randint(min_tokens, max_tokens) for _ in itertools.count())


def open_loop(
    prompts: list[WorkloadPrompt],
    rate: float,
    *,
    max_tokens: int,
    min_tokens: int | None = None,
    seed: int = 0,
    processes: int = 1,
) -> Iterator[Arrival]:
    """Return Poisson arrivals of the shuffled prompts, which repeat after all were sent.

    Args:
        rate: requests/s over all processes.
        max_tokens, min_tokens: see output_lengths.
        processes: number of shares. No prompt is in two of them.
    """
    pairs = _prompts_and_lengths(prompts, max_tokens, min_tokens, seed, processes)
    return (
        Arrival(number, due_s, prompt, tokens)
        for number, (due_s, (prompt, tokens)) in enumerate(zip(poisson(rate, seed), pairs, strict=False))
    )


def closed_loop(
    prompts: list[WorkloadPrompt],
    *,
    max_tokens: int,
    min_tokens: int | None = None,
    seed: int = 0,
    processes: int = 1,
) -> Iterator[Arrival]:
    """Return the shuffled prompts, each due when a user is free. See open_loop for the arguments."""
    pairs = _prompts_and_lengths(prompts, max_tokens, min_tokens, seed, processes)
    return (Arrival(number, None, prompt, tokens) for number, (prompt, tokens) in enumerate(pairs))


def share(stream: Iterable[Arrival], index: int, processes: int) -> Iterator[Arrival]:
    """Return every `processes`-th arrival from number `index`."""
    return itertools.islice(stream, index, None, processes)


def _poisson(rate: float, rng: random.Random) -> Iterator[float]:
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def _prompts_and_lengths(
    prompts: list[WorkloadPrompt], max_tokens: int, min_tokens: int | None, seed: int, processes: int
) -> Iterator[tuple[WorkloadPrompt, int]]:
    """Return pairs of prompt and output tokens."""
    lengths = output_lengths(max_tokens, min_tokens=min_tokens, seed=seed)
    return (
        (prompt, tokens if prompt.max_tokens is None else min(tokens, prompt.max_tokens))
        for prompt, tokens in zip(_cycle(prompts, seed, processes), lengths, strict=False)
    )


def _cycle(prompts: list[WorkloadPrompt], seed: int, processes: int) -> Iterator[WorkloadPrompt]:
    if len(prompts) < processes:
        raise UserInputError(f"{len(prompts)} prompts are too few for {processes} processes")
    order = list(prompts)
    random.Random(seed).shuffle(order)
    # Keep a multiple of the processes: when the prompts repeat, each process gets its own again.
    return itertools.cycle(order[: len(order) - len(order) % processes])
