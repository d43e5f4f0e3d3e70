"""Three workloads for whole replicas, as chains of requests: each request follows the previous answer.

`many domains`     prompts of all domains without common prefixes. A chain is one prompt
`sessions`         conversations of several turns, with lengths and prefix blocks of a Mooncake trace
`system prompts`   applications, a few of them popular, each with a long prompt before its users' own
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lib.prompts import MODEL
from loadgen.traces import BLOCK_TOKENS, RecordedArrival, replay
from loadgen.workload import WorkloadPrompt

Chains = list[list[dict[str, Any]]]  # bodies of /v1/completions

SHRINK = 32  # divisor of a trace's prompts: one of its blocks is half of an engine's
SHRINK_ANSWERS = 8
TURNS = range(3, 13)  # number of turns of a session
SESSION_BLOCKS = 32  # maximum blocks of the trace: 512 tokens here
CHARS_PER_TOKEN = 2.5  # ratio of the demo model's tokenizer
APPLICATIONS = 24
SYSTEM_CHARS = 640  # 256 tokens, eight of an engine's blocks


def many_domains(
    prompts: Sequence[WorkloadPrompt], answers: range, rng: random.Random, *, tag: str, count: int
) -> Chains:
    """Return `count` chains of one prompt each. Domains are as frequent as in `prompts`."""
    order = rng.sample(list(prompts), len(prompts))
    return [[_body(f"{tag} {order[n % len(order)].text}", rng.choice(answers))] for n in range(count)]


def conversations(records: Sequence[RecordedArrival]) -> list[list[RecordedArrival]]:
    """Return the turns of each conversation that is neither too short nor too long.

    The second block identifies a conversation, since all of them share the first.
    """
    turns: dict[tuple[int, ...], list[RecordedArrival]] = {}
    for record in records:
        turns.setdefault(record.hash_ids[:2], []).append(record)
    return [
        session
        for session in turns.values()
        if len(session) in TURNS and max(len(turn.hash_ids) for turn in session) <= SESSION_BLOCKS
    ]


def sessions(
    records: Sequence[RecordedArrival],
    prompts: Sequence[WorkloadPrompt],
    answers: range,
    rng: random.Random,
    *,
    tag: str,
    count: int,
) -> Chains:
    """Return `count` conversations of the trace. Each chain has its turns with the trace's prefix blocks."""
    all_conversations = conversations(records)
    chosen = rng.sample(all_conversations, min(count, len(all_conversations)))
    turns = [turn for session in chosen for turn in session]
    longest = replace(turns[0], prompt_tokens=SESSION_BLOCKS * BLOCK_TOKENS)  # sets the scale and is not sent
    max_tokens = longest.prompt_tokens // SHRINK
    arrivals = replay(
        [*turns, longest], list(prompts), max_prompt_tokens=max_tokens, chars_per_token=CHARS_PER_TOKEN
    )
    texts = (f"{tag} {arrival.prompt.text}" for arrival in list(arrivals)[:-1])

    def body(turn: RecordedArrival, key: str) -> dict[str, Any]:
        tokens = min(max(turn.output_tokens // SHRINK_ANSWERS, answers[0]), answers[-1])
        return _body(next(texts), tokens, key=key)

    return [
        [body(turn, f"{tag} session {number}") for turn in session] for number, session in enumerate(chosen)
    ]


def system_prompts(
    prompts: Sequence[WorkloadPrompt], answers: range, rng: random.Random, *, tag: str, count: int
) -> Chains:
    """Return `count` chains of one prompt each: an application's own text, then a prompt of its domain."""
    by_domain: dict[str, list[str]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt.text)
    domains = [rng.choice(prompts).domain for _ in range(APPLICATIONS)]
    systems = [_text(by_domain[domain], SYSTEM_CHARS, rng) for domain in domains]
    popularity = [1 / (number + 1) for number in range(APPLICATIONS)]
    chains = []
    for number in rng.choices(range(APPLICATIONS), popularity, k=count):
        text = f"{tag} {number}: {systems[number]}\n{rng.choice(by_domain[domains[number]])}"
        chains.append([_body(text, rng.choice(answers), key=f"{tag} application {number}")])
    return chains


def _text(parts: Sequence[str], chars: int, rng: random.Random) -> str:
    text = ""
    while len(text) < chars:
        text += rng.choice(parts) + "\n"
    return text[:chars]


def _body(prompt: str, tokens: int, *, key: str | None = None) -> dict[str, Any]:
    """Return a greedy request. Balancers that route by session read the key."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return body if key is None else body | {"user": key}
