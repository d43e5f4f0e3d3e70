"""Three workloads for whole replicas, each as chains of requests: a chain's next follows its last answer.

`many domains`     prompts of all domains, none of which begins as another; a chain is one prompt
`sessions`         conversations of several turns: a Mooncake trace's lengths and prefix blocks, shrunk
`system prompts`   applications, a few of them popular, each with a long prompt before its users' own
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lib.prompts import MODEL
from loadgen.traces import BLOCK_TOKENS, TraceRequest, replay
from loadgen.workload import Prompt

Chains = list[list[dict[str, Any]]]  # bodies of /v1/completions

SHRINK = 32  # of a trace's prompts: one of its blocks is half of an engine's
SHRINK_ANSWERS = 8
TURNS = range(3, 13)  # of a session that is played
SESSION_BLOCKS = 32  # of the trace, at most: 512 tokens here
CHARS_PER_TOKEN = 2.5  # of the demo model's tokenizer
APPLICATIONS = 24
SYSTEM_CHARS = 640  # 256 tokens, eight of an engine's blocks


def many_domains(
    prompts: Sequence[Prompt], answers: range, rng: random.Random, *, tag: str, count: int
) -> Chains:
    """`count` chains of one prompt each, domains as often as they are in `prompts`."""
    order = rng.sample(list(prompts), len(prompts))
    return [[_body(f"{tag} {order[n % len(order)].text}", rng.choice(answers))] for n in range(count)]


def sessions(
    records: Sequence[TraceRequest],
    prompts: Sequence[Prompt],
    answers: range,
    rng: random.Random,
    *,
    tag: str,
    count: int,
) -> Chains:
    """`count` conversations of the trace, each a chain of its turns with the trace's prefix blocks.

    A session is known by its second block, since the first is that of all.
    """
    turns: dict[tuple[int, ...], list[TraceRequest]] = {}
    for record in records:
        turns.setdefault(record.hash_ids[:2], []).append(record)
    known = [
        own
        for own in turns.values()
        if len(own) in TURNS and max(len(turn.hash_ids) for turn in own) <= SESSION_BLOCKS
    ]
    chosen = rng.sample(known, min(count, len(known)))
    flat = [turn for own in chosen for turn in own]
    whole = replace(flat[0], prompt_tokens=SESSION_BLOCKS * BLOCK_TOKENS)  # sets the scale, is not sent
    arrivals = list(
        replay(
            [*flat, whole], list(prompts), max_prompt_tokens=whole.prompt_tokens // SHRINK,
            chars_per_token=CHARS_PER_TOKEN,
        )
    )  # fmt: skip
    texts = iter(arrival.prompt.text for arrival in arrivals[:-1])
    return [
        [
            _body(
                f"{tag} {next(texts)}",
                min(max(turn.output_tokens // SHRINK_ANSWERS, answers[0]), answers[-1]),
                key=f"{tag} session {number}",
            )
            for turn in own
        ]
        for number, own in enumerate(chosen)
    ]


def system_prompts(
    prompts: Sequence[Prompt], answers: range, rng: random.Random, *, tag: str, count: int
) -> Chains:
    """`count` chains of one prompt each: an application's own text, then a prompt of its domain."""
    by_domain: dict[str, list[str]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt.text)
    domains = [rng.choice(prompts).domain for _ in range(APPLICATIONS)]
    systems = [_text(by_domain[domain], SYSTEM_CHARS, rng) for domain in domains]
    popularity = [1 / (number + 1) for number in range(APPLICATIONS)]
    return [
        [
            _body(
                f"{tag} {number}: {systems[number]}\n{rng.choice(by_domain[domains[number]])}",
                rng.choice(answers),
                key=f"{tag} application {number}",
            )
        ]
        for number in rng.choices(range(APPLICATIONS), popularity, k=count)
    ]


def _text(parts: Sequence[str], chars: int, rng: random.Random) -> str:
    text = ""
    while len(text) < chars:
        text += rng.choice(parts) + "\n"
    return text[:chars]


def _body(prompt: str, tokens: int, *, key: str | None = None) -> dict[str, Any]:
    """A greedy request; the key is what balancers by session go by."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    return body if key is None else body | {"user": key}
