"""Clients of the whole application, each of which sends one request after the other and checks the answers.

Requests are greedy, so a repeated request has the same answer. `references` gets the answers before the first
fault. Each later answer must equal its reference in text, tokens of log-probabilities, finish reason and
usage, and have one id. An answer that ends with an error must equal its beginning.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadgen.workload import WorkloadPrompt, balanced_sample

PATIENCE_S = 90.0
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_LENGTHS = (8, 24, 64, 128)  # tokens of an answer
MAX_TOKENS = max(_LENGTHS)
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
        """Add a chunk, or a complete answer."""
        if "error" in fields:
            self.error = fields["error"]["message"]
            return
        self.ids.add(fields.get("id", ""))
        if usage := fields.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in fields.get("choices", []):
            text = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
            self.text += text or ""
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


class ClientLoad:
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
            sent = await self._send_one()
            self._ended(sent)
            if sent.kind in ("not connected", "http 503", "http 429"):
                await asyncio.sleep(self._rng.uniform(0.2, 0.6))  # a client would wait, too

    async def _send_one(self) -> Sent:
        """Send a random request, whose client may disconnect, and return how it ended."""
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
                    last_byte_s = sent.start_s
                    async for chunk in answer.aiter_bytes():
                        now = time.monotonic()
                        sent.silence_s = max(sent.silence_s, now - last_byte_s)
                        if received:
                            sent.gap_s = max(sent.gap_s, now - last_byte_s)
                        last_byte_s = now
                        received += chunk
            check_answer(sent, answer.status_code, bytes(received), prompt.answer)
        except TimeoutError:
            sent.kind = "never ended" if leaves_s is None else "left"
            if sent.stream and leaves_s is not None:
                check_answer(sent, 200, bytes(received), prompt.answer, is_complete=False)
        except httpx.ConnectError as error:
            sent.kind, sent.detail = "not connected", repr(error)
        except httpx.TransportError as error:
            sent.kind, sent.detail = "connection lost", f"{error!r} after {len(received)} bytes"
            if sent.stream:
                check_answer(sent, 200, bytes(received), prompt.answer, is_complete=False)
        sent.ended_s = time.monotonic()
        return sent


def check_answer(sent: Sent, status: int, body: bytes, answer: Answer, *, is_complete: bool = True) -> None:
    """Set the kind of a request that got this answer, if the answer decides it.

    Args:
        sent: the request, whose kind and detail are set.
        status: HTTP status.
        body: what was received of the body.
        answer: the answer before the first fault.
        is_complete: whether the answer has ended; else it is only checked for wrong text.
    """
    if status != 200:
        sent.kind, sent.detail = f"http {status}", body[:200].decode(errors="replace")
        return
    received = read_events(body) if sent.stream else _unstreamed_answer(body)
    has_ended = is_complete and received.done and not received.error
    if (difference := _difference(received, answer, ended=has_ended)) is not None:
        sent.kind, sent.detail = "wrong text", difference
    elif received.error:
        sent.kind, sent.detail = "engine lost", received.error
    elif is_complete:
        sent.kind = "ok" if received.done else "cut"


def _difference(received: Answer, answer: Answer, *, ended: bool) -> str | None:
    """Return what is wrong with a received answer or its beginning; None if it is right."""
    if not answer.text.startswith(received.text) or (ended and received.text != answer.text):
        return f"{received.text!r} in place of {answer.text!r}"
    expected_tokens = answer.tokens if ended else answer.tokens[: len(received.tokens)]
    if received.tokens != expected_tokens:
        return f"log-probabilities of {received.tokens!r} in place of {answer.tokens!r}"
    if len(received.ids) > 1:
        return f"several ids: {sorted(received.ids)}"
    if ended and (received.finish, received.usage) != (answer.finish, answer.usage):
        return f"{received.finish}, {received.usage} in place of {answer.finish}, {answer.usage}"
    return None


def read_events(body: bytes) -> Answer:
    """Parse a stream, or the beginning of one."""
    answer = Answer()
    for event in body.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            answer.done = True
        else:
            answer.take(json.loads(data))
    return answer


def _unstreamed_answer(body: bytes) -> Answer:
    """Parse an unstreamed answer. Text that is no JSON becomes the answer's text."""
    answer = Answer(done=True)
    try:
        answer.take(json.loads(body))
    except ValueError:
        return Answer(text=body.decode(errors="replace"), done=True)
    return answer


def bodies(
    prompts: list[WorkloadPrompt], model: str, number: int, seed: int, max_tokens: int = MAX_TOKENS
) -> list[tuple[str, Any]]:
    """Return (path, body) of `number` requests: text, chat, log-probabilities and stop strings.

    Args:
        max_tokens: maximum number of tokens of an answer.
    """
    rng, requests = random.Random(seed), []
    for turn, prompt in enumerate(balanced_sample(prompts, number, seed)):
        kind, text = _KINDS[turn % len(_KINDS)], prompt.text[:600]
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": min(rng.choice(_LENGTHS), max_tokens),
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
        if kind == "logprobs":
            body["logprobs"] = 2
        if kind == "stop":
            body |= {"stop": None, "max_tokens": max_tokens}  # they are replaced once the answer is known
        requests.append((_CHAT if kind == "chat" else _TEXT, body))
    return requests


async def references(url: str, requests: list[tuple[str, Any]]) -> list[Prompt]:
    """Send each (path, body) while nothing fails, and return the requests with their answers."""
    prompts = []
    async with httpx.AsyncClient(timeout=120) as http:

        async def ask(path: str, body: dict[str, Any]) -> Answer:
            answer = await http.post(f"{url}{path}", json=body)
            return _unstreamed_answer(answer.raise_for_status().content)

        for path, body in requests:
            if "stop" in body:
                body = body | {"stop": _middle((await ask(path, body)).text)}
            prompts.append(Prompt(path, body, await ask(path, body)))
    return prompts


def _middle(text: str) -> str:
    """Return some characters from the middle of a text. They usually span two tokens."""
    half = len(text) // 2
    return text[half : half + 8] or "\n"
