"""Clients that disconnect while a decode engine reads their prompt's blocks do not affect others."""

import asyncio
import random
from typing import Any

import httpx

from tests.e2e.service import Service, session_logs

COMPLETIONS, COUNT, TOGETHER = "/v1/completions", 96, 16


def count_in_logs(words: str) -> int:
    """Return how often the words are in the logs of the Ray session, which have those of all engines."""
    files = (file for file in session_logs().rglob("*") if file.is_file())
    return sum(file.read_text(errors="replace").count(words) for file in files)


async def is_cut(url: str, number: int, rng: random.Random) -> bool:
    """Send a request of several blocks, disconnect at a random moment, and return whether no answer came."""
    body: dict[str, Any] = {
        "model": "eldr-demo",
        "prompt": f"{number} " * 120,
        "max_tokens": 64,
        "ignore_eos": True,
        "stream": bool(number % 2),
    }
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
        post = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await asyncio.wait([post], timeout=rng.uniform(0.02, 1.0))
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        return post.cancelled()


async def test_disconnecting_clients_cause_no_invalid_blocks_and_no_wrong_text(
    service: Service, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    assert count_in_logs("Initializing NIXL worker") >= 3  # all engines write to these logs
    invalid, placed_before = count_in_logs("Potentially invalid KV blocks"), service.counter("placed")
    rng, whole = random.Random(0), 0
    for first in range(0, COUNT, TOGETHER):
        cut = await asyncio.gather(*(is_cut(service.url, first + n, rng) for n in range(TOGETHER)))
        number = first % len(prompts)
        assert await service.greedy_async(prompts[number]) == single_engine["completions"][number]
        whole += 1 + cut.count(False)
    service.wait_empty()
    # Some clients left after their prompt had a decode worker, whose engine then reads its blocks.
    assert service.counter("placed") - placed_before > whole
    assert count_in_logs("Potentially invalid KV blocks") == invalid
