"""A service that answers like ours over real HTTP without engines, with delays that a test knows."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

KEY = "fake-key"
REPLICAS = ("decode-a", "decode-b")
_POLICIES = ("shortest-queue", "random", "locality-band")


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


class FakeService:
    """A service that records its requests with their times.

    Attributes:
        first_s, gap_s: delays of the first token and of each further one, in seconds.
        fail_every: every such request gets a 503 (3: each third one); 0: none.
        reports_steps: whether the status includes the engines' steps.
        more_status: additional or replaced fields of the status.
        says: returns the answer to a request without streaming, given policy and prompt.
    """

    def __init__(self) -> None:
        self.url = ""
        self.model = "org/fake-moe"
        self.first_s, self.gap_s, self.fail_every = 0.05, 0.01, 0
        self.reports_steps = False
        self.more_status: dict[str, Any] = {}
        self.says: Callable[[str, str], str] = lambda policy, prompt: prompt.upper()
        self.policy: dict[str, Any] = {"name": "locality-band", "parameters": {"band": 0.2}}
        self.policies_set: list[str] = []
        self.shadows: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.arrived_s: list[float] = []
        self.in_flight = 0
        self.steps = 0

    async def status(self, request: web.Request) -> web.Response:
        """Report 2 requests, 20 active experts and 10 ms for each step. The shadow prices 11 and 10 ms."""
        n = self.steps
        totals = {"steps": n, "requests": 2 * n, "active_experts": 20 * n, "seconds": 0.01 * n}
        totals["token_seconds"] = 2 * totals["seconds"]
        status = {
            "policy": self.policy["name"],
            "parameters": self.policy["parameters"],
            "workers": [{"worker": r, "in_flight": self.in_flight // 2} for r in REPLICAS],
            "leases": self.in_flight,
            "counters": {"placed": len(self.bodies)},
        }
        if self.reports_steps:
            now = {"tokens": 2 * n, "live_ms": 11.0, "shadow_ms": 10.0}
            status |= {"decode_totals": totals, "step_cost": {"steps": n}, "comparison": {"now": now}}
        return web.json_response(status | self.more_status)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def change(self, request: web.Request) -> web.Response:
        change = await request.json()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return _refusal(401, "the admin key is missing or wrong")
        if change["name"] not in _POLICIES:
            return _refusal(400, f"unknown policy {change['name']!r}")
        if request.path.endswith("/shadow"):
            self.shadows.append(change["name"])
            return web.json_response({})
        self.policy = change
        self.policies_set.append(change["name"])
        return web.json_response({})

    async def refit(self, request: web.Request) -> web.Response:
        """Return a table for two decode replicas, or refuse a request without the key."""
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return _refusal(400, "the signature pool holds 3 samples and a table needs 16")
        return web.json_response({"table": {"version": 7, "samples": 90, "workers": 2}})

    async def trace(self, request: web.Request) -> web.Response:
        return web.Response(body=b"a trace", content_type="application/octet-stream")

    async def table(self, request: web.Request) -> web.Response:
        return web.Response(body=b"a table", content_type="application/octet-stream")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.arrived_s.append(time.perf_counter())
        self.steps += body["max_tokens"]
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return _refusal(503, "overloaded")
        if not body.get("stream"):
            content = self.says(self.policy["name"], body["messages"][0]["content"])
            return web.json_response({"choices": [{"message": {"content": content}}]})
        self.in_flight += 1
        try:
            return await self._stream(request, body["max_tokens"])
        finally:  # this runs even if the client disconnects
            self.in_flight -= 1

    async def _stream(self, request: web.Request, tokens: int) -> web.StreamResponse:
        await asyncio.sleep(self.first_s)
        values = {"decode-worker": REPLICAS[0], "policy": self.policy["name"], "handover-ms": "12.5"}
        headers = {"content-type": "text/event-stream"} | {f"x-eldr-{k}": v for k, v in values.items()}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": "x"}}]}] * tokens
        events += [{"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": 3}}]
        for number, event in enumerate(events):
            if 1 < number <= tokens:
                await asyncio.sleep(self.gap_s)
            await stream.write(f"data: {json.dumps(event)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        return stream


@contextmanager
def fake_service() -> Iterator[FakeService]:
    """Run the service during the block."""
    service, app, loop = FakeService(), web.Application(), asyncio.new_event_loop()
    app.router.add_get("/eldr/status", service.status)
    app.router.add_get("/v1/models", service.models)
    app.router.add_put("/eldr/refit", service.refit)
    app.router.add_get("/eldr/trace", service.trace)
    app.router.add_get("/eldr/table", service.table)
    app.router.add_put("/{path:.*}", service.change)
    app.router.add_post("/{path:.*}", service.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=256).start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
