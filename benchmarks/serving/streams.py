"""Serve thousands of concurrent streams through one ingress, over engines that compute nothing.

    python -m benchmarks.serving.streams

HTTP, the way to the ingress, the ingress, router actor and channels are real, but the engines only wait. So
this measures the limit of the serving layer. At 2,000 open streams there should be no failures. If
tokens_per_s is below offered_tokens_per_s, the layer or the client is the bottleneck.

`server_us_per_token` is the CPU time of all processes except the client, minus their idle CPU time (idle_pct,
% of a core). It includes the fixed cost of a request (HTTP, prefill call, placement), so it is lower for
longer answers. Other columns have the CPU time of each part.

A *way* is the path from the client to the ingress: `proxy` is Ray Serve's default, `haproxy` is its HAProxy
in front of a port in the ingress, and `own` is the ingress's own HTTP server (`ingress.port`). With `-quiet`,
Ray's idle cost is lowered (eldr_serve/config/ray_settings.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from itertools import product
from typing import Annotated, Any

import httpx
import typer

from benchmarks.lib import options
from benchmarks.lib.client import (
    Answer,
    allow_open_files,
    count_failures,
    max_open_answers,
    open_session,
    request_completion,
    summarise_answers,
)
from benchmarks.lib.cpu_time import cpu_s
from benchmarks.lib.fakes.service import HAPROXY, NO_DRAINING, request_body, run_in_process, serve_fake
from benchmarks.lib.rounds import medians
from eldr_serve.commands.run import run
from eldr_serve.config.ray_settings import QUIET
from eldr_serve.errors import UserInputError
from loadgen.results import publish

BENCHMARKS = {"streams": "all"}

_WAYS: dict[str, dict[str, str]] = {"proxy": {}, "haproxy": HAPROXY, "own": {}}
_TIMEOUT_S = 120.0  # slower streams count as failed
_PREFILL_MS = 20.0  # time of a prefill
_PARTS = ("ingress", "router", "engines", "proxy", "ray")


async def _load(url: str, streams: int, tokens: int, gap_ms: float, ramp_s: float) -> list[Answer]:
    body = request_body(tokens, gap_ms)
    async with open_session(_TIMEOUT_S) as http:

        async def send(number: int) -> Answer:
            await asyncio.sleep(ramp_s * number / streams)
            return await request_completion(http, url, body)

        return list(await asyncio.gather(*(send(number) for number in range(streams))))


def _measure(
    way: str,
    counts: list[int],
    loads: list[tuple[int, float]],
    ramp_s: float,
    prefill_s: float,
    idle_s: float,
    decode_replicas: int,
    port: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return one row per count and load. A call needs its own process: Ray Serve reads its mode at import."""
    allow_open_files(65536)
    os.environ |= NO_DRAINING | _WAYS[way.removesuffix("-quiet")] | (QUIET if way.endswith("-quiet") else {})
    rows: list[dict[str, Any]] = []
    with serve_fake(
        port,
        use_ingress_port=way.startswith("own"),
        decode_replicas=decode_replicas,
        prefill_s=prefill_s,
        seed=seed,
    ) as url:
        asyncio.run(_load(url, 20, 2, 0.0, 0.5))
        before = cpu_s()
        time.sleep(idle_s)
        idle = {name: (after - before[name]) / idle_s for name, after in cpu_s().items()}
        for count, (tokens, gap_ms) in product(counts, loads):
            before, start = cpu_s(), time.perf_counter()
            answers = asyncio.run(_load(url, count, tokens, gap_ms, ramp_s))
            took_s, after = time.perf_counter() - start, cpu_s()
            num_tokens = sum(len(answer.timing.chunk_times_s) for answer in answers if answer.error is None)
            us = {
                name: 1e6 * (after[name] - before[name] - idle.get(name, 0.0) * took_s) / max(num_tokens, 1)
                for name in after
            }
            offered_s = ramp_s + prefill_s + (tokens - 1) * gap_ms / 1000
            status = httpx.get(f"{url}/eldr/status", timeout=30).json()
            row: dict[str, Any] = {"way": way, "streams": count, "tokens": tokens, "gap_ms": gap_ms}
            row |= {"most_open": max_open_answers(answers), **summarise_answers(answers)}
            row["offered_tokens_per_s"] = count * tokens / offered_s
            row["server_us_per_token"] = sum(us.values())
            row |= {f"{name}_us_per_token": us.get(name, 0.0) for name in _PARTS}
            row |= {"idle_pct": 100 * sum(idle.values()), "leases_left": status["ingress"]["leases"]}
            rows.append(row | {"errors": count_failures(answers)})
            typer.echo(
                f"{way}, {count} streams of {tokens}: {rows[-1]['tokens_per_s']:.0f} tokens/s, "
                f"{rows[-1]['server_us_per_token']:.0f} us per token",
                err=True,
            )
    return rows


def _parse_loads(loads: str) -> list[tuple[int, float]]:
    try:
        pairs = [load.split("@") for load in loads.split(",")]
        return [(int(tokens), float(gap)) for tokens, gap in pairs]
    except ValueError:
        raise UserInputError(f"--loads must be comma-separated TOKENS@MILLISECONDS, got {loads!r}") from None


def _summarise_rounds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per way, count and load."""
    keys = ("way", "streams", "tokens", "gap_ms")
    summaries = medians(
        rows,
        keys=keys,
        with_interval=("ttft_p99_ms", "tokens_per_s", "server_us_per_token"),
        summed=("requests", "failures", "leases_left"),
    )
    for row in summaries:
        errors_of_case = [
            measured["errors"] for measured in rows if all(measured[name] == row[name] for name in keys)
        ]
        row["errors"] = dict(sum(map(Counter, errors_of_case), Counter()))
    return summaries


def streams(
    counts: Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")] = "500,1000,2000",
    ways: Annotated[
        str, typer.Option(help="Ways to the ingress: proxy, haproxy, own, each also with -quiet.")
    ] = "proxy,haproxy,own,own-quiet",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all ways.")] = 1,
    loads: Annotated[str, typer.Option(help="Tokens per stream @ ms between tokens.")] = "20@1000,100@300",
    ramp_s: Annotated[float, typer.Option(min=0, help="Time over which streams are opened, s.")] = 10.0,
    idle_s: Annotated[float, typer.Option(min=1, help="Time without a request, s.")] = 10.0,
    decode_replicas: Annotated[int, typer.Option(min=1, help="Decode replicas.")] = 2,
    port: options.Port = 8310,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Open many streams at once and report failures, TTFT and throughput."""
    rows: list[dict[str, Any]] = []
    _parse_loads(loads)
    chosen_ways = ways.split(",")
    for way in chosen_ways:
        if way.removesuffix("-quiet") not in _WAYS:
            raise UserInputError(f"there is no way {way!r}; choose from {', '.join(_WAYS)}")
    for way in chosen_ways * rounds:
        rows += run_in_process(
            _measure,
            way,
            options.numbers("--counts", counts),
            _parse_loads(loads),
            ramp_s,
            _PREFILL_MS / 1000,
            idle_s,
            decode_replicas,
            port,
            seed,
        )
    publish(
        "streams",
        _summarise_rounds(rows),
        inputs={
            "ramp_s": ramp_s,
            "prefill_ms": _PREFILL_MS,
            "decode_replicas": decode_replicas,
            "rounds": rounds,
            "quiet": QUIET,
        },
        seed=seed,
        out=out,
        notes="One ingress replica with fake engines; the client shares the cores. "
        "TTFT includes the fake prefill; TPOT includes the gap",
    )


if __name__ == "__main__":
    run(streams)
