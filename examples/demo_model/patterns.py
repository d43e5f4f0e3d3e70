"""Sentence patterns of the generated dialogues, written for this model, and questions with options."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Pair = tuple[str, str]  # prompt, answer
PATTERNS: dict[str, Any] = json.loads((Path(__file__).parent / "patterns.json").read_text("utf-8"))
LETTERS = "ABCDE"


def shuffle_options(rng: random.Random, right: str, wrong: list[str], mark: str = ".") -> tuple[str, str]:
    """Shuffle the answers; return them, one per line, and the line of the right one."""
    answers = [right, *wrong]
    rng.shuffle(answers)
    lines = "\n".join(f"{letter}{mark} {text}" for letter, text in zip(LETTERS, answers, strict=False))
    return lines, f"{LETTERS[answers.index(right)]}{mark} {right}"
