"""Measure the channel beside gRPC (grpc.aio) as the connection between an ingress and an engine.

    python -m benchmarks.serving.channel_or_grpc

Two processes, a client and a server, are connected over 127.0.0.1 by a transport of
benchmarks/lib/channel_transports.py. The server's engine computes nothing. At each step it sends every open
stream a chunk of one token: 250 bytes and the token's id. A round runs every transport with new processes, in
random order.
Each row is one transport with one number of open streams:

    tokens_per_s, client_us, server_us   at a given pace: tokens read, and CPU time per token in each process
    step_ms                              from a step until the client has read its last token, median
    peak_*                               the same without a pace: the next step follows when all is sent
    open_us                              CPU time of both processes for opening a stream
    memory_kib                           growth of both processes for an open stream
    cancel_*                             from the client's cancel until the server's handler has stopped,
                                         one stream after the other, the others at their pace
    slow_*                               one stream of large chunks that the client does not read: whether it
                                         was ended, the bytes that its handler sent, the memory by which the
                                         processes grew, and the others' tokens/s as % of the pace
    times_cpu, times_peak                CPU time per token at the pace, and peak tokens/s, as multiples of
                                         those of the channel in the same round
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.channel_transports import (
    ID,
    PAYLOAD,
    SLOW_BYTES,
    STEP_TIMEOUT_S,
    TRANSPORTS,
    Link,
    Readable,
    connect_by_transport,
    resident_mib,
    run_loop,
    serve,
)
from benchmarks.lib.rounds import medians
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.results import publish

BENCHMARKS = {"channel_or_grpc": "all"}
_STARTS_S = 30.0
_WARM_UP_S = 0.3
_CANCEL_GAP_S = 0.005
_WITH_INTERVAL = (
    "client_us",
    "server_us",
    "step_ms",
    "peak_tokens_per_s",
    "cancel_p50_ms",
    "cancel_p99_ms",
    "times_cpu",
    "times_peak",
)


@dataclass(frozen=True)
class ChannelLoad:
    """Streams, pace (tokens/s of all streams), durations (s) and number of cancelled streams of a trial."""

    streams: tuple[int, ...]
    pace: float
    seconds: float
    peak_seconds: float
    cancels: int


class _Readers:
    """Tasks that read all open streams, and the times at which they had the last token of each step."""

    def __init__(self, link: Link, count: int, first: int) -> None:
        self.numbers = range(first, first + count)
        self.calls: dict[int, Readable] = {n: link.stream({"stream": n}) for n in self.numbers}
        self._tasks = [asyncio.create_task(self._read(call)) for call in self.calls.values()]
        self._tokens = 0
        self._read_s: list[float] = []
        self._changed = asyncio.Event()

    async def _read(self, call: Readable) -> None:
        while (chunk := await call.read()) is not None:
            if chunk.num_tokens * len(PAYLOAD) != len(chunk.payload) or chunk.ids != ID * chunk.num_tokens:
                raise RuntimeError(f"a chunk of {chunk.num_tokens} tokens has {len(chunk.payload)} bytes")
            before, self._tokens = self._tokens, self._tokens + chunk.num_tokens
            if steps := self._tokens // len(self.calls) - before // len(self.calls):
                self._read_s += [time.monotonic()] * steps
                self._changed.set()

    async def time_steps(self, link: Link, seconds: float, gap_s: float) -> tuple[list[float], list[float]]:
        """Let the engine run. Return when its steps began and when their last tokens were read, s."""
        self._tokens, self._read_s = 0, []
        began_s = (await link.command("run", {"seconds": seconds, "gap_s": gap_s}))["began_s"]
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while self._tokens < len(began_s) * len(self.calls):
                self._changed.clear()
                await self._changed.wait()
        return began_s, self._read_s

    async def close(self, link: Link) -> None:
        """Cancel all streams and wait until the server has stopped them."""
        for call in self.calls.values():
            call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while (await link.command("stats", {}))["open"]:
            await asyncio.sleep(0.01)


async def _measure_at_pace(link: Link, readers: _Readers, seconds: float, gap_s: float) -> dict[str, float]:
    """Return throughput, CPU time per token and the time of a step. There is no pace if `gap_s` is 0."""
    before, cpu_s = await link.command("stats", {}), time.process_time()
    began_s, read_s = await readers.time_steps(link, seconds, gap_s)
    cpu_s = time.process_time() - cpu_s
    server_s = (await link.command("stats", {}))["cpu_s"] - before["cpu_s"]
    tokens = len(began_s) * len(readers.calls)
    # At a pace, the last step's interval counts in full.
    took_s = max(len(began_s) * gap_s, read_s[-1] - began_s[0])
    return {
        "tokens_per_s": tokens / took_s,
        "client_us": 1e6 * cpu_s / tokens,
        "server_us": 1e6 * server_s / tokens,
        "step_ms": 1000 * float(np.median(np.subtract(read_s, began_s))),
    }


async def _open_streams(link: Link, count: int, first: int) -> tuple[_Readers, dict[str, float]]:
    """Open streams and return them with what opening cost."""
    before, cpu_s, mib = await link.command("stats", {}), time.process_time(), resident_mib()
    readers = _Readers(link, count, first)
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while (after := await link.command("stats", {}))["open"] < count:
            await asyncio.sleep(0.01)
    cpu_s = time.process_time() - cpu_s + after["cpu_s"] - before["cpu_s"]
    mib = resident_mib() - mib + after["resident_mib"] - before["resident_mib"]
    return readers, {"open_us": 1e6 * cpu_s / count, "memory_kib": 1024 * mib / count}


async def _measure_slow_reader(
    link: Link, readers: _Readers, seconds: float, gap_s: float, number: int
) -> dict[str, float]:
    """Return the effect of one more stream that nobody reads."""
    before, mib = await link.command("stats", {}), resident_mib()
    slow = link.stream({"stream": number, "slow": True})
    paced = await _measure_at_pace(link, readers, seconds, gap_s)
    after = await link.command("stats", {})
    slow.cancel()
    while (await link.command("stats", {}))["open"] > len(readers.calls):
        await asyncio.sleep(0.01)
    return {
        "slow_ended": float(after["open"] == len(readers.calls)),
        "slow_sent_mib": after["slow_bytes"] / 2**20,
        "slow_server_mib": after["resident_mib"] - before["resident_mib"],
        "slow_client_mib": resident_mib() - mib,
        "slow_others_pct": 100 * paced["tokens_per_s"] * gap_s / len(readers.calls),
    }


async def _measure_cancels(
    link: Link, readers: _Readers, cancels: int, gap_s: float, rng: random.Random
) -> dict[str, float]:
    """Cancel streams one after the other during steps, and return the times until their handlers stopped."""
    await link.command("stats", {})
    numbers = rng.sample(readers.numbers, min(cancels, len(readers.numbers)))
    steps_s = len(numbers) * _CANCEL_GAP_S + 2 * gap_s
    run = asyncio.create_task(link.command("run", {"seconds": steps_s, "gap_s": gap_s}))
    await asyncio.sleep(gap_s / 2)
    sent_s: dict[int, float] = {}
    for number in numbers:
        sent_s[number] = time.monotonic()
        readers.calls[number].cancel()
        await asyncio.sleep(_CANCEL_GAP_S)
    await run
    stopped_s = (await link.command("stats", {}))["stopped_at"]
    ms = [1000 * (stopped_s[str(number)] - cancelled_s) for number, cancelled_s in sent_s.items()]
    return {"cancel_p50_ms": float(np.median(ms)), "cancel_p99_ms": float(np.percentile(ms, 99))}


async def trial(transport: str, port: int, load: ChannelLoad, seed: int) -> list[dict[str, Any]]:
    """Return one row for each number of streams."""
    rng, rows, first = random.Random(seed), [], 0
    async with connect_by_transport(transport, port) as link:
        for count in load.streams:
            gap_s = count / load.pace
            row: dict[str, Any] = {"way": transport, "streams": count, "offered_tokens_per_s": load.pace}
            readers, open_cost = await _open_streams(link, count, first)
            await readers.time_steps(link, _WARM_UP_S, 0.0)
            row |= await _measure_at_pace(link, readers, load.seconds, gap_s)
            peak = await _measure_at_pace(link, readers, load.peak_seconds, 0.0)
            row |= {f"peak_{name}": value for name, value in peak.items()}
            row |= open_cost | await _measure_slow_reader(link, readers, load.seconds, gap_s, first + count)
            row |= await _measure_cancels(link, readers, load.cancels, gap_s, rng)
            rows.append(row)
            await readers.close(link)
            first += count + 1
    return rows


@contextmanager
def _run_server(transport: str) -> Iterator[int]:
    """Run a server in a process of its own and yield its port."""
    context = multiprocessing.get_context("spawn")
    ready, other = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(transport, other))
    process.start()
    try:
        if not ready.poll(_STARTS_S):
            raise RuntimeError(f"the server of {transport} has not started within {_STARTS_S:g} s")
        yield ready.recv()
    finally:
        process.terminate()
        process.join()


def measure(transport: str, load: ChannelLoad, seed: int) -> list[dict[str, Any]]:
    """Return one row for each number of streams of a transport, with new processes."""
    context = multiprocessing.get_context("spawn")
    with _run_server(transport) as port, ProcessPoolExecutor(1, mp_context=context) as client:
        return client.submit(_client, transport, port, load, seed).result()


def _client(transport: str, port: int, load: ChannelLoad, seed: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run_loop(trial(transport, port, load, seed))
    return rows


def compare_with_channel(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its multiples of the channel's figures in this round."""
    base = {row["streams"]: row for row in rows if row["way"] == "channel"}
    for row in rows:
        channel = base[row["streams"]]
        cpu_us, channel_us = (some["client_us"] + some["server_us"] for some in (row, channel))
        row["times_cpu"] = cpu_us / channel_us
        row["times_peak"] = row["peak_tokens_per_s"] / channel["peak_tokens_per_s"]
    return rows


