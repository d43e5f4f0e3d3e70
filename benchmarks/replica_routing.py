"""Activated experts on the worst rank: METRO's greedy, the optimum, EPLB's even spread (METRO, Figure 8).

    python -m benchmarks.replica_routing --prompts DIR [--traces gptoss20b_decode_traces.jsonl.gz]

Experts are replicated and placed by EPLB on one half of the prompts' decode routes; batches are drawn
from the other half, each request at a random step. `--traces` adds real GPT-OSS-20B routes. The time of
the choice is measured by `benchmarks.metro_decide`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rig.capture import captured
from benchmarks.rig.options import (
    PROMPTS,
    WORK,
    CapturedOption,
    OutOption,
    PromptsOption,
    SeedOption,
    WorkOption,
)
from eldr_serve.experts import MetroPlan, eplb_placement, hosts_of, route_even, route_optimal
from offline.cli import run
from offline.gptoss import read_records
from offline.plots import bars
from offline.results import publish


def replica_routing(
    prompts: PromptsOption = PROMPTS,
    traces: Annotated[Path | None, typer.Option(help="GPT-OSS-20B decode routes, JSON lines, gzip.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="EP ranks.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Requests of a batch, all ranks together.")] = 32,
    batches: Annotated[int, typer.Option(min=5, help="Batches drawn for each row.")] = 100,
    requests: CapturedOption = 2400,
    work: WorkOption = WORK,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Compare ways to choose replicas on real routes."""
    data = captured(prompts, work, requests=requests, seed=seed)
    sources = {"demo model": [data.routes(i) for i in range(len(data.trace.ids))]}
    if traces is not None:
        sources["gpt-oss-20b"] = [routes for _, routes in read_records(traces) if len(routes) >= 48]
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for model, routes in sources.items():
        experts = 1 + max(int(r.max()) for r in routes)
        order = rng.permutation(len(routes))
        fit, test = order[: len(order) // 2], order[len(order) // 2 :]
        load = sum(_counts(routes[i], experts) for i in fit)
        for ratio in (1.0, 1.25, 1.5, 2.0):
            slots = round(experts * ratio / ranks) * ranks
            placed = eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks)
            hosts = hosts_of(placed, experts, ranks)
            rows.append(_measured(model, routes, test, hosts, slots / experts, batch, batches, rng))
    path = publish(
        "replica_routing", rows, seed=seed, out=out,
        inputs={"ranks": ranks, "batch": batch, "batches": batches},
        notes="mean over layers and batches of the most experts that one rank activates",
    )  # fmt: skip
    bars(
        [row | {"workload": row["model"]} for row in rows],
        "replication",
        "even_above_optimum_pct",
        path.with_suffix(".png"),
    )


def _measured(
    model: str,
    routes: list[NDArray[Any]],
    test: NDArray[Any],
    hosts: NDArray[np.bool_],
    ratio: float,
    batch: int,
    batches: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    worst: dict[str, list[float]] = {"greedy": [], "optimum": [], "even": []}
    plan = MetroPlan.of(hosts)
    for _ in range(batches):
        chosen = [routes[i] for i in rng.choice(test, batch, replace=batch > len(test))]
        tokens = sum(_counts(r[[rng.integers(len(r))]], hosts.shape[1]) for r in chosen)
        worst["greedy"].append(_worst(plan.route(tokens), hosts.shape[2]))
        worst["optimum"].append(_worst(route_optimal(tokens, hosts), hosts.shape[2]))
        worst["even"].append(float((route_even(tokens, hosts) > 0).sum(axis=1).max(axis=1).mean()))
    mean = {name: float(np.mean(values)) for name, values in worst.items()}
    return {
        "model": model,
        "replication": ratio,
        "batch_size": batch,
        **mean,
        "greedy_above_optimum_pct": 100 * (mean["greedy"] / mean["optimum"] - 1),
        "even_above_optimum_pct": 100 * (mean["even"] / mean["optimum"] - 1),
    }


def _worst(rank: NDArray[np.int64], ranks: int) -> float:
    """Mean over layers of the most experts on a rank."""
    activated = (rank[:, :, None] == np.arange(ranks)).sum(axis=1)
    return float(activated.max(axis=1).mean())


def _counts(routes: NDArray[Any], experts: int) -> NDArray[np.int64]:
    """int[L, E] of routes[T, L, k]."""
    layers = routes.shape[1]
    cells = np.arange(layers)[None, :, None] * experts + routes.astype(np.int64)
    return np.bincount(cells.reshape(-1), minlength=layers * experts).reshape(layers, experts)


if __name__ == "__main__":
    run(replica_routing)
