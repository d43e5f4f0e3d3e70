"""Measure an MoE layer under expert parallelism: even spread against METRO's choice of replicas.

    python -m benchmarks.engine.ep_layer --prompts DIR --cost-out layer_cost.json

The experts are those of the widened demo model, and the routes are its real ones for real prompts. Placements
are EPLB's for one half of the requests, and batches come from the other half. Two ranks run as processes with
a core (or a GPU) each. More ranks than cores would wait for each other. Their shares are therefore timed one
by one, and the slowest share is the layer's time without messages. A rank's time by activated experts and
tokens, and the messages' time by bytes, are measured first. They give the layer cost that `--cost-out`
writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import CapturedRoutes, load_or_capture
from benchmarks.lib.ep.ranks import device, run_on_ranks
from benchmarks.lib.ep.timing import (
    STAGES,
    LayerArm,
    RankJob,
    time_layers_together,
    time_messages,
    time_rank_alone,
    time_shares_alone,
)
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.arrays import Floats
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.plots import lines
from loadgen.results import publish
from loadgen.statistics import paired_change_percent
from offline.expert_placement.cost import LayerCost, LayerFit, LayerWork
from offline.expert_placement.packed_placements import eplb_placement

BENCHMARKS = {"ep_layer": "default"}
RATIOS = (1.0, 1.25, 1.5, 2.0)  # slots / experts
ARMS = (("even", "all-gather"), ("metro", "all-gather"))
_MANY_RANKS, _MANY_BATCH = 8, 64  # ranks that are timed one by one, and tokens of a batch for all of them
_NOTES = (
    "Experts and routes are real, hidden states random. Times are the slowest rank's, as means over batches "
    "and layers. Changes are against the even spread by all-gather at the same replication, with 95 % "
    "intervals by bootstrap over batches. The route stage runs in Python. Ranks that are timed one by one "
    "compute their experts and send no messages."
)


def ep_layer(
    prompts: options.Prompts = options.PROMPTS,
    batch: Annotated[int, typer.Option(min=2, help="Tokens of a batch for two ranks together.")] = 32,
    batches: Annotated[int, typer.Option(min=4, help="Batches drawn from the held-out requests.")] = 24,
    rounds: Annotated[int, typer.Option(min=3, help="Timed calls of each point.")] = 5,
    intermediate: options.Intermediate = 1024,
    requests: options.CapturedRequests = 2400,
    work: options.Work = options.WORK,
    cost_out: Annotated[Path | None, typer.Option(help="JSON of the fitted layer cost to write.")] = None,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time a layer's stages on real ranks, by replication and choice of replicas. Fit its cost."""
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    model = widen_model(intermediate, work)

    def make_job(ranks: int, tokens: int, arms: Sequence[tuple[str, str]]) -> RankJob:
        arms_with_ratio = tuple(LayerArm(ratio, *arm) for ratio in RATIOS for arm in arms)
        return draw_job(data, model, ranks, tokens, batches, arms_with_ratio, rounds, seed)

    two_ranks = make_job(2, batch, [*ARMS, ("even", "all-to-all")])
    many_ranks = make_job(_MANY_RANKS, _MANY_BATCH, ARMS)
    points = run_on_ranks(1, time_rank_alone, two_ranks)[0]
    message_rows = run_on_ranks(2, time_messages, rounds)[0]
    shares = run_on_ranks(1, time_shares_alone, many_ranks)[0]  # [B, L, rounds, G] by arm
    times_alone = {arm: {"experts": np.median(s, axis=2).max(axis=-1)} for arm, s in shares.items()}
    times_together = slowest_rank([part.seconds for part in run_on_ranks(2, time_layers_together, two_ranks)])

    alone_work = _work(points)
    compute = LayerCost.fit_ranks(alone_work.activated, alone_work.tokens, [point["s"] for point in points])
    source = f"benchmarks.engine.ep_layer on {device()}, experts of {intermediate} neurons; held out: the "
    source += f"slowest of {_MANY_RANKS} ranks on real batches; no second node: a far byte costs as much as "
    source += "a near one"
    layer_fit = _fit(compute, many_ranks, times_alone, measurements=len(points), source=source)
    cost = _add_messages(compute, message_rows).model_copy(update={"fit": layer_fit})
    if cost_out is not None:
        cost.save(cost_out)
    inputs = {
        "batch": batch,
        "many_batch": _MANY_BATCH,
        "batches": batches,
        "rounds": rounds,
        "intermediate": intermediate,
        "layer_cost": cost.model_dump(),
    }
    rows = _rows(f"2 ranks together, {device()}", two_ranks, times_together, compute, seed)
    rows += _rows(f"{_MANY_RANKS} ranks one by one", many_ranks, times_alone, compute, seed)
    path = publish("ep_layer", rows, inputs=inputs, seed=seed, out=out, notes=_NOTES)
    gathered = [row | {"workload": row["how"]} for row in rows if row["dispatch"] == "all-gather"]
    lines(gathered, "replication", ["experts_ms"], path.with_suffix(".png"), by="routing")
    _publish_parts(path, _rank_rows(points, compute), message_rows, inputs, seed)


