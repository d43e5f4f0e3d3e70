"""An ingress's HTTP server with answers that wait for a word on stdin; says on stdout what has come.

python front_server.py PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eldr_serve.ingress.admission import IngressOptions
from eldr_serve.ingress.http_server import HttpServer


def say(what: str) -> None:
    print(what, flush=True)


async def main(port: int) -> None:
    go = asyncio.Event()

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": True})

    async def answer(request: Request) -> Response:
        asked = json.loads(await request.body())
        if asked["stream"]:
            return StreamingResponse(stream())
        say("got")
        await go.wait()
        return JSONResponse({"pid": os.getpid(), "prompt": asked["prompt"]})

    async def stream() -> AsyncIterator[bytes]:
        yield b"first"
        say("got")
        await go.wait()
        yield b" last"

    routes = [Route("/eldr/ready", ready), Route("/v1/completions", answer, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), IngressOptions(port=port))
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    go.set()
    await asyncio.to_thread(sys.stdin.readline)
    await server.drain()


asyncio.run(main(int(sys.argv[1])))
