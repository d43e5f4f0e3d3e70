"""HTTP client that holds thousands of OpenAI streams at once and times each of them."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from loadgen.sse import StreamError, StreamTiming, read_stream_async


@dataclass
class Answer:
    """One streamed answer; its times are of time.perf_counter()."""

    started_at_s: float
    ended_at_s: float = 0.0
    timing: StreamTiming = field(default_factory=StreamTiming)
    error: str | None = None


def allow_open_files(number: int) -> None:
    """Raise this process's limit of open files to `number`, or to the maximum that the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    limit = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def open_session(timeout_s: float | None = None) -> aiohttp.ClientSession:
    """Return a client session without a limit on connections. Slower requests than the timeout fail."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s)
    )


async def request_completion(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    started_at_s: float | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one streaming completion, timed from `started_at_s` or now, and store any failure in `error`."""
    answer = Answer(time.perf_counter() if started_at_s is None else started_at_s)
    body = body | {"stream": True}
    try:
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                answer.timing = await read_stream_async(response.content, answer.started_at_s)
                if body.get("ignore_eos"):
                    answer.timing.completion_tokens = body["max_tokens"]  # a chunk may hold several
                if not answer.timing.chunk_times_s:
                    answer.error = "the stream held no token"
    except (aiohttp.ClientError, OSError, TimeoutError, StreamError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_at_s = time.perf_counter()
    return answer


Send = Callable[[aiohttp.ClientSession, dict[str, Any]], Awaitable[Answer]]


def completion_sender(url: str, headers: dict[str, str] | None = None) -> Send:
    """Return a function that sends a request to this URL by `request_completion`."""
    return lambda http, body: request_completion(http, url, body, headers=headers)


async def closed_loop(
    send: Callable[[int], Awaitable[Answer]], *, requests: int, in_flight: int
) -> list[Answer]:
    """Send requests 0 ... requests-1. Start the next as soon as one of `in_flight` ends."""
    numbers = iter(range(requests))
    answers: list[Answer] = []

    async def user() -> None:
        for number in numbers:
            answers.append(await send(number))

    await asyncio.gather(*(user() for _ in range(in_flight)))
    return answers


def max_open_answers(answers: list[Answer]) -> int:
    """Return the maximum number of answers in progress at the same time."""
    changes = sorted([(a.started_at_s, 1) for a in answers] + [(a.ended_at_s, -1) for a in answers])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))


def summarise_answers(answers: list[Answer], since_s: float | None = None) -> dict[str, Any]:
    """Return failures, times in ms, and requests/s and tokens/s since the first start, or `since_s`."""
    good = [a.timing for a in answers if a.error is None]
    latencies = [1000 * (a.ended_at_s - a.started_at_s) for a in answers if a.error is None]
    if since_s is None:
        since_s = min(a.started_at_s for a in answers)
    span = max(a.ended_at_s for a in answers) - since_s
    row: dict[str, Any] = {"requests": len(answers), "failures": len(answers) - len(good)}
    for name, values in (("ttft", [t.ttft_s for t in good]), ("tpot", [t.tpot_s for t in good])):
        ms = [1000 * v for v in values if v is not None]
        for q in (50, 99):
            row[f"{name}_p{q}_ms"] = float(np.percentile(ms, q)) if ms else float("nan")
    row["latency_p50_ms"] = float(np.median(latencies)) if latencies else float("nan")
    row["requests_per_s"] = len(good) / span
    row["tokens_per_s"] = sum(t.completion_tokens or len(t.chunk_times_s) for t in good) / span
    return row


def count_failures(answers: list[Answer]) -> dict[str, int]:
    """Count the five most frequent failures."""
    return dict(Counter(a.error for a in answers if a.error is not None).most_common(5))
