"""HTTP clients of a simulated run: what each does (`ClientScript`) and what it saw (`RequestOutcome`).

A client and the ingress that it calls are simulated processes. HTTP has no bytes here: `Connection` carries
ASGI messages between the client and the ingress's real ASGI application. They arrive in order and late, a
slow reader holds the sender up, and a dead ingress closes the connection, as with TCP.

A `RequestOutcome` has a kind, such as "ok" or "http 503", and the text that the client received. `checks`
decides which kinds are allowed. The greedy model makes the right text known in advance, as
`ClientScript.reference`.
"""

import asyncio
import json
from collections import deque
from dataclasses import dataclass
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
class ClientScript:
    """A request and the behaviour of its client.

    Attributes:
        at_s: time at which the client sends it.
        method: "chat" or "completions".
        max_tokens: number of tokens of the answer, which never ends earlier.
        n: number of answers, all equal.
        leaves_s: time until the client closes the connection; None: never.
        reads_s: pause of the client between two reads.
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
        """Return the JSON body of the request."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": self.max_tokens, "stream": self.stream}
        body["temperature"] = 0.0
        if self.n > 1:
            body["n"] = self.n
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        return json.dumps(body).encode()

    @property
    def is_chat(self) -> bool:
        return self.method == "chat"

    @property
    def reference(self) -> str:
        """Return the answer of an undisturbed engine."""
        return "".join(map(text_of, islice(continuation(tokens_of(self.prompt)), self.max_tokens)))


@dataclass
class RequestOutcome:
    """The result of a request, as the client saw it.

    Attributes:
        kind: "ok", "left" (the client closed the connection), "http STATUS", "engine lost" (an error in the
            stream), "connection lost", "never ended", or "malformed".
        text: text of the answer, as far as it was received.
        detail: message of the error.
        starts: number of status lines. More than one is an error of the service.
        ends: number of ends of the body.
        seconds: time from the request to its end.
        first_s: time of the status line.
    """

    script: ClientScript
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
    """One HTTP request of the current process, the client, to an ingress process.

    Some methods run in the ingress's process and others in the client's; each schedules the other side's with
    a latency.

    Args:
        scope: ASGI's description of the request.
        body: body of the request.
    """

    world: World
    ingress: Process
    scope: dict[str, Any]
    body: bytes
    _last_arrival_s: float = 0.0
    _unread_bytes: int = 0  # bytes that the ingress has sent and the client has not read
    _body_sent: bool = False
    _is_closed: bool = False  # the client has closed it
    _is_over: bool = False  # the ingress has closed it

    def __post_init__(self) -> None:
        self._client = current()
        self._messages: deque[dict[str, Any]] = deque()  # messages that have arrived at the client
        self._has_message = asyncio.Event()
        self._disconnected, self._has_room = asyncio.Event(), asyncio.Event()
        if self.ingress.alive:
            self.ingress.soon(self._begin, after_s=self.world.network.latency_s())
        self._client.soon(self._watch_ingress, after_s=0.5)

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
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        while self._unread_bytes > _WINDOW_BYTES and not self._disconnected.is_set():
            self._has_room.clear()
            await self._has_room.wait()
        self._unread_bytes += len(message.get("body", b""))
        self._deliver(dict(message))

    def _deliver(self, message: dict[str, Any]) -> None:
        loop = self.world.loop
        self._last_arrival_s = max(self._last_arrival_s, loop.time() + self.world.network.latency_s())
        loop.call_at(self._last_arrival_s, self._arrive, message, context=self._client.context.copy())

    def _acknowledge(self, size: int) -> None:
        self._unread_bytes -= size
        self._has_room.set()

    def _disconnect(self) -> None:
        self._disconnected.set()
        self._has_room.set()

    # -- in the client's process -------------------------------------------------------------------

    def _arrive(self, message: dict[str, Any]) -> None:
        if not self._is_closed:
            self._is_over = self._is_over or message["type"] == "closed"
            self._messages.append(message)
            self._has_message.set()

    def _watch_ingress(self) -> None:
        """Close the connection if the ingress is dead, as the kernel does."""
        if self._is_closed or self._is_over:
            return
        if self.ingress.alive:
            self._client.soon(self._watch_ingress, after_s=0.5)
        else:
            self._arrive({"type": "closed"})

    async def message(self) -> dict[str, Any]:
        """Return the next message from the ingress."""
        while not self._messages:
            self._has_message.clear()
            await self._has_message.wait()
        message = self._messages.popleft()
        if self.ingress.alive:
            self.ingress.soon(
                self._acknowledge, len(message.get("body", b"")), after_s=self.world.network.latency_s()
            )
        return message

    def close(self) -> None:
        """Close the connection. The ingress is informed later."""
        if not self._is_closed:
            self._is_closed = True
            if self.ingress.alive:
                self.ingress.soon(self._disconnect, after_s=self.world.network.latency_s())


