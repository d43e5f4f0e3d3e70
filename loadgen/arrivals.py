"""Which request is due when. Pure and seeded: every process that asks sees the same stream.

A stream is an iterator of Arrival. Distributed load generators make the whole stream each and take
their share of it, so that together they send what one would have sent.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadgen.workload import Prompt
from tools.cli import BadInput


@dataclass(frozen=True)
class Arrival:
    """One request: what to send, and when."""

    number: int  # in the whole stream, from 0
    due_s: float | None  # from the start of the load, s; None: as soon as a user is free
    prompt: Prompt
    max_tokens: int  # output tokens, at most


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Endless times, s, with exponential gaps.

    Args:
        rate: mean requests/s; BadInput unless it is above 0.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise BadInput(f"the rate is {rate}, it must be above 0 requests/s")
    return _poisson(rate, random.Random(f"{seed}/arrivals"))


def output_lengths(most: int, *, least: int | None = None, seed: int = 0) -> Iterator[int]:
    """Endless output lengths, tokens, from `least` to `most`, one as likely as the other; None: all `most`.

    Raises:
        BadInput: `least` is below 1 or above `most`.
    """
    if least is None:
        return itertools.repeat(most)
    if not 1 <= least <= most:
        raise BadInput(f"the least output is {least} tokens, it must be from 1 to the most, {most}")
    rng = random.Random(f"{seed}/lengths")
    return (rng.randint(least, most) for _ in itertools.count())


def open_loop(
    prompts: list[Prompt],
    rate: float,
    *,
    max_tokens: int,
    min_tokens: int | None = None,
    seed: int = 0,
    workers: int = 1,
) -> Iterator[Arrival]:
    """Poisson arrivals over the shuffled prompts, which repeat when all were sent.

    Args:
        rate: requests/s over all workers.
        max_tokens, min_tokens: of output_lengths.
        workers: shares that will be taken; no prompt is in two of them.
    """
    asked = _asked(prompts, max_tokens, min_tokens, seed, workers)
    return (
        Arrival(number, due_s, prompt, tokens)
        for number, (due_s, (prompt, tokens)) in enumerate(zip(poisson(rate, seed), asked, strict=False))
    )


def closed_loop(
    prompts: list[Prompt], *, max_tokens: int, min_tokens: int | None = None, seed: int = 0, workers: int = 1
) -> Iterator[Arrival]:
    """The shuffled prompts, each due when a user is free; other arguments as open_loop."""
    asked = _asked(prompts, max_tokens, min_tokens, seed, workers)
    return (Arrival(number, None, prompt, tokens) for number, (prompt, tokens) in enumerate(asked))


def share(stream: Iterable[Arrival], index: int, workers: int) -> Iterator[Arrival]:
    """Every `workers`-th arrival, from number `index` on."""
    return itertools.islice(stream, index, None, workers)


def _poisson(rate: float, rng: random.Random) -> Iterator[float]:
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def _asked(
    prompts: list[Prompt], max_tokens: int, min_tokens: int | None, seed: int, workers: int
) -> Iterator[tuple[Prompt, int]]:
    """Prompts and output tokens."""
    lengths = output_lengths(max_tokens, least=min_tokens, seed=seed)
    return (
        (prompt, tokens if prompt.max_tokens is None else min(tokens, prompt.max_tokens))
        for prompt, tokens in zip(_cycle(prompts, seed, workers), lengths, strict=False)
    )


def _cycle(prompts: list[Prompt], seed: int, workers: int) -> Iterator[Prompt]:
    if len(prompts) < workers:
        raise BadInput(f"{len(prompts)} prompts are too few for {workers} workers")
    order = list(prompts)
    random.Random(seed).shuffle(order)
    # A whole number of rounds of the workers: when the prompts repeat, each worker meets its own again.
    return itertools.cycle(order[: len(order) - len(order) % workers])
