"""The demo model's prompts, in an order fixed by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.demo_model import WEIGHTS
from loadgen.workload import WorkloadPrompt, read_prompts
from offline.calibrate import prompt_tokens

MODEL = "eldr-demo"


def no_longer_than(prompts: Iterable[WorkloadPrompt], tokens: int, *, chat: bool) -> list[WorkloadPrompt]:
    """Return the prompts of at most `tokens` tokens, which include the chat template's with `chat`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    return [p for p in prompts if len(prompt_tokens(tokenizer, p.text, chat=chat)) <= tokens]


def bodies(
    folder: Path,
    *,
    count: int,
    max_tokens: int,
    seed: int,
    min_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Return `count` greedy completion requests. Prompts repeat if there are too few.

    Prompts longer than `max_prompt_tokens` are left out. Answers have exactly `max_tokens` tokens, or a
    random number from `min_tokens` to that.
    """
    prompts = read_prompts([folder])
    if max_prompt_tokens is not None:
        prompts = no_longer_than(prompts, max_prompt_tokens, chat=False)
    rng = random.Random(seed)
    rng.shuffle(prompts)
    greedy = {"model": MODEL, "ignore_eos": True, "temperature": 0.0}
    requests = []
    for number in range(count):
        tokens = max_tokens if min_tokens is None else rng.randint(min_tokens, max_tokens)
        requests.append(greedy | {"prompt": prompts[number % len(prompts)].text, "max_tokens": tokens})
    return requests
