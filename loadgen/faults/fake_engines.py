"""Prefill and decode engines without a model, that know who owns each KV block.

The "model" is greedy: the next token is a checksum of all tokens that the engine has in its KV cache. So one
wrong block changes every token after it. A prefill engine's block belongs to a prompt until the decode
engine has read it, it is released, or its lease ends; from then on it holds another prompt. A decode engine
reads whatever is there and keeps it in its prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from eldr_serve.engine.abandoned import AbandonedPrompts
from eldr_serve.engine.fake import InProcess
from eldr_serve.engine.keys import SIGNATURE
from eldr_serve.engine.protocol import EngineRequest, Prefilled, Send
from eldr_serve.errors import Refused
from eldr_serve.expert_sample import ExpertSample
from eldr_serve.routing.cost import StepSums
from eldr_serve.signature import pack_counts
from loadgen.faults.virtual_time import Process

MODEL = "m"
BLOCK_TOKENS = 4
TOKEN_HEADER = "x-token-s"  # of a client's request: time of one decode step, s
LAYERS, EXPERTS = 2, 8
VOCABULARY = 9973
_ANOTHER_PROMPT = (-1,) * BLOCK_TOKENS


# -- the model -----------------------------------------------------------------------------------


def tokens_of(text: str) -> list[int]:
    """A word each; numbers are as `text_of` writes them."""
    return [int(word) if word.isdigit() else zlib.crc32(word.encode()) % VOCABULARY for word in text.split()]


def text_of(token: int) -> str:
    return f" {token}"


def continuation(tokens: Sequence[int], seed: int = 0) -> Iterator[int]:
    """Greedy tokens after these, without an end."""
    state = seed
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "big", signed=True), state)
    while True:
        yield (token := state % VOCABULARY)
        state = zlib.crc32(token.to_bytes(4, "big", signed=True), state)


def prompt_of(fields: dict[str, Any]) -> list[int]:
    """The prompt's tokens, of a chat or a completion."""
    if "messages" in fields:
        return [token for message in fields["messages"] for token in tokens_of(message["content"])]
    prompt = fields["prompt"]
    return tokens_of(prompt) if isinstance(prompt, str) else list(prompt)


def signature_of(prompt: Sequence[int]) -> str:
    """A prompt's expert counts, packed."""
    counts = np.zeros((LAYERS, EXPERTS), np.uint32)
    counts[:, prompt[0] % EXPERTS] = len(prompt)
    return pack_counts(counts)


# -- memory --------------------------------------------------------------------------------------


class Blocks:
    """KV blocks of one engine, handed out first come, first served."""

    def __init__(self, number: int) -> None:
        self.content: list[tuple[int, ...]] = [_ANOTHER_PROMPT] * number
        self._free = deque(range(number))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def usage(self) -> float:
        """Share in use, 0 to 1."""
        return self.in_use / len(self.content)

    @property
    def in_use(self) -> int:
        return len(self.content) - len(self._free)

    async def take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens, as soon as there are."""
        number = -(-tokens // BLOCK_TOKENS)
        if number > len(self.content):
            raise Refused("the prompt is longer than the KV cache", status=400)
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
        """They are free, and at once another prompt's."""
        for block in blocks:
            self.content[block] = _ANOTHER_PROMPT
        self._free.extend(blocks)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= len(self._free)):
            number, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result([self._free.popleft() for _ in range(number)])


def _cut(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + BLOCK_TOKENS]) for at in range(0, len(tokens), BLOCK_TOKENS)]


# -- engines -------------------------------------------------------------------------------------


class BlockEngine(InProcess):
    """What both have of eldr_serve.engine.protocol.Engine.

    Args:
        process: in which it runs.
        blocks: KV blocks that it has.
        time_s: draws how long a piece of work takes that takes so long in the mean, s.

    Attributes:
        running: requests that it works for.
        sick: it fails whatever a client asks of it.
        failed: calls that it has failed so.
    """

    def __init__(self, process: Process, blocks: int, time_s: Callable[[float], float]) -> None:
        self.process = process
        self.name = process.name
        self.blocks = Blocks(blocks)
        self.running = 0
        self.time_s = time_s
        self.sick, self.failed = False, 0
        self._steps: list[tuple[int, int, int, float]] = []  # requests, KV tokens, experts, s

    def fail_if_sick(self, request: EngineRequest) -> None:
        """Warm-ups too, which do not count."""
        if self.sick:
            self.failed += not request.id.startswith("warm-")
            raise RuntimeError("the engine is sick")

    async def answer(self, request: EngineRequest, send: Send) -> None:
        """The prompt's tokens, whatever is asked."""
        send(json.dumps({"tokens": prompt_of(json.loads(request.body))}).encode(), 0)

    async def shape(self) -> tuple[int, int]:
        """See protocol.Engine."""
        return LAYERS, EXPERTS

    def kv_usage(self) -> float:
        """See protocol.Engine."""
        return self.blocks.usage

    def prefix_cache(self) -> tuple[int, int]:
        """See protocol.Engine."""
        return BLOCK_TOKENS, BLOCK_TOKENS * len(self.blocks.content)

    def take_steps(self) -> StepSums:
        """See protocol.Engine."""
        taken, self._steps = self._steps, []
        return StepSums.of(*zip(*taken, strict=True)) if taken else StepSums()

    def take_samples(self) -> list[ExpertSample]:
        """See protocol.Engine; no request is sampled."""
        return []

    def status_of(self, error: Exception) -> int:
        """See protocol.Engine."""
        return 500

    def parameter_of(self, error: Exception) -> str | None:
        """See protocol.Engine."""
        return None

    async def stop(self) -> None:
        """See protocol.Engine."""


