"""A greedy "model" without weights, and the KV blocks in which a fake engine keeps its tokens.

The next token is a checksum of all tokens before it, so the right answer to a prompt is known in advance.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.signature import pack_counts

MODEL = "m"
BLOCK_TOKENS = 4
LAYERS, EXPERTS = 2, 8
VOCABULARY = 9973
_ANOTHER_PROMPT = (-1,) * BLOCK_TOKENS


def tokens_of(text: str) -> list[int]:
    """Return one token for each word. Numbers are parsed as `text_of` writes them."""
    return [int(word) if word.isdigit() else zlib.crc32(word.encode()) % VOCABULARY for word in text.split()]


def text_of(token: int) -> str:
    return f" {token}"


def continuation(tokens: Sequence[int]) -> Iterator[int]:
    """Yield the greedy continuation of the tokens, without end."""
    state = 0
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "big", signed=True), state)
    while True:
        yield (token := state % VOCABULARY)
        state = zlib.crc32(token.to_bytes(4, "big", signed=True), state)


def prompt_of(fields: dict[str, Any]) -> list[int]:
    """Return the prompt tokens of a chat or a completion."""
    if "messages" in fields:
        return [token for message in fields["messages"] for token in tokens_of(message["content"])]
    prompt = fields["prompt"]
    return tokens_of(prompt) if isinstance(prompt, str) else list(prompt)


def expert_counts_of(prompt: Sequence[int]) -> str:
    """Return a prompt's expert counts, packed."""
    counts = np.zeros((LAYERS, EXPERTS), np.uint32)
    counts[:, prompt[0] % EXPERTS] = len(prompt)
    return pack_counts(counts)


class Blocks:
    """The KV blocks of one engine, allocated first come, first served."""

    def __init__(self, number: int) -> None:
        self.content: list[tuple[int, ...]] = [_ANOTHER_PROMPT] * number
        self._free = deque(range(number))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return self.in_use / len(self.content)

    @property
    def in_use(self) -> int:
        return len(self.content) - len(self._free)

    async def take(self, tokens: int) -> list[int]:
        """Wait for enough free blocks for `tokens` tokens, and allocate them."""
        number = -(-tokens // BLOCK_TOKENS)
        if number > len(self.content):
            raise RequestRefusedError("the prompt is longer than the KV cache", status=400)
        turn: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, turn))
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise

    def give_back(self, blocks: list[int]) -> None:
        """Free the blocks. Their content is overwritten at once."""
        for block in blocks:
            self.content[block] = _ANOTHER_PROMPT
        self._free.extend(blocks)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= len(self._free)):
            number, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result([self._free.popleft() for _ in range(number)])


def cut_into_blocks(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens of each block."""
    return [tuple(tokens[start : start + BLOCK_TOKENS]) for start in range(0, len(tokens), BLOCK_TOKENS)]
