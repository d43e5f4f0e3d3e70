"""Clients of the whole application that check each answer.

They compare it with the answer to the same request before the first fault: text, tokens of
log-probabilities, finish reason, usage and id.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadgen import workload

PATIENCE_S = 90.0
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_LENGTHS = (8, 24, 64, 128)  # tokens of an answer
_KINDS = ("plain", "chat", "plain", "logprobs", "plain", "chat", "stop", "plain")  # kinds of prompts, in turn


@dataclass
class Answer:
    """The content of an answer.

    Attributes:
        tokens: tokens of its log-probabilities.
        usage: tokens of the prompt and of the answer.
        error: message of an error in a stream.
    """

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int] | None = None
    ids: set[str] = field(default_factory=set)
    done: bool = False
    error: str = ""

    def take(self, fields: dict[str, Any]) -> None:
        """Add a chunk, or a whole answer."""
        if "error" in fields:
            self.error = fields["error"]["message"]
            return
        self.ids.add(fields.get("id", ""))
        if usage := fields.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in fields.get("choices", []):
            said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
            self.text += said or ""
            self.tokens += (choice.get("logprobs") or {}).get("tokens") or []
            self.finish = choice.get("finish_reason") or self.finish


@dataclass(frozen=True)
class Prompt:
    """A request's path, its body without `stream`, and its greedy answer."""

    path: str
    body: dict[str, Any]
    answer: Answer


@dataclass
class Sent:
    """A request that has ended.

    Attributes:
        kind: "ok", "left", "wrong text", "engine lost", "http STATUS", "not connected", "connection lost",
            "cut" (an answer without its end), or "never ended".
        port: the client's port of the connection.
        silence_s: the longest time without a byte since it was sent.
        gap_s: the longest time between two chunks of a stream.
    """

    start_s: float
    stream: bool
    by_proxy: bool
    kind: str = ""
    detail: str = ""
    port: int = 0
    connected_s: float = 0.0
    ended_s: float = 0.0
    silence_s: float = 0.0
    gap_s: float = 0.0


class Load:
    """Clients that each send one request after the other.

    Args:
        urls: of the ingress itself and of Serve's proxy.
        ended: callback for each request that has ended.
    """

    def __init__(
        self, urls: tuple[str, str], prompts: list[Prompt], ended: Callable[[Sent], None], rng: random.Random
    ) -> None:
        self._urls, self._prompts, self._ended, self._rng = urls, prompts, ended, rng

    async def client(self, until_s: float) -> None:
        """Run one client until `until_s`."""
        while time.monotonic() < until_s:
            sent = await self._one()
            self._ended(sent)
            if sent.kind in ("not connected", "http 503", "http 429"):
                await asyncio.sleep(self._rng.uniform(0.2, 0.6))  # as a client would

    async def _one(self) -> Sent:
        prompt, by_proxy = self._rng.choice(self._prompts), self._rng.random() < 0.25
        sent = Sent(time.monotonic(), stream=self._rng.random() < 0.6, by_proxy=by_proxy)
        leaves_s = self._rng.uniform(0.05, 1.0) if self._rng.random() < 0.15 else None
        body = prompt.body | {"stream": sent.stream}
        if sent.stream:
            body["stream_options"] = {"include_usage": True}
        received = bytearray()

        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                sent.connected_s = time.monotonic()
                sent.port = info["return_value"].get_extra_info("client_addr")[1]

        try:
            async with asyncio.timeout(PATIENCE_S if leaves_s is None else leaves_s):
                # Use one connection per request: the kernel spreads connections over ingress replicas.
                async with (
                    httpx.AsyncClient(timeout=None) as http,
                    http.stream(
                        "POST", f"{self._urls[by_proxy]}{prompt.path}", json=body, extensions={"trace": trace}
                    ) as answer,
                ):
                    heard_s = sent.start_s
                    async for chunk in answer.aiter_bytes():
                        now = time.monotonic()
                        sent.silence_s = max(sent.silence_s, now - heard_s)
                        if received:
                            sent.gap_s = max(sent.gap_s, now - heard_s)
                        heard_s = now
                        received += chunk
            check_answer(sent, answer.status_code, bytes(received), prompt.answer)
        except TimeoutError:
            sent.kind = "never ended" if leaves_s is None else "left"
            if sent.stream and leaves_s is not None:
                check_answer(sent, 200, bytes(received), prompt.answer, whole=False)
        except httpx.ConnectError as error:
            sent.kind, sent.detail = "not connected", repr(error)
        except httpx.TransportError as error:
            sent.kind, sent.detail = "connection lost", f"{error!r} after {len(received)} bytes"
            if sent.stream:
                check_answer(sent, 200, bytes(received), prompt.answer, whole=False)
        sent.ended_s = time.monotonic()
        return sent


