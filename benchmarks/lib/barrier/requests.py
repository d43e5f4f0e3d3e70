"""Requests with the lengths of a trace, scaled to a small machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.prompts import MODEL
from eldr_serve.arrays import Ints
from eldr_serve.errors import UserInputError
from examples.demo_model import WEIGHTS
from loadgen.traces import RecordedArrival
from loadgen.workload import read_prompts
from offline.calibrate import prompt_tokens

_BLOCK = 32  # tokens of a KV block of an engine on CPUs


@dataclass(frozen=True)
class TraceScale:
    """The lengths to which a trace is scaled, in tokens.

    Attributes:
        prompt, output: means after scaling, before the limits.
        longest_output: maximum of an answer.
        context: maximum of prompt and longest answer together.
    """

    prompt: float
    output: float
    longest_output: int
    context: int

    @property
    def longest_prompt(self) -> int:
        """Return the maximum of a prompt."""
        return self.context - self.longest_output

    def lengths(self, trace: Sequence[RecordedArrival]) -> Ints:
        """Return prompt and output tokens of each request of the trace, int64[N,2].

        All tokens of a prompt but one fill whole KV blocks.
        """
        recorded = np.array([(r.prompt_tokens, r.output_tokens) for r in trace], np.float64)
        scaled = np.rint(recorded * ((self.prompt, self.output) / recorded.mean(axis=0))).astype(np.int64)
        # An answer needs two tokens to have a time per output token.
        lengths: Ints = np.clip(scaled, (1, 2), (self.longest_prompt, self.longest_output))
        # The prefix cache has whole blocks, and one token is always computed.
        lengths[:, 0] = 1 + (lengths[:, 0] - 1) // _BLOCK * _BLOCK
        return lengths


def order_for_round(lengths: Ints, number: int, rounds: int) -> Ints:
    """Return the lengths in the order of a round. Each round begins at another place of the trace."""
    return np.roll(lengths, -(len(lengths) * number // rounds), axis=0)


def read_stems(folder: Path, tokens: int) -> list[list[int]]:
    """Return a text of `tokens` token ids for each domain of the prompts in a folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    stems: dict[str, list[int]] = {}
    for prompt in read_prompts([folder]):
        stem = stems.setdefault(prompt.domain, [])
        if len(stem) < tokens:
            stem += prompt_tokens(tokenizer, prompt.text, chat=False)
    if not (complete := [stem[:tokens] for stem in stems.values() if len(stem) >= tokens]):
        raise UserInputError(f"no domain of {folder} has {tokens} tokens of prompts: shorten the context")
    return complete


def request_body(prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """Return a completion request that generates exactly this number of tokens."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
    }


def request_bodies(lengths: Ints, stems: Sequence[list[int]], seed: int) -> Iterator[dict[str, Any]]:
    """Yield requests of these lengths without end. Each prompt is the beginning of a stem."""
    rng = random.Random(seed)
    for number in count():
        prompt, output = lengths[number % len(lengths)].tolist()
        yield request_body(rng.choice(stems)[:prompt], output)
