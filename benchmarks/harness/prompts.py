"""The demo model's prompts, in an order fixed by a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from loadgen.workload import read_prompts

MODEL = "eldr-demo"


def bodies(folder: Path, *, count: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """`count` greedy completion requests of exactly `max_tokens` tokens; prompts repeat if they must."""
    prompts = read_prompts([folder])
    random.Random(seed).shuffle(prompts)
    return [
        {
            "model": MODEL,
            "prompt": prompts[number % len(prompts)].text,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        for number in range(count)
    ]
