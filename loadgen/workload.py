"""Prompts with domains, from JSON lines."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr_serve.files import write_whole

SUFFIXES = (".jsonl", ".jsonl.gz")


class WorkloadError(ValueError):
    """The prompts cannot be used; one sentence."""


@dataclass(frozen=True)
class Prompt:
    """One record of a workload file: {"id", "domain", "prompt"}."""

    id: str
    domain: str
    text: str


def read_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """All prompts of the files, or of the .jsonl and .jsonl.gz files of the folders, named.

    Raises:
        WorkloadError: a file is missing or a line is not a record; nothing is skipped in silence.
    """
    prompts = [prompt for path in paths for file in _files(path) for prompt in _read(file)]
    if not prompts:
        raise WorkloadError("the workload holds no prompt")
    return prompts


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """A file that read_prompts reads, whole or not at all."""
    records = ({"id": p.id, "domain": p.domain, "prompt": p.text} for p in prompts)
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


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
            raise WorkloadError(f"{path} holds no .jsonl or .jsonl.gz file")
        return found
    if not path.is_file():
        raise WorkloadError(f"{path} is not there")
    return [path]


def _read(path: Path) -> Iterator[Prompt]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    yield Prompt(
                        str(record.get("id", f"{path.name}:{number}")),
                        str(record.get("domain", "")),
                        record["prompt"],
                    )
                except (ValueError, KeyError, AttributeError) as error:
                    raise WorkloadError(f"{path}, line {number}: not a prompt record ({error})") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