def _publish_parts(
    path: Path,
    rank_rows: list[dict[str, Any]],
    message_rows: list[dict[str, Any]],
    inputs: dict[str, Any],
    seed: int,
) -> None:
    """Publish the time of one rank's experts and of messages, beside the file of the layers."""
    by_rank = path.with_name(f"{path.stem}_rank.json")
    publish(
        "ep_layer_rank",
        rank_rows,
        inputs=inputs,
        seed=seed,
        out=by_rank,
        notes="Time of one rank's experts, by the number of activated experts and of tokens per expert.",
    )
    lines(
        rank_rows,
        "activated_experts",
        ["latency_p50_ms"],
        by_rank.with_suffix(".png"),
        by="tokens_per_expert",
    )
    publish(
        "ep_layer_messages",
        message_rows,
        inputs=inputs,
        seed=seed,
        out=path.with_name(f"{path.stem}_messages.json"),
        notes="Two ranks exchange messages by an all-gather and a reduce-scatter, and by two all-to-alls. "
        "The bytes are those that reach a rank in one direction.",
    )


def _fit(
    compute: LayerCost,
    job: RankJob,
    times_alone: dict[LayerArm, dict[str, Floats]],
    *,
    measurements: int,
    source: str,
) -> LayerFit:
    """Return how far the cost is from the slowest rank's measured time on real batches."""
    error = np.concatenate(
        [
            (_predict_experts_s(compute, job, arm) / times_alone[arm]["experts"] - 1).ravel()
            for arm in times_alone
        ]
    )
    return LayerFit(
        measurements=measurements,
        source=source,
        held_out_mean_relative_error=float(error.mean()),
        held_out_median_relative_error=float(np.median(np.abs(error))),
    )


def _rank_rows(points: list[dict[str, Any]], compute: LayerCost) -> list[dict[str, Any]]:
    """Return a row for each measurement of one rank alone."""
    return [
        {
            "activated_experts": point["activated"],
            "tokens_per_expert": point["pairs"] // point["activated"],
            "latency_p50_ms": 1e3 * point["s"],
            "predicted_ms": 1e3 * float(predicted),
        }
        for point, predicted in zip(points, compute.fixed_s + compute.rank_s(_work(points)), strict=True)
    ]


def draw_job(
    data: CapturedRoutes,
    model: Path,
    ranks: int,
    tokens: int,
    batches: int,
    arms: tuple[LayerArm, ...],
    rounds: int,
    seed: int,
) -> RankJob:
    """Draw batches of tokens from one half of the requests. Place experts by EPLB for the other half."""
    if tokens % ranks:
        raise UserInputError(f"a batch of {tokens} tokens does not divide by {ranks} ranks")
    fit, rest = data.split("all", 0.5, seed)
    rng = np.random.default_rng([seed, ranks])
    load = data.trace.decode_counts[fit].sum(axis=0)
    experts = load.shape[1]
    placements = {
        ratio: eplb_placement(load, round(experts * ratio / ranks) * ranks, groups=1, nodes=1, ranks=ranks)
        for ratio in sorted({arm.replication for arm in arms})
    }
    steps = [
        np.stack([routes[rng.integers(len(routes))] for routes in map(data.routes, drawn)])
        for drawn in (rng.choice(rest, tokens, replace=tokens > len(rest)) for _ in range(batches))
    ]
    routes = np.stack(steps).swapaxes(1, 2).astype(np.int64)
    return RankJob(model, ranks, experts, placements, routes, arms, rounds, seed)


