"""Compare the prefix hits of a whole replica with those that its reports predict.

python prefix_script.py MODEL OUT
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.scheduling.prefixes import PrefixMap, prompt_blocks
from tests.engine import contract_script
from tests.engine.contract_script import end, start

BLOCKS = 20  # blocks of 32 tokens, so few that later conversations evict earlier ones
TOKENS = 40  # length of an answer, more than a block
SETTLE_S = 0.1  # wait for the statistics of the last step


class Conversations:
    """Conversations with the engine, which predict the cached tokens of each prompt."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._block_tokens = engine.prefix_cache()[0]
        self._map, self._known, self._number = PrefixMap(), False, 0
        self.hits: list[tuple[int, int]] = []  # predicted and measured tokens

    async def send(self, prompt: list[int], salt: str = "") -> list[int]:
        """Send a prompt, and return it with its answer."""
        self._number += 1
        blocks = prompt_blocks(np.array(prompt, np.uint32), self._block_tokens, salt)
        predicted = int(self._map.cached_tokens(["w"], blocks)[0])
        body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        request = EngineRequest("completions", json.dumps(body).encode(), f"{self._number}", cache_salt=salt)
        ids = bytearray()
        report = await self._engine.generate(request, lambda payload, tokens, made=b"": ids.extend(made))
        self.hits.append((predicted, int(report.cached_tokens)))
        return [*prompt, *np.frombuffer(ids, np.uint32).tolist()]

    async def read_report(self) -> None:
        """Apply the engine's report to the map, as the router does."""
        await asyncio.sleep(SETTLE_S)
        changes = self._engine.take_prefix_changes(full=not self._known)
        self._known = self._map.report("w", changes)


async def check(model: str) -> dict[str, Any]:
    contract_script.KWARGS |= {"num_gpu_blocks_override": BLOCKS}
    engine: Any = await start("whole", model)
    conversations, rng = Conversations(engine), np.random.default_rng(45)

    def new(tokens: int) -> list[int]:
        return [int(token) for token in rng.integers(1, 257, tokens)]

    system = new(70)
    past = [system + new(20) for _ in range(4)]
    for _ in range(2):
        for number, prompt in enumerate(past):
            salt = "salt" if number == 3 else ""
            past[number] = await conversations.send(prompt, salt) + new(9)
            await conversations.read_report()
    await asyncio.gather(*(conversations.send(system + [9] * 40) for _ in range(3)))  # equal blocks
    conversations.hits = conversations.hits[:-3]  # none was known when they were sent
    await conversations.read_report()
    for prompt in (*past, system + [9] * 40, new(200), *past[::-1], [*system, 5]):
        await conversations.send(prompt)
        await conversations.read_report()
    report = {"hits": conversations.hits}
    end(engine)
    return report


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(check(sys.argv[1]))))
