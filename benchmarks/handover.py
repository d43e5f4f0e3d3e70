"""The hand-over in its parts: from the end of the prefill call to the first decode chunk.

    python -m benchmarks.handover

Real engines behind the real ingress, at one request in flight (idle) and at several (load):

    place       router: score, one call over its channel
    engine      decode replica: from the call's arrival to its first chunk. Of it
      admit       until the engine core has the request
      wait        KV pull, and until the first step is scheduled
      step        the first decode step
    transport   the rest: the call's way over the channel, and the first chunk's back

The ingress times the hand-over and `place` itself (/eldr/status), a timed subclass of our decode server
the engine's part. NIXL's own transfer time comes from Ray's metrics, which keep a histogram's buckets
and not its sum: kv_pull_bucketed_ms is good to some milliseconds. Read before_step: all but the pull and
the step itself, with the way back to the client, which cannot be told from the way there (goal below 10 ms
idle, below 5 % of TTFT at load).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import httpx
import numpy as np
import typer

from benchmarks.harness import options
from benchmarks.harness.client import Answer, allow_open_files, closed_loop, complete, session
from benchmarks.harness.cluster import local_ray, wait_ready
from benchmarks.harness.engines import our_arguments
from benchmarks.harness.prompts import MODEL, bodies
from eldr_serve.client import Client
from eldr_serve.serving.stages import WINDOW
from tools.cli import run
from tools.prometheus import total
from tools.results import publish

_KEY = "handover"
_KV_PULL = "ray_vllm_nixl_xfer_time_seconds"


def kv_pull_totals(text: str) -> tuple[float, float]:
    """(seconds, transfers) so far over all engines, from a Prometheus page; only decode engines pull."""
    return total(text, f"{_KV_PULL}_sum"), total(text, f"{_KV_PULL}_count")


def _settled(url: str) -> tuple[float, float]:
    """kv_pull_totals once they stand still: processes report every few seconds."""
    totals, still = kv_pull_totals(httpx.get(url, timeout=60).text), 0
    while still < 6:
        time.sleep(1.0)
        newer = kv_pull_totals(httpx.get(url, timeout=60).text)
        still, totals = (still + 1 if newer == totals else 0), newer
    return totals


async def _load(url: str, work: list[dict[str, Any]], requests: int, in_flight: int) -> list[Answer]:
    async with session() as http:
        return await closed_loop(
            lambda n: complete(http, url, work[n % len(work)]), requests=requests, in_flight=in_flight
        )


def _row(
    in_flight: int, stages: dict[str, dict[str, float]], kv_pull_ms: float, answers: list[Answer]
) -> dict[str, Any]:
    good = [1000 * a.timing.token_times_s[0] for a in answers if a.error is None]
    ttft = float(np.mean(good))
    before_step = stages["handover"]["mean_ms"] - stages["step"]["mean_ms"] - kv_pull_ms
    row: dict[str, Any] = {"in_flight": in_flight, "failures": len(answers) - len(good), "ttft_mean_ms": ttft}
    for name in ("prefill", "handover", "place", "engine", "admit", "wait", "step"):
        row |= {f"{name}_{q}_ms": stages[name][f"{q}_ms"] for q in ("mean", "p50", "p99")}
    return row | {
        "kv_pull_bucketed_ms": kv_pull_ms,
        "transport_mean_ms": stages["first_token"]["mean_ms"] - stages["engine"]["mean_ms"],
        "before_step_mean_ms": before_step,
        "before_step_share_of_ttft_pct": 100 * before_step / ttft,
    }


def handover(
    in_flight: Annotated[str, typer.Option(help="Requests in flight, closed loop; one row each.")] = "1,16",
    requests: Annotated[int, typer.Option(min=WINDOW, help="Requests of each row.")] = 400,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("demo_model/weights"),
    prompts: options.Prompts = options.PROMPTS,
    port: Annotated[int, typer.Option(help="First of three HTTP ports.")] = 8320,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time the hand-over's parts on real engines, idle and at load."""
    allow_open_files(8192)
    work = bodies(prompts, count=1024, max_tokens=max_tokens, seed=seed)
    rows = []
    with local_ray(http_port=port + 2, metrics_port=port + 1):
        from ray import serve

        from benchmarks.harness.timed_decode import TimedDecodeServer
        from eldr_serve.serving.app import build_app

        with patch("eldr_serve.serving.app.LLMDecodeServer", TimedDecodeServer):
            arguments = our_arguments(deployment, model, decode_replicas=1)
            application = build_app(arguments | {"ingress": {"port": port}, "admin_key": _KEY})
        serve.run(application, name="eldr", route_prefix="/")
        url, metrics = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}/metrics"
        wait_ready(url, 180)
        asyncio.run(_load(url, work, 32, 8))
        decode = serve.get_deployment_handle(f"Decode:{MODEL}", "eldr")
        for count in map(int, in_flight.split(",")):
            seconds, transfers = _settled(metrics)
            answers = asyncio.run(_load(url, work, requests, count))
            stages = Client(url, _KEY).status()["ingress"]["stages"]
            stages |= decode.stages.remote().result()
            after_s, after = _settled(metrics)
            kv_pull_ms = 1000 * (after_s - seconds) / max(1.0, after - transfers)
            rows.append(_row(count, stages, kv_pull_ms, answers))
    publish(
        "handover", rows,
        inputs={"requests": requests, "max_tokens": max_tokens,
                "deployment": deployment.stem, "window": WINDOW},
        seed=seed, out=out,
        notes=f"one prefill and one decode engine; times over the newest {WINDOW} requests; all engines, Ray "
        "and the client share the cores",
    )  # fmt: skip


if __name__ == "__main__":
    run(handover)
