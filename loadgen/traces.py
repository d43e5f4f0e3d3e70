"""Replay of arrival traces: recorded times, lengths and shared prefixes, with the text of a workload.

Traces have no text. A prompt is built from the workload's prompts and depends only on trace, workload and
seed. If a trace names its prefix blocks, equal leading blocks get equal text, so that prefix caches see the
same hits as in the recorded service.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eldr_serve.errors import UserInputError
from loadgen.arrivals import Arrival
from loadgen.text_files import numbered_lines
from loadgen.workload import WorkloadPrompt

BLOCK_TOKENS = 512  # prompt tokens per hash id of a Mooncake trace
_CSV_HEADER = "timestamp_s,prompt_tokens,output_tokens"


@dataclass(frozen=True)
class RecordedArrival:
    """A request of an arrival trace: one line of its file."""

    due_s: float  # time since the first request, s
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # ids of its prefix blocks, in order; empty if the trace has none


def read_arrival_trace(path: Path) -> list[RecordedArrival]:
    """Read an Azure trace (.csv, .csv.gz) or a Mooncake trace (.jsonl, .jsonl.gz).

    CSV: columns timestamp_s, prompt_tokens, output_tokens. JSON lines: timestamp_ms, prompt_tokens,
    output_tokens and hash_ids, one id for every 512 prompt tokens.

    Raises:
        UserInputError: the file, or a line that the message names, is not such a trace.
    """
    name = path.name.removesuffix(".gz")
    parse = {".csv": _csv_request, ".jsonl": _json_request}.get(Path(name).suffix)
    if parse is None:
        raise UserInputError(f"{path} is not a trace: its name must end in .csv, .jsonl or either with .gz")
    requests = list(_requests(path, parse))
    if not requests:
        raise UserInputError(f"{path} has no request")
    return requests


def replay(
    trace: list[RecordedArrival],
    prompts: list[WorkloadPrompt],
    *,
    speed: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
    chars_per_token: float = 4.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Return the arrival trace as arrivals.

    Args:
        speed: replay speed relative to the recording, above 0.
        max_prompt_tokens: length of the longest prompt. All prompts, with their shared prefixes, are
            shortened by the same factor. None: lengths as recorded.
        max_tokens: maximum output tokens; None: as recorded.
        chars_per_token: characters per token. Prompt lengths are as accurate as this.

    Raises:
        UserInputError: a speed or a cap that is not above 0.
    """
    for name, value in (("trace speed", speed), ("characters per token", chars_per_token)):
        if not (math.isfinite(value) and value > 0):
            raise UserInputError(f"{name} must be above 0, got {value}")
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise UserInputError(f"the maximum prompt length must be above 0 tokens, got {max_prompt_tokens}")
    longest = max(request.prompt_tokens for request in trace)
    scale = min(1.0, max_prompt_tokens / longest) if max_prompt_tokens else 1.0
    text = _Text(prompts, chars_per_token * scale, seed)
    return (
        Arrival(
            number,
            request.due_s / speed,
            text.prompt(number, request),
            min(request.output_tokens, max_tokens or request.output_tokens),
        )
        for number, request in enumerate(trace)
    )


class _Text:
    """Prompts of given lengths. A block has its predecessor's domain, so a conversation has one domain."""

    def __init__(self, prompts: list[WorkloadPrompt], chars_per_token: float, seed: int) -> None:
        self._by_domain: dict[str, list[str]] = {}
        for prompt in prompts:
            self._by_domain.setdefault(prompt.domain, []).append(prompt.text)
        self._choices = [prompt.domain for prompt in prompts]  # each domain as often as it has prompts
        self._chars_per_token = chars_per_token
        self._seed = seed
        self._domains: dict[int, str] = {}  # domain of each hash id

    def prompt(self, number: int, request: RecordedArrival) -> WorkloadPrompt:
        length = max(1, round(request.prompt_tokens * self._chars_per_token))
        if not request.hash_ids:
            domain = random.Random(f"{self._seed}/domain/{number}").choice(self._choices)
            return WorkloadPrompt(f"trace-{number}", domain, self._words(f"n{number}", domain, length))
        parent: str | None = None
        ends = [round((i + 1) * BLOCK_TOKENS * self._chars_per_token) for i in range(len(request.hash_ids))]
        parts = []
        for index, (hash_id, start, end) in enumerate(zip(request.hash_ids, [0, *ends], ends, strict=False)):
            # The first block is often a system prompt that all share, so it does not determine the domain.
            if hash_id not in self._domains:
                rng = random.Random(f"{self._seed}/domain/b{hash_id}")
                self._domains[hash_id] = parent if parent and index > 1 else rng.choice(self._choices)
            parent = self._domains[hash_id]
            parts.append(self._words(f"b{hash_id}", parent, end - start))
        return WorkloadPrompt(f"trace-{number}", parent or "", "".join(parts)[:length])

    def _words(self, key: str, domain: str, length: int) -> str:
        """Return `length` characters that begin with the key, so that no two keys share a prefix."""
        rng = random.Random(f"{self._seed}/{key}")
        text = f"[{key}] "
        while len(text) < length:
            text += rng.choice(self._by_domain[domain]) + "\n"
        return text[:length]


def _requests(path: Path, parse: Callable[[str], RecordedArrival]) -> Iterator[RecordedArrival]:
    last_s = 0.0
    for number, line in numbered_lines(path):
        if number == 1 and parse is _csv_request:
            if line.strip() != _CSV_HEADER:
                raise UserInputError(f"{path}, line 1: the columns are not {_CSV_HEADER}")
            continue
        try:
            request = parse(line)
            _check(request, last_s)
        except KeyError as error:
            raise UserInputError(f"{path}, line {number}: {error.args[0]} is missing") from error
        except (ValueError, TypeError) as error:
            raise UserInputError(f"{path}, line {number}: {error}") from error
        last_s = request.due_s
        yield request


def _check(request: RecordedArrival, last_s: float) -> None:
    if not (math.isfinite(request.due_s) and request.due_s >= last_s):
        raise ValueError(f"the time {request.due_s} s is before {last_s} s")
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise ValueError(f"it has {request.prompt_tokens} prompt and {request.output_tokens} output tokens")
    if request.hash_ids and len(request.hash_ids) * BLOCK_TOKENS < request.prompt_tokens:
        raise ValueError(f"{len(request.hash_ids)} blocks cannot hold {request.prompt_tokens} tokens")


def _csv_request(line: str) -> RecordedArrival:
    fields = line.strip().split(",")
    if len(fields) != 3:
        raise ValueError(f"it has {len(fields)} fields, not 3")
    return RecordedArrival(float(fields[0]), int(fields[1]), int(fields[2]))


def _json_request(line: str) -> RecordedArrival:
    record = json.loads(line)
    return RecordedArrival(
        float(record["timestamp_ms"]) / 1000,
        int(record["prompt_tokens"]),
        int(record["output_tokens"]),
        tuple(int(i) for i in record["hash_ids"]),
    )
