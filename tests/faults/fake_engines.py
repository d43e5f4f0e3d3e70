"""Prefill and decode engines without a model, which reveal every use of a wrong KV block.

The "model" is greedy: the next token is a checksum of all tokens in the engine's KV cache (`greedy_model`).
So one wrong block changes every later token of the answer.

A block of a prefill engine belongs to its prompt until the decode engine has read the block, the prompt is
released, or its lease ends. Then the block is overwritten with another prompt at once. A decode engine reads
whatever the block holds at that time and keeps it in its prefix cache, where the error stays for later
requests.
"""

import asyncio
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from eldr_serve.engine.abandoned import AbandonedPrompts
from eldr_serve.engine.calls import EXPERT_COUNTS_KEY, GenerationReport
from eldr_serve.engine.fake import InProcessEngine
from eldr_serve.engine.protocol import EngineRequest, PrefilledPrompt, Send
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.prefixes import PrefixCacheSize
from tests.faults.greedy_model import (
    BLOCK_TOKENS,
    EXPERTS,
    LAYERS,
    MODEL,
    Blocks,
    continuation,
    cut_into_blocks,
    expert_counts_of,
    prompt_of,
    text_of,
)
from tests.faults.virtual_time import Process

TOKEN_HEADER = "x-token-s"  # header of a client's request: time of one decode step, s


class BlockEngine(InProcessEngine):
    """The common part of both engines, which implements `eldr_serve.engine.protocol.Engine`.

    Args:
        process: the process in which it runs.
        blocks: number of KV blocks.
        time_s: draws the seconds of a piece of work from their mean.

    Attributes:
        running: number of requests in work.
        sick: whether every call of a client fails.
        failed: number of calls that failed because the engine was sick.
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
        """Raise RuntimeError if the engine is sick. Warm-up calls fail too, but are not counted."""
        if self.sick:
            self.failed += not request.id.startswith("warm-")
            raise RuntimeError("the engine is sick")

    async def serve_endpoint(self, request: EngineRequest, send: Send) -> None:
        """Send the prompt's tokens, whatever the request."""
        send(json.dumps({"tokens": prompt_of(json.loads(request.body))}).encode(), 0)

    async def measure_shape(self) -> tuple[int, int]:
        return LAYERS, EXPERTS

    def kv_usage(self, rank: int | None = None) -> float:
        return self.blocks.usage

    def prefix_cache(self) -> PrefixCacheSize:
        return PrefixCacheSize(BLOCK_TOKENS, BLOCK_TOKENS * len(self.blocks.content))

    def take_steps(self, rank: int = 0) -> StepSums:
        steps, self._steps = self._steps, []
        return StepSums.from_steps(*zip(*steps, strict=True)) if steps else StepSums()

    def take_samples(self) -> list[ExpertSample]:
        """Return no samples: no request is sampled."""
        return []

    def status_of(self, error: Exception) -> int:
        return 500

    def parameter_of(self, error: Exception) -> str | None:
        return None

    async def stop(self) -> None:
        """Do nothing, as there is no process to stop."""


