"""Kill processes of the serving layer under thousands of streams, and under clients behind a proxy.

    python -m benchmarks.serving.stream_faults

HTTP, proxies, ingresses, router actor and channels are real, but the engines only wait and use no core. Each
row is a separate application, with a kill -9 of each named process in turn, while requests are in flight.
`failures` counts the requests that did not end with every token exactly once.

A *way* is the path from the client to the ingress: `own` is the ingress's own port, `proxy` is Ray Serve's,
and `haproxy` is its HAProxy as Ray configures it. `haproxy-retry` is the same with
RAY_SERVE_HAPROXY_RETRY_ON, which resends a request whose ingress died before the first byte. Behind a proxy,
clients request unstreamed answers, so that no answer has a byte when its ingress dies.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Annotated, Any

import aiohttp
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
)
from benchmarks.lib.fakes.names import APPLICATION
from benchmarks.lib.fakes.service import (
    HAPROXY,
    NO_DRAINING,
    check_text,
    request_body,
    run_in_process,
    serve_fake,
)
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen import processes
from loadgen.results import column_notes, publish

BENCHMARKS = {"stream_faults": "all"}

_WAYS: dict[str, dict[str, str]] = {
    "own": {},
    "proxy": {},
    "haproxy": HAPROXY,
    "haproxy-retry": HAPROXY | {"RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response"},
}
_ROLES = {"decode": "FakeDecodeServer", "prefill": "FakePrefillServer", "ingress": "EldrIngress"}
_TIMEOUT_S = 180.0
_SETTLE_S = 60.0
NOTES = column_notes(
    "The engines compute nothing, and the client shares the cores with the service.",
    {
        "way": "own: streams at the ingress's own port; all others: unstreamed answers through a proxy.",
        "longest_gap_s": "Longest time between two tokens of a stream.",
        "settled_s": "Time from the end of the last answer until no lease and no request is in flight, and "
        "as many processes run as before.",
    },
)


def _processes(role: str) -> list[Any]:
    if role == "router":
        return processes.find_processes("ray::DecodeRouter")
    return processes.find_processes(f"ray::ServeReplica:{APPLICATION}:{_ROLES[role]}")


async def _request_unstreamed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Request one answer without streaming, and store any failure in `error`."""
    answer = Answer(time.perf_counter())
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status == 200:
                answer.timing.text = (await response.json())["choices"][0]["text"]
            else:
                answer.error = f"HTTP {response.status}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        answer.error = type(error).__name__
    answer.ended_at_s = time.perf_counter()
    return answer


async def _load(
    url: str, way: str, count: int, tokens: int, gap_ms: float, ramp_s: float, kill: list[str]
) -> list[Answer]:
    """Send all requests at once. Kill the first process when all have begun, then another one every 3 s."""
    body = request_body(tokens, gap_ms)
    async with open_session(_TIMEOUT_S) as http:

        async def send(number: int) -> Answer:
            await asyncio.sleep(ramp_s * number / count)
            answer = await (request_completion if way == "own" else _request_unstreamed)(http, url, body)
            check_text(answer, tokens)
            return answer

        async def kill_in_turn() -> None:
            await asyncio.sleep(ramp_s + 2.0)
            for role in kill:
                processes.kill(_processes(role)[0])
                await asyncio.sleep(3.0)

        killer = asyncio.create_task(kill_in_turn())
        answers = await asyncio.gather(*(send(number) for number in range(count)))
        await killer
    return list(answers)


def _measure(
    way: str, count: int, tokens: int, gap_ms: float, ramp_s: float, kill: list[str], port: int, seed: int
) -> dict[str, Any]:
    """Return a row. Needs its own process: Ray Serve reads its mode at import."""
    allow_open_files(65536)
    os.environ |= NO_DRAINING | _WAYS[way]
    is_own = way == "own"
    with serve_fake(
        port,
        use_ingress_port=is_own,
        decode_replicas=2,
        prefill_s=0.02,
        seed=seed,
        ingresses=1 if is_own else 2,
    ) as url:
        asyncio.run(_load(url, way, 20, 2, 0.0, 0.5, []))
        processes_before = {role: len(_processes(role)) for role in (*_ROLES, "router")}
        answers = asyncio.run(_load(url, way, count, tokens, gap_ms, ramp_s, kill))
        ended = time.perf_counter()
        ingress: dict[str, Any] = {}
        while time.perf_counter() - ended < _SETTLE_S:
            ingress = {}
            with suppress(httpx.TransportError, ValueError):
                ingress = httpx.get(f"{url}/eldr/status", timeout=30).json().get("ingress", {})
            has_all_processes = all(
                len(_processes(role)) >= number for role, number in processes_before.items()
            )
            if (
                has_all_processes
                and ingress
                and not ingress["in_flight"]
                and not ingress["leases"]
                and not ingress["router_unreachable"]
            ):
                break
            time.sleep(0.5)
        failed = [answer for answer in answers if answer.error is not None]
        return {
            "way": way,
            "killed": ", ".join(kill),
            "requests": count,
            "tokens": tokens,
            "most_open": max_open_answers(answers),
            "failures": len(failed),
            "errors": count_failures(answers),
            "longest_gap_s": max(
                (max(a.timing.chunk_gaps_s, default=0.0) for a in answers if is_own), default=None
            ),
            "longest_s": max(a.ended_at_s - a.started_at_s for a in answers),
            "settled_s": time.perf_counter() - ended,
            "left": {name: ingress.get(name) for name in ("in_flight", "leases")},
        }


def stream_faults(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 2000,
    unstreamed: Annotated[int, typer.Option(min=1, help="Concurrent answers behind a proxy.")] = 200,
    ways: Annotated[
        str, typer.Option(help=f"Ways to the ingress, comma-separated, of {', '.join(_WAYS)}.")
    ] = "own,proxy,haproxy,haproxy-retry",
    kill: Annotated[str, typer.Option(help="Processes to kill in turn under streams.")] = "decode,router",
    ramp_s: Annotated[float, typer.Option(min=0, help="Time over which requests are sent, s.")] = 10.0,
    port: options.Port = 8330,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Kill processes under load. Exit with status 1 if a stream was lost."""
    rows: list[dict[str, Any]] = []
    roles = kill.split(",")
    if unknown := (set(ways.split(",")) - set(_WAYS)) | (set(roles) - {*_ROLES, "router"}):
        raise UserInputError(f"--ways or --kill names {min(unknown)!r}, which does not exist: see --help")
    for way in ways.split(","):
        load = (unstreamed, 100, 60.0, 2.0, ["ingress"])
        if way == "own":
            load = (streams, 100, 400.0, ramp_s, roles)
        rows.append(run_in_process(_measure, way, *load, port, seed))
    publish("stream_faults", rows, inputs={"ramp_s": ramp_s}, seed=seed, out=out, notes=NOTES)
    if any(row["failures"] for row in rows if row["way"] == "own"):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(stream_faults)
