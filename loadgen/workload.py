"""Prompts with domains, from JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eldr_serve.files import write_whole
from tools.cli import BadInput
from tools.lines import numbered_lines

SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Prompt:
    """One record of a workload file: {"id", "domain", "prompt"}."""

    id: str
    domain: str
    text: str


def read_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """All prompts of the files, or of the .jsonl and .jsonl.gz files of the folders, named.

    Raises:
        BadInput: a file is missing or a line is not a record; nothing is skipped in silence.
    """
    prompts = [prompt for path in paths for file in _files(path) for prompt in _read(file)]
    if not prompts:
        raise BadInput("the workload holds no prompt")
    return prompts


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """A file that read_prompts reads, whole or not at all."""
    records = ({"id": p.id, "domain": p.domain, "prompt": p.text} for p in prompts)
    write_whole(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def balanced_sample(prompts: list[Prompt], count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts, as evenly over the domains as they allow, in random order.

    Rare domains are used up first, and the rest is shared among the others.
    """
    rng = random.Random(seed)
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    for members in by_domain.values():
        rng.shuffle(members)
    chosen: list[Prompt] = []
    for left, members in zip(range(len(by_domain), 0, -1), sorted(by_domain.values(), key=len), strict=True):
        chosen += members[: -(-(count - len(chosen)) // left)]
    rng.shuffle(chosen)
    return chosen[:count]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES))
        if not found:
            raise BadInput(f"{path} holds no .jsonl or .jsonl.gz file")
        return found
    if not path.is_file():
        raise BadInput(f"{path} is not there")
    return [path]


def _read(path: Path) -> Iterator[Prompt]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = record.get("id", f"{path.name}:{number}")
            yield Prompt(str(name), str(record.get("domain", "")), record["prompt"])
        except (ValueError, KeyError, AttributeError) as error:
            raise BadInput(f"{path}, line {number}: not a prompt record ({error})") from error