def channel_or_grpc(
    streams: Annotated[str, typer.Option(help="Numbers of open streams, comma-separated.")] = "200,2000",
    ways: Annotated[
        str, typer.Option(help=f"Transports, comma-separated, of {', '.join(TRANSPORTS)}.")
    ] = ",".join(TRANSPORTS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all transports.")] = 5,
    pace: Annotated[float, typer.Option(min=1, help="Tokens/s of all streams together.")] = 5000.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a paced phase, s.")] = 2.0,
    peak_seconds: Annotated[float, typer.Option(min=0.1, help="Length of the unpaced phase, s.")] = 1.5,
    cancels: Annotated[int, typer.Option(min=1, help="Number of streams to cancel.")] = 200,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Measure CPU time, throughput, cancellation and a slow reader over the channel and over gRPC."""
    transports = ways.split(",")
    if unknown := set(transports) - set(TRANSPORTS):
        raise UserInputError(f"--ways names {min(unknown)!r}; choose from {', '.join(TRANSPORTS)}")
    if "channel" not in transports:
        raise UserInputError(f"--ways is {ways!r}; it must include channel, the base of the comparison")
    load = ChannelLoad(tuple(options.numbers("--streams", streams)), pace, seconds, peak_seconds, cancels)
    rng, rows = random.Random(seed), []
    for number in range(rounds):
        round_rows = []
        for transport in rng.sample(transports, len(transports)):
            round_rows += measure(transport, load, seed + number)
            typer.echo(
                f"round {number + 1} of {rounds}, {transport}, {round_rows[-1]['streams']} streams: "
                f"{round_rows[-1]['client_us'] + round_rows[-1]['server_us']:.1f} us a token, "
                f"{round_rows[-1]['peak_tokens_per_s']:.0f} tokens/s at most",
                err=True,
            )
        rows += sorted(
            compare_with_channel(round_rows), key=lambda row: (row["streams"], TRANSPORTS.index(row["way"]))
        )
    publish(
        "channel_or_grpc",
        medians(rows, keys=("way", "streams"), with_interval=_WITH_INTERVAL),
        inputs=asdict(load)
        | {"rounds": rounds, "payload_bytes": len(PAYLOAD), "slow_chunk_bytes": SLOW_BYTES}
        | {package: version(package) for package in ("grpcio", "uvloop", "msgspec")}
        | {"each": rows},
        seed=seed,
        out=out,
        notes="client and server are processes of this machine, over 127.0.0.1; chunks of one token",
    )


if __name__ == "__main__":
    run(channel_or_grpc)