class PrefillEngine(BlockEngine):
    """An engine that holds the blocks of a prompt until they are read, abandoned, or their lease ends.

    Attributes:
        held_blocks: blocks of finished prompts, by the engine's id of the prompt.
        expired: number of leases that ended although nobody had read or released the blocks.
    """

    def __init__(
        self, process: Process, blocks: int, time_s: Callable[[float], float], *, lease_s: float
    ) -> None:
        super().__init__(process, blocks, time_s)
        self.held_blocks: dict[str, list[int]] = {}
        self.expired = 0
        self._lease_s = lease_s
        self._names = AbandonedPrompts(process.loop.time)
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._prompts = 0

    async def release(self, request_id: str) -> None:
        self._names.abandon([request_id])
        self._free_abandoned()

    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
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
        for block, tokens in zip(blocks, cut_into_blocks(context), strict=True):
            self.blocks.content[block] = tokens
        self.held_blocks[engine_id] = blocks
        self.prolong(engine_id)
        self._names.hold({engine_id: request.id})
        self._free_abandoned()
        await asyncio.sleep(self.time_s(0.001))  # time from the engine's core to its front end
        where = {"engine": self.name, "prompt": engine_id, "blocks": blocks}
        return PrefilledPrompt(
            np.asarray(prompt, np.uint32), {EXPERT_COUNTS_KEY: expert_counts_of(prompt)} | where
        )

    def prolong(self, engine_id: str) -> None:
        """Let the lease of a prompt's blocks begin again."""
        if engine_id in self.held_blocks:
            if engine_id in self._leases:
                self._leases[engine_id].cancel()
            self._leases[engine_id] = self.process.soon(self._expire, engine_id, after_s=self._lease_s)

    def _expire(self, engine_id: str) -> None:
        self.expired += 1
        self.free(engine_id)

    def free(self, engine_id: str) -> None:
        """Free the blocks of a prompt. Do nothing if they are free already."""
        blocks = self.held_blocks.pop(engine_id, None)
        if blocks is not None:
            self._leases.pop(engine_id).cancel()
            self._names.forget([engine_id])
            self.blocks.give_back(blocks)

    def _free_abandoned(self) -> None:
        for engine_id in self._names.ids_to_free():
            self.free(engine_id)


class DecodeEngine(BlockEngine):
    """An engine that generates after it has read a prompt's blocks from a prefill engine or computed them.

    Args:
        peers: all engines, by name.
    """

    def __init__(
        self,
        process: Process,
        blocks: int,
        time_s: Callable[[float], float],
        *,
        lease_s: float,
        peers: dict[str, BlockEngine],
    ) -> None:
        super().__init__(process, blocks, time_s)
        self._peers = peers
        self._heartbeat_s = lease_s / 3
        self.prefixes: dict[tuple[int, ...], tuple[int, ...]] = {}  # prompt up to the end of a block -> block
        self._awaited_counts: dict[str, asyncio.Future[tuple[int, str]]] = {}  # futures by request

    async def wait_for_counts(self, request_id: str) -> tuple[int, str]:
        counts: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._awaited_counts[request_id] = counts
        try:
            return await counts
        finally:
            del self._awaited_counts[request_id]

    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        fields = json.loads(request.body)
        generated = _tokens(request.generated)
        prompt = (_tokens(request.token_ids) or prompt_of(fields)) + generated
        self.fail_if_sick(request)
        source = request.kv_transfer_params  # the place where another engine holds the blocks
        beats = asyncio.create_task(self._prolong(source)) if source else None
        blocks: list[int] = []
        try:
            blocks = await self.blocks.take(len(prompt) - len(generated) + fields["max_tokens"])
            self.running += 1
            if source:
                contents = await self._read_blocks(source)
            else:
                contents = await self._compute_blocks(prompt, request.id)
            await self._generate(self._cache_blocks(prompt, contents), generated, request, fields, send)
        finally:
            if beats is not None:
                beats.cancel()
            if blocks:
                self.running -= 1
                self.blocks.give_back(blocks)
        return GenerationReport()

    async def _compute_blocks(self, prompt: list[int], request_id: str) -> list[tuple[int, ...]]:
        """Compute the prompt in this engine, and return the tokens of its blocks."""
        await asyncio.sleep(self.time_s(0.01))
        counts = self._awaited_counts.get(request_id)
        if counts is not None and not counts.done():
            counts.set_result((len(prompt), expert_counts_of(prompt)))
        return cut_into_blocks(prompt)

    async def _prolong(self, where: dict[str, Any]) -> None:
        """Renew the lease of the prompt's blocks while the request waits here."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            owner = self._peers.get(where["engine"])
            if isinstance(owner, PrefillEngine):
                owner.process.soon(owner.prolong, where["prompt"], after_s=self.time_s(0.002))

    async def _read_blocks(self, source: dict[str, Any]) -> list[tuple[int, ...]]:
        """Read the prompt's blocks from the prefill engine, and return the tokens that they hold."""
        # Let a transfer that has begun finish; its result is dropped if the request was cancelled.
        return await asyncio.shield(asyncio.create_task(self._transfer(source)))

    async def _transfer(self, source: dict[str, Any]) -> list[tuple[int, ...]]:
        await asyncio.sleep(self.time_s(0.003))
        owner = self._peers.get(source["engine"])
        while isinstance(owner, PrefillEngine) and owner.process.alive and owner.process.stopped:
            await asyncio.sleep(0.05)
        if not isinstance(owner, PrefillEngine) or not owner.process.alive:
            raise RuntimeError("the KV blocks could not be read: the prefill engine does not answer")
        owner.process.soon(owner.free, source["prompt"], after_s=self.time_s(0.002))
        return [owner.blocks.content[block] for block in source["blocks"]]

    def _cache_blocks(self, prompt: list[int], contents: list[tuple[int, ...]]) -> list[int]:
        """Add full blocks to the prefix cache, and return the tokens that the engine sees.

        A block that is cached already is used in place of the new one.
        """
        context: list[int] = []
        for number, block in enumerate(contents):
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
        """Continue after the context, which ends with the tokens generated so far."""
        step_s = float(request.headers.get(TOKEN_HEADER, 0.02))
        prompt, most = context[: len(context) - len(generated)], fields["max_tokens"]
        writer, unstreamed = Writer(request, fields), not fields.get("stream")
        for token in islice(continuation(context), most - len(generated)):
            await asyncio.sleep(self.time_s(step_s))
            generated.append(token)
            self._steps.append((self.running, self.blocks.in_use, 1 + token % EXPERTS, step_s))
            first, last = len(generated) == 1, len(generated) == most
            if unstreamed:
                part = writer.unstreamed(prompt, generated) if last else b""
            else:
                part = writer.event(token, first=first, last=last)
            several = fields.get("n", 1) > 1  # several answers cannot be resumed
            if part or not several:
                send(part, 1, b"" if several else np.asarray([token], np.uint32).tobytes())
        if not unstreamed:
            send(writer.end(prompt, generated), 0)


