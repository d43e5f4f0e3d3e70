"""Compare two dispatches of an MoE layer on two simulated nodes: one copy per rank, or one per node.

    python -m benchmarks.engine.ep_nodes --prompts DIR

Four ranks run as processes that share this machine's cores. They compute the demo model's experts, which EPLB
has placed without replicas, for its real routes. **The nodes are simulated**: after an all-to-all, a rank
sleeps as long as its bytes to or from the other node would take. With GRACE-MoE's dispatch (section 5.1), a
token is sent once to the other node and forwarded there. So fewer bytes pass between the nodes, but each
direction has one more all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.engine.ep_layer import draw_job, slowest_rank
from benchmarks.lib import options
from benchmarks.lib.captured_routes import load_or_capture
from benchmarks.lib.ep.network import TRAFFIC, Network
from benchmarks.lib.ep.ranks import run_on_ranks
from benchmarks.lib.ep.timing import ONCE_A_NODE, LayerArm, LayerRun, RankJob, time_layers_together
from eldr_serve.commands.run import run
from examples.demo_model import WEIGHTS
from loadgen.results import publish
from loadgen.statistics import paired_change_percent

BENCHMARKS = {"ep_nodes": "default"}
_NODES, _RANKS = 2, 4
_ARMS = tuple(LayerArm(1.0, "even", dispatch) for dispatch in ("all-to-all", ONCE_A_NODE))
_NOTES = (
    "Two nodes of two ranks each are simulated on one machine, with real routes and random hidden states. "
    "Messages and bytes are those of all ranks in one layer, to the experts and back, including the messages "
    "with the numbers of tokens. Near messages stay within a node, far messages pass between the nodes. "
    "Times are those of the slowest rank, as means over batches and layers. Changes are against the "
    "all-to-all of the same batch size and bandwidth, with 95 % intervals by bootstrap over batches."
)


def ep_nodes(
    prompts: options.Prompts = options.PROMPTS,
    batch: Annotated[str, typer.Option(help="Tokens of all ranks' batch, comma-separated.")] = "64,512,4096",
    bandwidth: Annotated[str, typer.Option(help="MB/s of a rank's link, comma-separated.")] = "250,25",
    delay_us: Annotated[float, typer.Option(min=0, help="Delay of messages between nodes, us.")] = 50.0,
    batches: Annotated[int, typer.Option(min=4, help="Batches of each size.")] = 8,
    rounds: Annotated[int, typer.Option(min=3, help="Timed calls of each point.")] = 5,
    requests: options.CapturedRequests = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Count messages and bytes within and between two simulated nodes, and time the layer's stages."""
    sizes, bandwidths = options.numbers("--batch", batch), options.numbers("--bandwidth", bandwidth)
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    jobs = []
    for tokens in sizes:
        job = draw_job(data, WEIGHTS, _RANKS, tokens, batches, _ARMS, rounds, seed)
        jobs += [replace(job, network=Network(_NODES, 1e-6 * delay_us, 1e6 * b)) for b in bandwidths]
    runs_by_job = zip(*run_on_ranks(_RANKS, _run_jobs, jobs), strict=True)
    rows = [row for job, runs in zip(jobs, runs_by_job, strict=True) for row in _make_rows(job, runs)]
    inputs = {"batches": batches, "rounds": rounds, "delay_us": delay_us, "nodes": _NODES, "ranks": _RANKS}
    publish("ep_nodes", rows, inputs=inputs, seed=seed, out=out, notes=_NOTES)


def _run_jobs(rank: int, jobs: list[RankJob]) -> list[LayerRun]:
    return [time_layers_together(rank, job) for job in jobs]


def _make_rows(job: RankJob, runs: Sequence[LayerRun]) -> list[dict[str, Any]]:
    """Return a row for each dispatch from the runs of all ranks."""
    times = slowest_rank([layer_run.seconds for layer_run in runs])
    layer_ms = {arm: 1e3 * stages["layer"].mean(axis=1) for arm, stages in times.items()}  # [B]
    rows = []
    for arm in job.arms:
        traffic = np.sum([layer_run.traffic[arm] for layer_run in runs], axis=0).mean(axis=(0, 1))
        change = paired_change_percent(layer_ms[arm], layer_ms[job.arms[0]], np.mean, seed=job.seed)
        row: dict[str, Any] = {
            "batch_size": job.routes.shape[2],
            "bandwidth_mb_s": round(1e-6 * job.network.bytes_per_s),
            "dispatch": arm.dispatch,
        }
        row |= zip(TRAFFIC, traffic.tolist(), strict=True)
        for stage in ("dispatch", "experts", "combine", "layer"):
            row[f"{stage}_ms"] = 1e3 * float(times[arm][stage].mean())
        row |= zip(("layer_change_pct", "layer_low_pct", "layer_high_pct"), change, strict=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    run(ep_nodes)