class PrefillEngine(BlockEngine):
    """Its finished prompts' blocks are held until they were read, are abandoned, or their lease ends.

    Attributes:
        held: blocks of finished prompts, by the engine's name for them.
        expired: leases that have run out: nobody read these blocks, nor released them.
    """

    def __init__(
        self, process: Process, blocks: int, time_s: Callable[[float], float], *, lease_s: float
    ) -> None:
        super().__init__(process, blocks, time_s)
        self.held: dict[str, list[int]] = {}
        self.expired = 0
        self._lease_s = lease_s
        self._names = AbandonedPrompts(process.loop.time)
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._prompts = 0

    async def release(self, request_id: str) -> None:
        """See protocol.Engine."""
        self._names.abandon([request_id])
        self._free_abandoned()

    async def prefill(self, request: EngineRequest) -> Prefilled:
        """See protocol.Engine."""
        self.fail_if_sick(request)
        prompt = prompt_of(json.loads(request.body))
        context = prompt + _tokens(request.generated)
        blocks = await self.blocks.take(len(context))
        self.running += 1
        try:
            await asyncio.sleep(self.time_s(0.01))
        except asyncio.CancelledError:
            self.blocks.give_back(blocks)
            raise
        finally:
            self.running -= 1
        self._prompts += 1
        engine_id = f"{self.name}/{self._prompts}"
        for block, tokens in zip(blocks, _cut(context), strict=True):
            self.blocks.content[block] = tokens
        self.held[engine_id] = blocks
        self.prolong(engine_id)
        self._names.hold({engine_id: request.id})
        self._free_abandoned()
        await asyncio.sleep(self.time_s(0.001))  # from the engine's core to its front end
        where = {"engine": self.name, "prompt": engine_id, "blocks": blocks}
        return Prefilled(np.asarray(prompt, np.uint32), {SIGNATURE: signature_of(prompt)} | where)

    def prolong(self, engine_id: str) -> None:
        """The lease begins anew."""
        if engine_id in self.held:
            if engine_id in self._leases:
                self._leases[engine_id].cancel()
            self._leases[engine_id] = self.process.soon(self._expire, engine_id, after_s=self._lease_s)

    def _expire(self, engine_id: str) -> None:
        self.expired += 1
        self.free(engine_id)

    def free(self, engine_id: str) -> None:
        """Nobody reads the prompt any more; calling it again does nothing."""
        blocks = self.held.pop(engine_id, None)
        if blocks is not None:
            self._leases.pop(engine_id).cancel()
            self._names.freed([engine_id])
            self.blocks.give_back(blocks)

    def _free_abandoned(self) -> None:
        for engine_id in self._names.due():
            self.free(engine_id)


