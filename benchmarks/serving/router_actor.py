"""Time placements through the real DecodeRouter actor, beside bare calls to an async actor.

    python -m benchmarks.serving.router_actor

The client runs in its own actor, like an ingress. A placement is RouterClient.place from counts to lease. It
consists of the scoring in the client, one call to the router, and the policy in the router. `added_p50_ms` is
the cost of a placement beyond a call that does nothing, and should be below 0.5 with 1 request in flight.
With many requests in flight, placements share calls, so a placement then costs the router less than a call.
There should be 5,000 placements/s.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.cluster import local_ray
from benchmarks.lib.synthetic import EXPERTS, LAYERS, prompt_counts, random_spec, table_near
from eldr_serve.commands.run import run
from eldr_serve.experts.routing_table import RoutingTable
from loadgen.results import publish, time_calls
from loadgen.statistics import median_ci

BENCHMARKS = {"router_actor": "default"}
_PROMPTS = 32


class Bare:
    """An async actor that does nothing."""

    async def call(self) -> None:
        """Return immediately."""


class Caller:
    """Timed client of the router, like an ingress."""

    def __init__(self, name: str, table: bytes, workers: int, prompts: NDArray[np.uint32]) -> None:
        from eldr_serve.fleet.directory import ReplicaDirectory
        from eldr_serve.router.actor import connect
        from eldr_serve.router.settings import RouterSettings
        from eldr_serve.router_client.calls import RouterCalls
        from eldr_serve.router_client.client import RouterClient

        replicas = ReplicaDirectory()
        replicas.publish({f"replica-{number:04d}": {} for number in range(workers)})
        spec = RouterSettings(model_id="m", policy="locality-band", table=table)
        calls = RouterCalls(lambda: connect(name, spec))
        self._client = RouterClient(calls, lambda: replicas.known_workers, timeout_s=10.0)
        self._table = RoutingTable.from_bytes(table)
        self._prompts = prompts
        self._number = 0

    async def start(self) -> None:
        """Connect, load the table, and place some warm-up requests."""
        self._client.start()
        for _ in range(50):
            await self._place()

    def score(self, calls: int) -> list[float]:
        """Return the seconds of each scoring alone, which is part of every placement."""
        return time_calls(
            lambda i: self._table.similarity(self._prompts[i % _PROMPTS]), calls=calls, warm_up=0
        )

    async def bare(self, actor: Any, calls: int, in_flight: int) -> list[float]:
        """Return the seconds of each call that does nothing."""

        async def call_actor() -> None:
            await actor.call.remote()

        return await _latencies(call_actor, calls, in_flight)

    async def place(self, calls: int, in_flight: int) -> list[float]:
        """Return the seconds of each placement. Each request is released as soon as it is placed."""
        return await _latencies(self._place, calls, in_flight)

    async def rate(self, seconds: float, in_flight: int) -> float:
        """Return placements/s with `in_flight` always in progress."""
        end, start, before = time.perf_counter() + seconds, time.perf_counter(), self._number

        async def go() -> None:
            while time.perf_counter() < end:
                await self._place()

        await asyncio.gather(*(go() for _ in range(in_flight)))
        return (self._number - before) / (time.perf_counter() - start)

    async def local_fallback(self) -> bool:
        """Return whether requests were placed by local fallback, since the router did not answer in time."""
        return self._client.router_unreachable

    async def _place(self) -> None:
        from eldr_serve.scheduling import PlacementRequest

        self._number += 1
        request = PlacementRequest(str(self._number), prompt_tokens=300, max_new_tokens=64)
        await self._client.place(request, self._prompts[self._number % _PROMPTS])
        self._client.release(request.request_id)


async def _latencies(call: Any, calls: int, in_flight: int) -> list[float]:
    seconds: list[float] = []

    async def go(count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(go(max(1, calls // in_flight)) for _ in range(in_flight)))
    return seconds


def _measure(
    workers: int, calls: int, rounds: int, seconds: float, many: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    import ray

    spec, prompts = random_spec(rng), prompt_counts(_PROMPTS, rng)
    table = table_near(prompts, workers, rng, spec=spec).to_bytes()
    name = f"decode-router:bench-{workers}"
    actors = (ray.remote(kind).options(num_cpus=0, max_concurrency=1000) for kind in (Bare, Caller))
    bare, caller = next(actors).remote(), next(actors).remote(name, table, workers, prompts)
    ray.get(caller.start.remote())
    rates = [ray.get(caller.rate.remote(seconds, many)) for _ in range(rounds)]
    score = ray.get(caller.score.remote(200))
    rows = []
    for in_flight in (1, 64):
        bares, places, added = [], [], []
        for _ in range(rounds):
            bares.append(ray.get(caller.bare.remote(bare, calls, in_flight)))
            places.append(ray.get(caller.place.remote(calls, in_flight)))
            added.append(float(np.median(places[-1]) - np.median(bares[-1])))
        middle, low, high = median_ci(added)
        row: dict[str, Any] = {"workers": workers, "in_flight": in_flight}
        for kind, times_s in (("bare", np.concatenate(bares)), ("place", np.concatenate(places))):
            row |= {f"{kind}_p{q}_ms": 1000 * float(np.percentile(times_s, q)) for q in (50, 99)}
        row |= {
            "added_p50_ms": 1000 * middle,
            "added_p50_low_ms": 1000 * low,
            "added_p50_high_ms": 1000 * high,
        }
        row |= {"of_it_scoring_p50_ms": 1000 * float(np.median(score))}
        row |= {"placements_per_s": float(np.median(rates))}
        rows.append(row | {"placed_by_local_fallback": ray.get(caller.local_fallback.remote())})
    for actor in (caller, bare, ray.get_actor(name, namespace="eldr")):
        ray.kill(actor)
    return rows


def router_actor(
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = "16,64,256,1024",
    calls: Annotated[int, typer.Option(min=64, help="Timed calls per round.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of bare calls and placements.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a throughput round, s.")] = 2.0,
    many: Annotated[int, typer.Option(min=1, help="Placements in flight in throughput rounds.")] = 512,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time placements through the router actor by number of workers, beside bare calls."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    sizes = options.numbers("--workers", workers)
    with local_ray():
        for size in sizes:
            rows += _measure(size, calls, rounds, seconds, many, rng)
    publish(
        "router_actor",
        rows,
        inputs={"L": LAYERS, "E": EXPERTS, "calls": calls, "rounds": rounds}
        | {"seconds": seconds, "many": many},
        seed=seed,
        out=out,
        notes="Policy locality-band, one client process. Caller, router and bare actor share the cores. "
        "`added` is the difference of a round's medians: the median over rounds, with a 95 % interval by "
        "bootstrap.",
    )


if __name__ == "__main__":
    run(router_actor)