def check_answer(sent: Sent, status: int, body: bytes, answer: Answer, *, whole: bool = True) -> None:
    """Set the kind if the answer decides it.

    Args:
        answer: the answer of an undisturbed run.
        whole: whether the answer has ended; else it is only checked for wrong text.
    """
    if status != 200:
        sent.kind, sent.detail = f"http {status}", body[:200].decode(errors="replace")
        return
    said = read_events(body) if sent.stream else _whole_answer(body)
    if (wrong := _difference(said, answer, ended=whole and said.done and not said.error)) is not None:
        sent.kind, sent.detail = "wrong text", wrong
    elif said.error:
        sent.kind, sent.detail = "engine lost", said.error
    elif whole:
        sent.kind = "ok" if said.done else "cut"


def _difference(said: Answer, answer: Answer, *, ended: bool) -> str | None:
    """Return what is wrong with an answer or its beginning, or None."""
    if not answer.text.startswith(said.text) or (ended and said.text != answer.text):
        return f"{said.text!r} in place of {answer.text!r}"
    if said.tokens != answer.tokens[: len(said.tokens)] or (ended and said.tokens != answer.tokens):
        return f"log-probabilities of {said.tokens!r} in place of {answer.tokens!r}"
    if len(said.ids) > 1:
        return f"several ids: {sorted(said.ids)}"
    if ended and (said.finish, said.usage) != (answer.finish, answer.usage):
        return f"{said.finish}, {said.usage} in place of {answer.finish}, {answer.usage}"
    return None


def read_events(body: bytes) -> Answer:
    """Parse a stream, or the beginning of one."""
    said = Answer()
    for event in body.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            said.done = True
        else:
            said.take(json.loads(data))
    return said


def _whole_answer(body: bytes) -> Answer:
    said = Answer(done=True)
    try:
        said.take(json.loads(body))
    except ValueError:
        return Answer(text=body.decode(errors="replace"), done=True)
    return said


def bodies(prompts: list[workload.Prompt], model: str, number: int, seed: int) -> list[tuple[str, Any]]:
    """Return (path, body) of `number` requests: text, chat, log-probabilities and stop strings."""
    rng, found = random.Random(seed), []
    for turn, prompt in enumerate(workload.balanced_sample(prompts, number, seed)):
        kind, text = _KINDS[turn % len(_KINDS)], prompt.text[:600]
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": rng.choice(_LENGTHS),
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
        if kind == "logprobs":
            body["logprobs"] = 2
        if kind == "stop":
            body |= {"stop": None, "max_tokens": max(_LENGTHS)}  # replaced once the answer is known
        found.append((_CHAT if kind == "chat" else _TEXT, body))
    return found


async def references(url: str, asked: list[tuple[str, Any]]) -> list[Prompt]:
    """Return the requests with their greedy answers, measured while nothing fails."""
    found = []
    async with httpx.AsyncClient(timeout=120) as http:

        async def ask(path: str, body: dict[str, Any]) -> Answer:
            answer = await http.post(f"{url}{path}", json=body)
            return _whole_answer(answer.raise_for_status().content)

        for path, body in asked:
            if "stop" in body:
                body = body | {"stop": _middle((await ask(path, body)).text)}
            found.append(Prompt(path, body, await ask(path, body)))
    return found


def _middle(text: str) -> str:
    """Return some characters from the middle of a text; they usually span two tokens."""
    half = len(text) // 2
    return text[half : half + 8] or "\n"
