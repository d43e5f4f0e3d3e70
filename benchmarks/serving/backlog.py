"""Send many long prompts at once, and retry refused ones after their Retry-After.

    python -m benchmarks.serving.backlog

All prompts are sent to a real prefill engine at the same moment, with one token to generate. A refused client
retries after the answer's Retry-After until it gets 200. The slowest refusal should come within 2 s. The
first retry should succeed, so most_tries should be 2. As no engine fails, ejected, duplicate_prefills and
errors should be 0.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.client import allow_open_files, open_session
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.engines import our_arguments
from benchmarks.lib.live import serve_application
from benchmarks.lib.prompts import MODEL
from eldr_serve.commands.run import run
from loadgen.results import publish
from loadgen.workload import read_prompts

BENCHMARKS = {"backlog": "all"}
_MAX_ATTEMPTS = 20


@dataclass
class _Request:
    """One prompt and the results of its attempts."""

    statuses: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # duration of each attempt
    retry_after_s: list[float] = field(default_factory=list)  # one value for each refusal
    error: str = ""
    done_s: float = 0.0  # time since the start of the run


def texts(folder: Path, count: int, tokens: int, seed: int, model: Path) -> list[str]:
    """Return distinct prompts of about `tokens` tokens, made of words from a folder of prompts."""
    from transformers import AutoTokenizer

    words = " ".join(prompt.text for prompt in read_prompts([folder])).split()
    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(seed)
    return [
        str(tokenizer.decode(tokenizer.encode(" ".join(rng.choices(words, k=tokens)))[:tokens]))
        for _ in range(count)
    ]


async def _send_until_answered(
    http: aiohttp.ClientSession, url: str, prompt: str, start_s: float, request: _Request
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    while len(request.statuses) < _MAX_ATTEMPTS:
        sent_s = time.perf_counter()
        try:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                text = await answer.text()
                request.statuses.append(answer.status)
                request.seconds.append(time.perf_counter() - sent_s)
                retry_after = answer.headers.get("Retry-After")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            request.error = f"{type(error).__name__}: {error}"
            return
        if answer.status == 200:
            request.done_s = time.perf_counter() - start_s
            return
        if answer.status not in (429, 503) or retry_after is None:
            request.error = f"HTTP {answer.status}: {text[:200]}"
            return
        request.retry_after_s.append(float(retry_after))
        await asyncio.sleep(float(retry_after))
    request.error = f"refused {_MAX_ATTEMPTS} times"


async def send_all(
    url: str, prompts: list[str], timeout_s: float, seconds: float | None = None
) -> list[_Request]:
    """Send all prompts at once and retry refused ones, up to a time limit in seconds."""
    requests = [_Request() for _ in prompts]
    async with open_session(timeout_s) as http:
        start_s = time.perf_counter()
        tasks = [
            asyncio.create_task(_send_until_answered(http, url, prompt, start_s, request))
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return requests


def row(requests: list[_Request], before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Return the figures of a run. `before` and `after` are the router's counters."""
    refusals_s = [
        s for r in requests for s, status in zip(r.seconds, r.statuses, strict=True) if status != 200
    ]
    answered_requests = [r for r in requests if r.statuses and r.statuses[-1] == 200]
    return {
        "requests": len(requests),
        "answered": len(answered_requests),
        "at_first_try": sum(len(r.statuses) == 1 for r in answered_requests),
        "refusals": len(refusals_s),
        "slowest_refusal_s": max(refusals_s, default=0.0),
        "refusal_p50_s": float(np.median(refusals_s)) if refusals_s else 0.0,
        "most_tries": max((len(r.statuses) for r in requests), default=0),
        "second_try_sufficed": sum(len(r.statuses) == 2 for r in answered_requests),
        "longest_retry_after_s": max((s for r in requests for s in r.retry_after_s), default=0.0),
        "slowest_answer_s": max((r.seconds[-1] for r in answered_requests), default=0.0),
        "all_done_s": max((r.done_s for r in answered_requests), default=0.0),
        "ejected": after.get("ejected", 0) - before.get("ejected", 0),
        "duplicate_prefills": after.get("prefill_retries", 0) - before.get("prefill_retries", 0),
        "errors": sum(bool(r.error) for r in requests),
        "not_done": sum(not r.error for r in requests) - len(answered_requests),
    }


def backlog(
    requests: Annotated[int, typer.Option(min=1, help="Number of prompts, all sent at once.")] = 1000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1500,
    warm_up: Annotated[int, typer.Option(min=0, help="Similar prompts that are answered first.")] = 0,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("examples/demo_model/weights"),
    prompts: options.Prompts = options.PROMPTS,
    timeout_s: Annotated[float, typer.Option(min=1, help="Timeout of one attempt, s.")] = 300.0,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit, s; unanswered prompts count as not_done.")
    ] = 900.0,
    port: options.Ports = 8340,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Send more prompts at once than the engines can prefill within the service's limit."""
    unwind_on_sigterm()
    allow_open_files(8192)
    bodies = texts(prompts, warm_up + requests, tokens, seed, model)
    arguments = our_arguments(deployment, model, decode_replicas=1)
    with serve_application(arguments, port=port) as client:
        url, status = client.url, client.status
        if warm_up:
            asyncio.run(send_all(url, bodies[:warm_up], timeout_s))
            time.sleep(2.0)  # counters are reported once per second
        before = status()["counters"]
        answers = asyncio.run(send_all(url, bodies[warm_up:], timeout_s, seconds))
        time.sleep(2.0)
        figures = row(answers, before, status()["counters"])
    errors = sorted({request.error for request in answers if request.error})
    publish(
        "backlog",
        [figures],
        seed=seed,
        out=out,
        inputs={
            "requests": requests,
            "tokens": tokens,
            "warm_up": warm_up,
            "deployment": deployment.stem,
            "errors": errors[:5],
        },
        notes="One prefill and one decode engine, one token per answer. Engines, ingress and clients share "
        "the cores. A refused client waits as long as Retry-After says.",
    )


if __name__ == "__main__":
    run(backlog)
