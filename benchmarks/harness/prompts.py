"""The demo model's prompts, in an order fixed by a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from loadgen.workload import read_prompts

MODEL = "eldr-demo"


def bodies(
    folder: Path, *, count: int, max_tokens: int, seed: int, min_tokens: int | None = None
) -> list[dict[str, Any]]:
    """`count` greedy completion requests; prompts repeat if they must.

    Their answers have exactly `max_tokens` tokens, or as many as are drawn from `min_tokens` to that.
    """
    prompts = read_prompts([folder])
    rng = random.Random(seed)
    rng.shuffle(prompts)
    return [
        {
            "model": MODEL,
            "prompt": prompts[number % len(prompts)].text,
            "max_tokens": max_tokens if min_tokens is None else rng.randint(min_tokens, max_tokens),
            "ignore_eos": True,
            "temperature": 0.0,
        }
        for number in range(count)
    ]
