"""Prompts with domains, from JSON lines: records of this project, or a log of OpenAI requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eldr_serve.errors import UserInputError
from eldr_serve.files import write_atomically
from loadgen.text_files import numbered_lines

SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class WorkloadPrompt:
    """One record of a workload file.

    Attributes:
        text: the prompt, or the concatenated texts of a chat's messages.
        messages: messages of a chat in OpenAI's format. Empty: the text is the only user message.
        max_tokens: the limit that its client requested; None: not given.
    """

    id: str
    domain: str
    text: str
    messages: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    max_tokens: int | None = None

    @property
    def chat(self) -> list[dict[str, Any]]:
        """Return the messages to send."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


def read_prompts(paths: Iterable[Path]) -> list[WorkloadPrompt]:
    """Read all prompts of the files, or of the .jsonl and .jsonl.gz files of the folders.

    A line is {"id", "domain", "prompt"}, the body of an OpenAI request, with `messages` or `prompt`, or a
    line of OpenAI's batch files, {"custom_id", "body"}.

    Raises:
        UserInputError: a file is missing or a line is not a record. No line is skipped silently.
    """
    prompts = [prompt for path in paths for file in _files(path) for prompt in _read(file)]
    if not prompts:
        raise UserInputError("the workload has no prompt")
    return prompts


def write_prompts(path: Path, prompts: Iterable[WorkloadPrompt]) -> None:
    """Write a file that read_prompts reads, atomically."""
    records = (
        {"id": p.id, "domain": p.domain}
        | ({"messages": p.messages} if p.messages else {"prompt": p.text})
        | ({} if p.max_tokens is None else {"max_tokens": p.max_tokens})
        for p in prompts
    )
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def traffic_sample(prompts: list[WorkloadPrompt], count: int, seed: int = 0) -> list[WorkloadPrompt]:
    """Return `count` random prompts, in random order, so that domains have their shares of the traffic."""
    return random.Random(seed).sample(prompts, min(count, len(prompts)))


def balanced_sample(prompts: list[WorkloadPrompt], count: int, seed: int = 0) -> list[WorkloadPrompt]:
    """Return `count` prompts in random order, as evenly over the domains as possible.

    Rare domains are used up first. The rest is shared among the others.
    """
    rng = random.Random(seed)
    by_domain: dict[str, list[WorkloadPrompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    for members in by_domain.values():
        rng.shuffle(members)
    chosen: list[WorkloadPrompt] = []
    for domains_left, members in zip(
        range(len(by_domain), 0, -1), sorted(by_domain.values(), key=len), strict=True
    ):
        chosen += members[: -(-(count - len(chosen)) // domains_left)]
    rng.shuffle(chosen)
    return chosen[:count]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES))
        if not files:
            raise UserInputError(f"{path} has no .jsonl or .jsonl.gz file")
        return files
    if not path.is_file():
        raise UserInputError(f"{path} does not exist")
    return [path]


def _read(path: Path) -> Iterator[WorkloadPrompt]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            yield _prompt(json.loads(line), f"{path.name}:{number}")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserInputError(f"{path}, line {number}: not a prompt record ({error})") from error


def _prompt(record: dict[str, Any], place: str) -> WorkloadPrompt:
    name, domain = record.get("custom_id") or record.get("id", place), str(record.get("domain", ""))
    body = record.get("body", record)
    requested = body.get("max_completion_tokens") or body.get("max_tokens")
    max_tokens = None if requested is None else max(1, int(requested))
    if "messages" not in body:
        if not isinstance(body["prompt"], str):
            raise ValueError("`prompt` must be one text")
        return WorkloadPrompt(str(name), domain, body["prompt"], max_tokens=max_tokens)
    messages = tuple(body["messages"])
    if not messages:
        raise ValueError("`messages` is empty")
    texts = [text for message in messages for text in _texts(message["role"], message.get("content"))]
    return WorkloadPrompt(str(name), domain, "\n\n".join(texts), messages, max_tokens)


def _texts(role: str, content: Any) -> list[str]:
    """Return the texts of a message. An assistant's may have none beside its tool calls."""
    if content is None and role == "assistant":
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if others := sorted({str(part["type"]) for part in parts} - {"text"}):
        raise ValueError(f"a message has {', '.join(others)}: only text can be sent")
    return [str(part["text"]) for part in parts]