def slowest_rank(by_rank: list[dict[LayerArm, Floats]]) -> dict[LayerArm, dict[str, Floats]]:
    """Return the slowest rank's median over rounds by arm and stage, [B, L]. `layer` sums a rank's stages."""
    timed = {}
    for arm in by_rank[0]:
        parts = np.stack([part[arm] for part in by_rank])  # [G, B, L, rounds, stage]
        stages = np.median(parts.max(axis=0), axis=2)
        timed[arm] = {stage: stages[..., n] for n, stage in enumerate(STAGES)}
        timed[arm]["layer"] = np.median(parts.sum(axis=-1).max(axis=0), axis=2)
    return timed


def _predict_experts_s(compute: LayerCost, job: RankJob, arm: LayerArm) -> Floats:
    """Return the predicted time [B, L] of the slowest rank's experts in seconds."""
    return compute.layer_s(LayerWork.from_gathered(job.tokens_by_rank(arm)))


def _work(points: list[dict[str, Any]]) -> LayerWork:
    """Return the work of N ranks, each alone."""
    activated, pairs = (np.array([point[key] for point in points], float) for key in ("activated", "pairs"))
    return LayerWork(activated, pairs, np.zeros_like(pairs), np.zeros_like(pairs))


def _add_messages(compute: LayerCost, message_rows: list[dict[str, Any]]) -> LayerCost:
    """Add an empty all-gather and reduce-scatter to every layer, and an all-to-all's cost per byte.

    This cost includes the way back, since a `LayerWork` counts only the bytes of the dispatch.
    """
    size = np.array([row["message_bytes"] for row in message_rows], np.float64)
    gather, exchange = (
        LayerCost.fit_ranks(np.zeros_like(size), size, 1e-3 * np.array([row[key] for row in message_rows]))
        for key in ("all_gather_reduce_scatter_p50_ms", "all_to_all_twice_p50_ms")
    )
    byte_s = dict.fromkeys(("near_byte_s", "far_byte_s"), exchange.per_token_s)
    return compute.model_copy(update={"fixed_s": compute.fixed_s + gather.fixed_s, **byte_s})


def _rows(
    how: str, job: RankJob, timed: dict[LayerArm, dict[str, Floats]], compute: LayerCost, seed: int
) -> list[dict[str, Any]]:
    by_batch = {
        arm: {stage: 1e3 * s.mean(axis=1) for stage, s in stages.items()} for arm, stages in timed.items()
    }
    rows = []
    for arm, stages in by_batch.items():
        tokens_by_rank = job.tokens_by_rank(arm)
        row: dict[str, Any] = {
            "how": how,
            "batch_size": job.routes.shape[2],
            "replication": arm.replication,
            "routing": arm.routing,
            "dispatch": arm.dispatch,
            "worst_rank_experts": float((tokens_by_rank > 0).sum(axis=2).max(axis=-1).mean()),
            "worst_rank_tokens": float(tokens_by_rank.sum(axis=2).max(axis=-1).mean()),
            "predicted_experts_ms": 1e3 * float(_predict_experts_s(compute, job, arm).mean()),
        }
        for stage in ("experts", "layer"):
            change: Sequence[float | None] = [None] * 3
            if stage in stages:
                base = arm._replace(routing="even", dispatch="all-gather")
                times, base_times = stages[stage], by_batch[base][stage]
                change = paired_change_percent(times, base_times, np.mean, seed=seed)
            row[f"{stage}_ms"] = float(stages[stage].mean()) if stage in stages else None
            row |= zip((f"{stage}_{end}_pct" for end in ("change", "low", "high")), change, strict=True)
        for stage in ("dispatch", "gate", "route", "combine"):
            row[f"{stage}_ms"] = float(stages[stage].mean()) if stage in stages else None
        rows.append(row)
    return rows


if __name__ == "__main__":
    run(ep_layer)