def _tokens(ids: bytes) -> Any:
    """Return token ids from the bytes in which they are sent."""
    return np.frombuffer(ids, np.uint32).tolist()


class Writer:
    """A writer of answers in the format of vLLM's server."""

    def __init__(self, request: EngineRequest, fields: dict[str, Any]) -> None:
        self._chat = request.method == "chat"
        self._fields = fields
        kind = "chat.completion" if self._chat else "text_completion"
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{request.id}"
        self._head = {"id": name, "object": kind, "created": request.created or 1, "model": MODEL}

    def event(self, token: int, *, first: bool, last: bool) -> bytes:
        """Return the event of one token. The first event of a chat has its role."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
        choice |= {"delta": {"content": text_of(token)}} if self._chat else {"text": text_of(token)}
        if self._fields.get("return_token_ids"):
            choice["token_ids"] = [token]
        events = [{"choices": [choice]}]
        if first and self._chat:
            events.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        return b"".join(map(self._line, events))

    def end(self, prompt: list[int], generated: list[int]) -> bytes:
        """Return the events after the last token."""
        options = self._fields.get("stream_options") or {}
        usage = {"choices": [], "usage": _usage(prompt, generated)}
        return (self._line(usage) if options.get("include_usage") else b"") + b"data: [DONE]\n\n"

    def unstreamed(self, prompt: list[int], generated: list[int]) -> bytes:
        """Return an unstreamed answer."""
        text = "".join(map(text_of, generated))
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        if self._fields.get("return_token_ids"):
            content["token_ids"] = generated
        answers = [
            {"index": index, "finish_reason": "length"} | content
            for index in range(self._fields.get("n") or 1)
        ]
        return json.dumps(self._head | {"choices": answers, "usage": _usage(prompt, generated)}).encode()

    def _line(self, event: dict[str, Any]) -> bytes:
        return f"data: {json.dumps(self._head | event, separators=(',', ':'))}\n\n".encode()


def _usage(prompt: list[int], generated: list[int]) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(generated),
        "total_tokens": len(prompt) + len(generated),
    }