class DecodeEngine(BlockEngine):
    """Reads the prompt's blocks out of a prefill engine's memory, or computes them, then generates.

    Args:
        peers: all engines, by name.
    """

    def __init__(
        self,
        process: Process,
        blocks: int,
        time_s: Callable[[float], float],
        *,
        peers: dict[str, BlockEngine],
        lease_s: float,
    ) -> None:
        super().__init__(process, blocks, time_s)
        self._peers = peers
        self._heartbeat_s = lease_s / 3
        self.prefixes: dict[tuple[int, ...], tuple[int, ...]] = {}  # prompt up to and with a block -> block
        self._asked: dict[str, asyncio.Future[tuple[int, str]]] = {}  # signatures, by request

    async def signature(self, request_id: str) -> tuple[int, str]:
        """See protocol.Engine."""
        asked: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = asked
        try:
            return await asked
        finally:
            del self._asked[request_id]

    async def generate(self, request: EngineRequest, send: Send) -> None:
        """See protocol.Engine."""
        fields = json.loads(request.body)
        generated = _tokens(request.generated)
        prompt = (_tokens(request.token_ids) or prompt_of(fields)) + generated
        self.fail_if_sick(request)
        beats = asyncio.create_task(self._prolong(request.kv)) if request.kv else None
        blocks: list[int] = []
        try:
            blocks = await self.blocks.take(len(prompt) - len(generated) + fields["max_tokens"])
            self.running += 1
            read = await self._pulled(request.kv) if request.kv else await self._computed(prompt, request.id)
            await self._generate(self._with_cached(prompt, read), generated, request, fields, send)
        finally:
            if beats is not None:
                beats.cancel()
            if blocks:
                self.running -= 1
                self.blocks.give_back(blocks)

    async def _computed(self, prompt: list[int], request_id: str) -> list[tuple[int, ...]]:
        await asyncio.sleep(self.time_s(0.01))
        asked = self._asked.get(request_id)
        if asked is not None and not asked.done():
            asked.set_result((len(prompt), signature_of(prompt)))
        return _cut(prompt)

    async def _prolong(self, where: dict[str, Any]) -> None:
        """A prompt that waits for its turn here keeps its blocks there."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            owner = self._peers.get(where["engine"])
            if isinstance(owner, PrefillEngine):
                owner.process.soon(owner.prolong, where["prompt"], after_s=self.time_s(0.002))

    async def _pulled(self, where: dict[str, Any]) -> list[tuple[int, ...]]:
        # A transfer that has begun ends; of a request that was cancelled meanwhile nothing is kept.
        return await asyncio.shield(asyncio.create_task(self._pull(where)))

    async def _pull(self, where: dict[str, Any]) -> list[tuple[int, ...]]:
        await asyncio.sleep(self.time_s(0.003))
        owner = self._peers.get(where["engine"])
        while isinstance(owner, PrefillEngine) and owner.process.alive and owner.process.stopped:
            await asyncio.sleep(0.05)
        if not isinstance(owner, PrefillEngine) or not owner.process.alive:
            raise RuntimeError("the KV blocks could not be read: the prefill engine does not answer")
        owner.process.soon(owner.free, where["prompt"], after_s=self.time_s(0.002))
        return [owner.blocks.content[block] for block in where["blocks"]]

    def _with_cached(self, prompt: list[int], read: list[tuple[int, ...]]) -> list[int]:
        """The tokens that the engine then sees; full blocks are kept, and those that were kept count."""
        context: list[int] = []
        for number, block in enumerate(read):
            prefix = tuple(prompt[: (number + 1) * BLOCK_TOKENS])
            if len(prefix) == (number + 1) * BLOCK_TOKENS < len(prompt):  # full, and not the prompt's end
                block = self.prefixes.setdefault(prefix, block)
            context += block
        return context

    async def _generate(
        self,
        context: list[int],
        generated: list[int],
        request: EngineRequest,
        fields: dict[str, Any],
        send: Send,
    ) -> None:
        """Go on after the context, which ends with what was generated before."""
        step_s = float(request.headers.get(TOKEN_HEADER, 0.02))
        prompt, most = context[: len(context) - len(generated)], fields["max_tokens"]
        writer, whole = Writer(request, fields), not fields.get("stream")
        for token in islice(continuation(context), most - len(generated)):
            await asyncio.sleep(self.time_s(step_s))
            generated.append(token)
            self._steps.append((self.running, self.blocks.in_use, 1 + token % EXPERTS, step_s))
            first, last = len(generated) == 1, len(generated) == most
            if whole:
                part = writer.whole(prompt, generated) if last else b""
            else:
                part = writer.event(token, first=first, last=last)
            several = fields.get("n", 1) > 1  # then nobody can go on
            if part or not several:
                send(part, 1, b"" if several else np.asarray([token], np.uint32).tobytes())
        if not whole:
            send(writer.end(prompt, generated), 0)


def _tokens(ids: bytes) -> list[int]:
    found: list[int] = np.frombuffer(ids, np.uint32).tolist()
    return found


class Writer:
    """Writes answers as vLLM's server does."""

    def __init__(self, request: EngineRequest, fields: dict[str, Any]) -> None:
        self._chat = request.method == "chat"
        self._fields = fields
        kind = "chat.completion" if self._chat else "text_completion"
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{request.id}"
        self._head: dict[str, Any] = {
            "id": name,
            "object": kind,
            "created": request.created or 1,
            "model": MODEL,
        }

    def event(self, token: int, *, first: bool, last: bool) -> bytes:
        """One token of a stream; a chat begins with its role."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        if self._chat:
            choice["delta"] = {"content": text_of(token)}
        else:
            choice["text"] = text_of(token)
        if self._fields.get("return_token_ids"):
            choice["token_ids"] = [token]
        events = [{"choices": [choice]}]
        if first and self._chat:
            events.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        return b"".join(map(self._line, events))

    def end(self, prompt: list[int], generated: list[int]) -> bytes:
        """What comes after the last token."""
        options = self._fields.get("stream_options") or {}
        usage = {"choices": [], "usage": _usage(prompt, generated)}
        return (self._line(usage) if options.get("include_usage") else b"") + b"data: [DONE]\n\n"

    def whole(self, prompt: list[int], generated: list[int]) -> bytes:
        """A response."""
        text = "".join(map(text_of, generated))
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        if self._fields.get("return_token_ids"):
            said["token_ids"] = generated
        answers = [
            {"index": index, "finish_reason": "length"} | said for index in range(self._fields.get("n") or 1)
        ]
        return json.dumps(self._head | {"choices": answers, "usage": _usage(prompt, generated)}).encode()

    def _line(self, event: dict[str, Any]) -> bytes:
        return f"data: {json.dumps(self._head | event, separators=(',', ':'))}\n\n".encode()


def _usage(prompt: list[int], generated: list[int]) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt), "completion_tokens": len(generated),
        "total_tokens": len(prompt) + len(generated),
    }  # fmt: skip
