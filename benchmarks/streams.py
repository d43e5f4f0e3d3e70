"""Thousands of concurrent streams through one ingress, over engines that compute nothing.

    python -m benchmarks.streams

HTTP, Ray Serve's proxy, our ingress, request routers, router actor and Serve's streaming are real; the
engines only wait. So this is the serving layer's own limit. Read failures (goal: none at 2,000 open
streams) and tokens_per_s: where it stays below offered_tokens_per_s, the layer is the bottleneck.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.common import publish
from benchmarks.rig.client import Answer, allow_open_files, complete, errors, most_open, session, summary
from benchmarks.rig.cluster import local_ray
from offline.cli import BadInput, run


def wait_ready(url: str, seconds: float = 60.0) -> None:
    """Until every pair of engines is warm; BadInput after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = httpx.get(f"{url}/eldr/status", timeout=30)
        if status.status_code == 200 and status.json()["ingress"]["ready"]:
            return
        time.sleep(0.5)
    raise BadInput(f"the application was not ready within {seconds:.0f} s")


async def _load(url: str, model: str, streams: int, tokens: int, ramp_s: float) -> list[Answer]:
    body = {"model": model, "prompt": "a prompt " * 20, "max_tokens": tokens}
    async with session() as http:

        async def one(number: int) -> Answer:
            await asyncio.sleep(ramp_s * number / streams)
            return await complete(http, url, body)

        return list(await asyncio.gather(*(one(number) for number in range(streams))))


def streams(
    counts: Annotated[str, typer.Option(help="Concurrent streams, one row each.")] = "500,1000,2000",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens a stream.")] = 20,
    gap_ms: Annotated[float, typer.Option(min=0, help="Between two tokens of a stream, ms.")] = 1000.0,
    ramp_s: Annotated[float, typer.Option(min=0, help="Time in which all streams are opened, s.")] = 10.0,
    prefill_ms: Annotated[float, typer.Option(min=0, help="Time of a prefill, ms.")] = 20.0,
    decode_replicas: Annotated[int, typer.Option(min=1, help="Decode replicas.")] = 2,
    port: Annotated[int, typer.Option(help="HTTP port.")] = 8310,
    seed: Annotated[int, typer.Option(help="Seed of signatures and table.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; default in benchmarks/results.")] = None,
) -> None:
    """Open many streams at once and report failures, TTFT and throughput."""
    allow_open_files(65536)
    rows: list[dict[str, Any]] = []
    failures: dict[str, dict[str, int]] = {}
    with local_ray(http_port=port):
        from ray import serve

        from benchmarks.rig.fakes import MODEL, fake_application

        application = fake_application(
            decode_replicas=decode_replicas, prefill_s=prefill_ms / 1000, gap_s=gap_ms / 1000, seed=seed
        )
        serve.run(application, name="bench-streams", route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        asyncio.run(_load(url, MODEL, 20, 2, 0.5))
        for count in map(int, counts.split(",")):
            answers = asyncio.run(_load(url, MODEL, count, tokens, ramp_s))
            failures[str(count)] = errors(answers)
            row = {"streams": count, "most_open": most_open(answers)} | summary(answers)
            offered_s = ramp_s + prefill_ms / 1000 + (tokens - 1) * gap_ms / 1000
            rows.append(row | {"offered_tokens_per_s": count * tokens / offered_s})
            left = httpx.get(f"{url}/eldr/status", timeout=30).json()
            rows[-1]["leases_left"] = left["ingress"]["leases"]
    publish(
        "streams", rows,
        inputs={
            "tokens": tokens, "gap_ms": gap_ms, "ramp_s": ramp_s, "prefill_ms": prefill_ms,
            "decode_replicas": decode_replicas, "failures": failures,
        },
        seed=seed, out=out,
        notes="one ingress replica, one proxy; fake engines; the client shares the cores. "
        "TTFT includes the fake prefill; TPOT includes the gap",
    )  # fmt: skip


if __name__ == "__main__":
    run(streams)
