"""Thousands of concurrent streams through one ingress, over engines that compute nothing.

    python -m benchmarks.streams

HTTP, Ray Serve's proxy, our ingress, request routers, router actor and Serve's streaming are real; the
engines only wait. So this is the serving layer's own limit. Read failures (goal: none at 2,000 open
streams) and tokens_per_s: where it stays below offered_tokens_per_s, the layer is the bottleneck.
Mode `throughput` is Ray Serve's own setting for it: one event loop a process, gRPC between replicas.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import httpx
import typer

from benchmarks.harness import options
from benchmarks.harness.client import Answer, allow_open_files, complete, errors, most_open, session, summary
from benchmarks.harness.cluster import local_ray, wait_ready
from tools.cli import BadInput, run
from tools.results import publish

MODES = {
    "default": {},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
    # Without direct ingress: that needs a proxy of another kind in front.
    "throughput": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"},
}


async def _load(url: str, model: str, streams: int, tokens: int, ramp_s: float) -> list[Answer]:
    body = {"model": model, "prompt": "a prompt " * 20, "max_tokens": tokens}
    async with session() as http:

        async def one(number: int) -> Answer:
            await asyncio.sleep(ramp_s * number / streams)
            return await complete(http, url, body)

        return list(await asyncio.gather(*(one(number) for number in range(streams))))


def _measure(
    mode: str, counts: list[int], tokens: int, gap_s: float, ramp_s: float, prefill_s: float,
    decode_replicas: int, port: int, seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row a count. In a process of its own: Ray Serve reads its mode when it is imported."""
    allow_open_files(65536)
    os.environ |= MODES[mode]
    rows: list[dict[str, Any]] = []
    with local_ray(http_port=port):
        from ray import serve

        from benchmarks.harness.fakes import MODEL, fake_application

        application = fake_application(
            decode_replicas=decode_replicas, prefill_s=prefill_s, gap_s=gap_s, seed=seed
        )
        serve.run(application, name="bench-streams", route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        asyncio.run(_load(url, MODEL, 20, 2, 0.5))
        for count in counts:
            answers = asyncio.run(_load(url, MODEL, count, tokens, ramp_s))
            offered_s = ramp_s + prefill_s + (tokens - 1) * gap_s
            status = httpx.get(f"{url}/eldr/status", timeout=30).json()
            rows.append(
                {"serve": mode, "streams": count, "most_open": most_open(answers)}
                | summary(answers)
                | {
                    "offered_tokens_per_s": count * tokens / offered_s,
                    "leases_left": status["ingress"]["leases"],
                    "errors": errors(answers),
                }
            )
    return rows


def streams(
    counts: Annotated[str, typer.Option(help="Concurrent streams, one row each.")] = "500,1000,2000",
    modes: Annotated[
        str, typer.Option(help="Ray Serve modes, one after the other: default, throughput.")
    ] = "default,throughput",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens a stream.")] = 20,
    gap_ms: Annotated[float, typer.Option(min=0, help="Between two tokens of a stream, ms.")] = 1000.0,
    ramp_s: Annotated[float, typer.Option(min=0, help="Time in which all streams are opened, s.")] = 10.0,
    prefill_ms: Annotated[float, typer.Option(min=0, help="Time of a prefill, ms.")] = 20.0,
    decode_replicas: Annotated[int, typer.Option(min=1, help="Decode replicas.")] = 2,
    port: Annotated[int, typer.Option(help="HTTP port.")] = 8310,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Open many streams at once and report failures, TTFT and throughput."""
    rows: list[dict[str, Any]] = []
    for mode in modes.split(","):
        if mode not in MODES:
            raise BadInput(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            rows += process.submit(
                _measure, mode, [int(count) for count in counts.split(",")], tokens, gap_ms / 1000, ramp_s,
                prefill_ms / 1000, decode_replicas, port, seed,
            ).result()  # fmt: skip
    publish(
        "streams", rows,
        inputs={
            "tokens": tokens, "gap_ms": gap_ms, "ramp_s": ramp_s, "prefill_ms": prefill_ms,
            "decode_replicas": decode_replicas, "modes": {m: MODES[m] for m in modes.split(",")},
        },
        seed=seed, out=out,
        notes="one ingress replica, one proxy; fake engines; the client shares the cores. "
        "TTFT includes the fake prefill; TPOT includes the gap",
    )  # fmt: skip


if __name__ == "__main__":
    run(streams)
