"""Comparison of the greedy answers of a running service between policies."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from eldr_serve.commands.client import OperatorClient
from eldr_serve.errors import ServiceFailedError
from loadgen.trial import parse_policy
from loadgen.workload import WorkloadPrompt

GREEDY_TOKENS = 24  # default length of the compared answers
ANSWER_TIMEOUT_S = 120.0


def greedy_answers(
    service: OperatorClient, model: str, prompts: Sequence[WorkloadPrompt], max_tokens: int
) -> list[str]:
    """Return answers at temperature 0, one request at a time, since engines are not batch-invariant."""
    with httpx.Client(base_url=service.url, timeout=ANSWER_TIMEOUT_S) as http:
        return [_answer(http, model, prompt, max_tokens) for prompt in prompts]


def differing_answers(
    service: OperatorClient,
    model: str,
    policies: Sequence[str],
    prompts: Sequence[WorkloadPrompt],
    *,
    max_tokens: int = GREEDY_TOKENS,
) -> dict[str, list[str]]:
    """Return, by policy, the ids of prompts whose answers differ from those under the first policy.

    The last policy remains set.
    """
    different: dict[str, list[str]] = {}
    first_answers: list[str] = []
    for policy in policies:
        service.set_policy(*parse_policy(policy))
        answers = greedy_answers(service, model, prompts, max_tokens)
        first_answers = first_answers or answers
        different[policy] = [
            prompt.id
            for prompt, answer, first_answer in zip(prompts, answers, first_answers, strict=True)
            if answer != first_answer
        ]
    return different


def greedy_sentence(differing: dict[str, list[str]], prompts: int) -> str:
    """Return a sentence on the result of differing_answers."""
    differing_ids = {policy: ids for policy, ids in differing.items() if ids}
    if not differing_ids:
        every = f"all {len(differing)} policies"
        return f"Greedy answers to {prompts} prompts, sent one at a time, are equal under {every}."
    listed = ", ".join(f"{policy}: {' '.join(ids)}" for policy, ids in differing_ids.items())
    return f"GREEDY ANSWERS DIFFER from those under {next(iter(differing))} ({listed})."


def _answer(http: httpx.Client, model: str, prompt: WorkloadPrompt, max_tokens: int) -> str:
    body = {"model": model, "messages": prompt.chat, "max_tokens": max_tokens, "temperature": 0}
    try:
        answer = http.post("/v1/chat/completions", json=body)
    except httpx.TimeoutException as error:
        raise ServiceFailedError(
            f"prompt {prompt.id!r} was not answered within {ANSWER_TIMEOUT_S:g} s: is the service overloaded?"
        ) from error
    if answer.status_code != 200:
        raise ServiceFailedError(
            f"prompt {prompt.id!r} was not answered: HTTP {answer.status_code}: {answer.text[:200]}"
        )
    return str(answer.json()["choices"][0]["message"]["content"])