def _application(process: Process) -> Any:
    """Return the ASGI application of an ingress process."""
    return process.__dict__.setdefault("http", application())


def asgi_scope(method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """Return ASGI's description of an HTTP request."""
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


async def ask(world: World, script: ClientScript, ingress: Process) -> RequestOutcome:
    """Send the request, read its answer as the script says, and return what the client saw."""
    path = "/v1/chat/completions" if script.is_chat else "/v1/completions"
    headers = {"content-type": "application/json", "authorization": f"Bearer {script.tenant}"}
    headers[TOKEN_HEADER] = str(script.token_s)
    connection = Connection(world, ingress, asgi_scope("POST", path, headers), script.body)
    outcome = RequestOutcome(script, ingress)
    began = world.loop.time()
    body, status = bytearray(), 0

    async def read_answer() -> None:
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
            if script.reads_s:
                await asyncio.sleep(script.reads_s)

    reading = asyncio.create_task(read_answer())
    try:
        await asyncio.wait([reading], timeout=_TIMEOUT_S if script.leaves_s is None else script.leaves_s)
        if not reading.done():
            outcome.kind = "never ended" if script.leaves_s is None else "left"
        elif reading.exception() is not None:
            outcome.kind, outcome.detail = "malformed", repr(reading.exception())
    finally:
        reading.cancel()
        connection.close()
    outcome.seconds = world.loop.time() - began
    _classify(outcome, status, bytes(body))
    return outcome


_TIMEOUT_S = 90.0


def _classify(outcome: RequestOutcome, status: int, body: bytes) -> None:
    """Set kind, text and detail of the outcome from the status and the body that was received."""
    script = outcome.script
    try:
        if status == 200 and script.stream:
            _read_stream(outcome, body.decode())
        elif status == 200 and outcome.ends:
            choices = json.loads(body)["choices"]
            texts = [c["message"]["content"] if script.is_chat else c["text"] for c in choices]
            outcome.text = texts[0]
            if len(texts) != script.n or len(set(texts)) != 1:
                outcome.kind, outcome.detail = "malformed", repr(texts)
        elif status and outcome.ends and not outcome.kind:
            outcome.kind = f"http {status}"
            outcome.detail = f"{json.loads(body)['error']['message']} {outcome.detail}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        outcome.kind, outcome.detail = "malformed", f"{error!r}: {body!r}"
    if not outcome.kind:
        outcome.kind = "ok" if outcome.ends else "connection lost"


def _read_stream(outcome: RequestOutcome, body: str) -> None:
    """Set the outcome from the events of a stream, which may be incomplete."""
    is_done = False
    for event in body.split("\n\n")[:-1]:
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
            continue
        fields = json.loads(data)
        if "error" in fields:
            outcome.kind = outcome.kind or "engine lost"
            outcome.detail = fields["error"]["message"]
            continue
        for choice in fields["choices"][:1]:
            outcome.text += choice["delta"].get("content", "") if outcome.script.is_chat else choice["text"]
    if outcome.ends and not is_done and not outcome.kind:
        outcome.kind, outcome.detail = "malformed", "a stream without [DONE]"
