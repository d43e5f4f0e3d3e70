"""An ingress's HTTP server that prints a line for each request, and answers after a line on stdin.

python ingress_behind_haproxy.py PORT
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.options import IngressOptions


async def main(port: int) -> None:
    go = asyncio.Event()

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": True})

    async def answer(request: Request) -> Response:
        fields = json.loads(await request.body())
        if fields["stream"]:
            return StreamingResponse(stream())
        print("received", flush=True)
        await go.wait()
        return JSONResponse({"pid": os.getpid(), "prompt": fields["prompt"]})

    async def stream() -> AsyncIterator[bytes]:
        yield b"first"
        print("received", flush=True)
        await go.wait()
        yield b" last"

    routes = [Route("/eldr/ready", ready), Route("/v1/completions", answer, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), IngressOptions(port=port))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    go.set()
    await asyncio.to_thread(sys.stdin.readline)
    await server.drain()


asyncio.run(main(int(sys.argv[1])))
