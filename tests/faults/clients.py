"""HTTP clients on virtual time that call an ingress's real ASGI application."""

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from eldr_serve.ingress.http_application import application
from tests.faults.fake_engines import TOKEN_HEADER
from tests.faults.fake_ray import TENANTS
from tests.faults.greedy_model import MODEL, continuation, text_of, tokens_of
from tests.faults.virtual_time import Process, current
from tests.faults.world import World

_WINDOW_BYTES = 600  # bytes that a server may write before its client reads


@dataclass(frozen=True)
class Plan:
    """A request and the behaviour of its client.

    Args:
        leaves_s: time until the client closes the connection; None: never.
        reads_s: pause between two reads.
        token_s: time of one decode step.
        tenant: tenant whose key is sent, where keys are required.
    """

    at_s: float
    method: str
    prompt: str
    max_tokens: int
    stream: bool
    n: int = 1
    leaves_s: float | None = None
    reads_s: float = 0.0
    token_s: float = 0.02
    tenant: str = TENANTS[0]

    @property
    def body(self) -> bytes:
        body = {"model": MODEL, "max_tokens": self.max_tokens, "stream": self.stream, "temperature": 0.0}
        if self.n > 1:
            body["n"] = self.n
        prompt = (
            {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        )
        return json.dumps(body | prompt).encode()

    @property
    def chat(self) -> bool:
        return self.method == "chat"

    @property
    def reference(self) -> str:
        """Return the answer of an undisturbed engine."""
        return "".join(map(text_of, islice(continuation(tokens_of(self.prompt)), self.max_tokens)))


@dataclass
class Outcome:
    """The result of a request, as the client saw it.

    Attributes:
        kind: "ok", "left", "http STATUS", "engine lost" (an error in the stream), "connection lost",
            "never ended", or "malformed".
        first_s: time of the first byte.
    """

    plan: Plan
    ingress: Process
    kind: str = ""
    text: str = ""
    detail: str = ""
    starts: int = 0
    ends: int = 0
    seconds: float = 0.0
    first_s: float = 0.0


@dataclass(eq=False)
class Connection:
    """One HTTP request between a client and an ingress process."""

    world: World
    ingress: Process
    scope: dict[str, Any]
    body: bytes
    arrived: deque[dict[str, Any]] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False  # by the client
    _last_arrival_s: float = 0.0
    _unread: int = 0
    _body_sent: bool = False
    _over: bool = False

    def __post_init__(self) -> None:
        self._client = current()
        self._gone, self._room = asyncio.Event(), asyncio.Event()
        if self.ingress.alive:
            self.ingress.soon(self._begin, after_s=self.world.network.latency_s())
        self._client.soon(self._watch, after_s=0.5)

    # -- in the ingress's process ------------------------------------------------------------------

    def _begin(self) -> None:
        self.world.loop.create_task(self._serve(), name="http")

    async def _serve(self) -> None:
        try:
            await _application(self.ingress)(self.scope, self._receive, self._send)
        except Exception as error:
            self._deliver({"type": "failed", "error": repr(error)})
        self._deliver({"type": "closed"})

    async def _receive(self) -> dict[str, Any]:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        while self._unread > _WINDOW_BYTES and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()
        self._unread += len(message.get("body", b""))
        self._deliver(dict(message))

    def _deliver(self, message: dict[str, Any]) -> None:
        loop = self.world.loop
        self._last_arrival_s = max(self._last_arrival_s, loop.time() + self.world.network.latency_s())
        loop.call_at(self._last_arrival_s, self._arrive, message, context=self._client.context.copy())

    def _read(self, size: int) -> None:
        self._unread -= size
        self._room.set()

    def _leave(self) -> None:
        self._gone.set()
        self._room.set()

    # -- in the client's ---------------------------------------------------------------------------

    def _arrive(self, message: dict[str, Any]) -> None:
        if not self.closed:
            self._over = self._over or message["type"] == "closed"
            self.arrived.append(message)
            self.news.set()

    def _watch(self) -> None:
        """Close the connection if the ingress is dead, as the kernel does."""
        if self.closed or self._over:
            return
        if self.ingress.alive:
            self._client.soon(self._watch, after_s=0.5)
        else:
            self._arrive({"type": "closed"})

    async def message(self) -> dict[str, Any]:
        """Return the next message from the ingress."""
        while not self.arrived:
            self.news.clear()
            await self.news.wait()
        message = self.arrived.popleft()
        if self.ingress.alive:
            self.ingress.soon(
                self._read, len(message.get("body", b"")), after_s=self.world.network.latency_s()
            )
        return message

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self.ingress.alive:
                self.ingress.soon(self._leave, after_s=self.world.network.latency_s())


def _application(process: Process) -> Any:
    return process.__dict__.setdefault("http", application())


def scope(method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "client": ("client", 1),
        "server": ("ingress", 80),
        "state": {},
    }


async def ask(world: World, plan: Plan, ingress: Process) -> Outcome:
    """Send the request and read the whole answer."""
    path = "/v1/chat/completions" if plan.chat else "/v1/completions"
    headers = {"content-type": "application/json", "authorization": f"Bearer {plan.tenant}"}
    headers[TOKEN_HEADER] = str(plan.token_s)
    connection = Connection(world, ingress, scope("POST", path, headers), plan.body)
    outcome = Outcome(plan, ingress)
    began = world.loop.time()
    body, status = bytearray(), 0

    async def read() -> None:
        nonlocal status
        while (message := await connection.message())["type"] != "closed":
            if message["type"] == "http.response.start":
                outcome.starts += 1
                outcome.first_s = world.loop.time()
                status = message["status"]
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                outcome.ends += not message.get("more_body", False)
            else:
                outcome.detail = message["error"]
            if plan.reads_s:
                await asyncio.sleep(plan.reads_s)

    reading = asyncio.create_task(read())
    try:
        await asyncio.wait([reading], timeout=_TIMEOUT_S if plan.leaves_s is None else plan.leaves_s)
        if not reading.done():
            outcome.kind = "never ended" if plan.leaves_s is None else "left"
        elif reading.exception() is not None:
            outcome.kind, outcome.detail = "malformed", repr(reading.exception())
    finally:
        reading.cancel()
        connection.close()
    outcome.seconds = world.loop.time() - began
    _classify(outcome, status, bytes(body))
    return outcome


_TIMEOUT_S = 90.0


def _classify(outcome: Outcome, status: int, body: bytes) -> None:
    plan = outcome.plan
    try:
        if status == 200 and plan.stream:
            _read_stream(outcome, body.decode())
        elif status == 200 and outcome.ends:
            choices = json.loads(body)["choices"]
            said = [c["message"]["content"] if plan.chat else c["text"] for c in choices]
            outcome.text = said[0]
            if len(said) != plan.n or len(set(said)) != 1:
                outcome.kind, outcome.detail = "malformed", repr(said)
        elif status and outcome.ends and not outcome.kind:
            outcome.kind = f"http {status}"
            outcome.detail = f"{json.loads(body)['error']['message']} {outcome.detail}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        outcome.kind, outcome.detail = "malformed", f"{error!r}: {body!r}"
    if not outcome.kind:
        outcome.kind = "ok" if outcome.ends else "connection lost"


def _read_stream(outcome: Outcome, body: str) -> None:
    done = False
    for event in body.split("\n\n")[:-1]:
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            done = True
            continue
        fields = json.loads(data)
        if "error" in fields:
            outcome.kind = outcome.kind or "engine lost"
            outcome.detail = fields["error"]["message"]
            continue
        for choice in fields["choices"][:1]:
            outcome.text += choice["delta"].get("content", "") if outcome.plan.chat else choice["text"]
    if outcome.ends and not done and not outcome.kind:
        outcome.kind, outcome.detail = "malformed", "a stream without [DONE]"
