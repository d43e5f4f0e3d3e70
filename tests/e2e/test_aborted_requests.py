"""Clients that disconnect while a decode engine reads their prompt's blocks do not affect others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
from service import Service, session_logs

COMPLETIONS, COUNT = "/v1/completions", 96


def invalid_block_warnings() -> int:
    """Return how often NIXL has logged that blocks may be invalid."""
    return sum(
        file.read_text(errors="replace").count("Potentially invalid KV blocks")
        for file in session_logs().rglob("*")
        if file.is_file()
    )


async def leave_early(url: str, number: int, rng: random.Random) -> None:
    """Send a request of several blocks and disconnect at a random moment before its end."""
    body: dict[str, Any] = {
        "model": "eldr-demo", "prompt": f"{number} " * 120, "max_tokens": 64, "ignore_eos": True,
        "stream": bool(number % 2),
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        post = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await asyncio.wait([post], timeout=rng.uniform(0.02, 1.0))
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)


async def test_disconnecting_clients_cause_no_invalid_blocks_and_no_wrong_text(
    service: Service, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    before, rng = invalid_block_warnings(), random.Random(0)
    for first in range(0, COUNT, 16):
        await asyncio.gather(*(leave_early(service.url, first + n, rng) for n in range(16)))
        prompt, wanted = prompts[first % len(prompts)], single_engine["completions"][first % len(prompts)]
        answer = await service.async_client.completions.create(
            model="eldr-demo", prompt=prompt, max_tokens=24, temperature=0
        )
        assert answer.choices[0].text == wanted
    service.wait_empty()
    assert invalid_block_warnings() == before
