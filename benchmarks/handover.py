"""The hand-over in its parts: from the end of the prefill call to the first decode chunk.

    python -m benchmarks.handover

Real engines behind the real ingress, at one request in flight (idle) and at several (load). The ingress
times its own stages (/eldr/status); Ray Serve and vLLM export what happens inside (metrics, means only):

    place             router: score, one call to the actor
    assign            Serve: until a replica is chosen for the decode call
    engine queue      decode engine: arrival until scheduled; holds the KV transfer
      of it KV pull   NIXL's own transfer time
    first step        decode engine: scheduled until its first token
    transport         the rest: Serve's two hops, tokenizing, the engine's processes, streaming back

Read handover beyond KV (goal below 10 ms idle) and its share of TTFT (goal below 5 % at load).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.common import publish
from benchmarks.rig.client import Answer, allow_open_files, closed_loop, complete, session
from benchmarks.rig.cluster import local_ray
from benchmarks.rig.engines import our_arguments
from benchmarks.rig.prompts import bodies
from benchmarks.streams import wait_ready
from eldr_serve.serving.stages import WINDOW
from offline.cli import run

# part -> (metric without Ray's prefix and colons, factor to ms)
_METRICS = {
    "assign": ("serve_request_router_fulfillment_time_ms", 1.0),
    "engine_queue": ("vllm_request_queue_time_seconds", 1000.0),
    "kv_pull": ("vllm_nixl_xfer_time_seconds", 1000.0),
    "first_step": ("vllm_request_prefill_time_seconds", 1000.0),
    "engine_ttft": ("vllm_time_to_first_token_seconds", 1000.0),
}
_SAMPLE = re.compile(r"^ray_(\w+?)_(sum|count)(\{.*\})? (\S+)$")


def decode_totals(text: str, replicas: list[str]) -> Counter[tuple[str, str]]:
    """(metric, "sum" or "count") -> total over the decode deployment, from a Prometheus page.

    Serve labels its metrics with the deployment, vLLM's have the replica's id.
    """
    marks = ['"Decode:', *(f'"{replica}"' for replica in replicas)]
    wanted = {metric for metric, _ in _METRICS.values()}
    totals: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found and found[1] in wanted and any(mark in (found[3] or "") for mark in marks):
            totals[found[1], found[2]] += float(found[4])
    return totals


def _settled(url: str, replicas: list[str]) -> Counter[tuple[str, str]]:
    """decode_totals once they stand still: processes report every few seconds."""
    totals, still = decode_totals(httpx.get(url, timeout=60).text, replicas), 0
    while still < 6:
        time.sleep(1.0)
        newer = decode_totals(httpx.get(url, timeout=60).text, replicas)
        still, totals = (still + 1 if newer == totals else 0), newer
    return totals


async def _load(url: str, work: list[dict[str, Any]], requests: int, in_flight: int) -> list[Answer]:
    async with session() as http:
        return await closed_loop(
            lambda n: complete(http, url, work[n % len(work)]), requests=requests, in_flight=in_flight
        )


def _parts(before: Counter[tuple[str, str]], after: Counter[tuple[str, str]]) -> dict[str, float]:
    """Mean of each exported part over what happened between two readings, ms; nan if nothing."""
    found = {}
    for part, (metric, factor) in _METRICS.items():
        count = after[metric, "count"] - before[metric, "count"]
        total = after[metric, "sum"] - before[metric, "sum"]
        found[part] = factor * total / count if count else float("nan")
    return found


def _row(
    in_flight: int, stages: dict[str, dict[str, float]], parts: dict[str, float], answers: list[Answer]
) -> dict[str, Any]:
    good = [1000 * a.ttft_s for a in answers if a.error is None and a.ttft_s is not None]
    handover, kv = stages["handover"], np.nan_to_num(parts["kv_pull"])
    inside = np.nansum([parts["assign"], parts["engine_queue"], parts["first_step"]])
    ttft = float(np.mean(good))
    return {
        "in_flight": in_flight,
        "failures": len(answers) - len(good),
        "ttft_mean_ms": ttft,
        "prefill_mean_ms": stages["prefill"]["mean_ms"],
        "handover_mean_ms": handover["mean_ms"],
        "handover_p50_ms": handover["p50_ms"],
        "handover_p99_ms": handover["p99_ms"],
        "place_p50_ms": stages["place"]["p50_ms"],
        "place_mean_ms": stages["place"]["mean_ms"],
        "assign_mean_ms": parts["assign"],
        "engine_queue_mean_ms": parts["engine_queue"],
        "of_it_kv_pull_mean_ms": parts["kv_pull"],
        "first_step_mean_ms": parts["first_step"],
        "engine_ttft_mean_ms": parts["engine_ttft"],
        "transport_mean_ms": stages["first_chunk"]["mean_ms"] - inside,
        "beyond_kv_mean_ms": handover["mean_ms"] - kv,
        "beyond_kv_share_of_ttft_pct": 100 * (handover["mean_ms"] - kv) / ttft,
    }


def handover(
    in_flight: Annotated[str, typer.Option(help="Requests in flight, closed loop; one row each.")] = "1,16",
    requests: Annotated[int, typer.Option(min=WINDOW, help="Requests of each row.")] = 400,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    deployment: Annotated[Path, typer.Option(help="Deployment YAML.")] = Path("deployments/cpu_demo.yaml"),
    decode_replicas: Annotated[int, typer.Option(min=1, help="Decode engines.")] = 2,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("demo_model/weights"),
    prompts: Annotated[Path, typer.Option(help="Prompts, JSONL file or folder.")] = Path(
        "demo_model/prompts"
    ),
    port: Annotated[int, typer.Option(help="HTTP port; the next one is for metrics.")] = 8320,
    seed: Annotated[int, typer.Option(help="Seed of the order of prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; default in benchmarks/results.")] = None,
) -> None:
    """Time the hand-over's parts on real engines, idle and at load."""
    allow_open_files(8192)
    work = bodies(prompts, count=1024, max_tokens=max_tokens, seed=seed)
    rows = []
    with local_ray(http_port=port, metrics_port=port + 1):
        from ray import serve

        from eldr_serve.serving.app import build_app

        serve.run(build_app(our_arguments(deployment, model, decode_replicas)), name="eldr", route_prefix="/")
        url, metrics = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}/metrics"
        wait_ready(url, 120)
        asyncio.run(_load(url, work, 32, 8))
        status = httpx.get(f"{url}/eldr/status", timeout=60).json()
        replicas = [worker["replica"] for worker in status["workers"]]
        for count in map(int, in_flight.split(",")):
            before = _settled(metrics, replicas)
            answers = asyncio.run(_load(url, work, requests, count))
            stages = httpx.get(f"{url}/eldr/status", timeout=60).json()["ingress"]["stages"]
            rows.append(_row(count, stages, _parts(before, _settled(metrics, replicas)), answers))
    publish(
        "handover", rows,
        inputs={"requests": requests, "max_tokens": max_tokens, "decode_replicas": decode_replicas,
                "deployment": deployment.stem, "window": WINDOW},
        seed=seed, out=out,
        notes=f"ingress stages over the newest {WINDOW} requests; parts inside Serve and vLLM are means "
        "over all of the row; all engines, Ray and the client share the cores",
    )  # fmt: skip


if __name__ == "__main__":
    run(handover)
