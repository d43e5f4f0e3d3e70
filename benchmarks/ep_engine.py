"""Expert parallelism on a running engine: replica choice, placement, migration through a shift of domains.

    python -m benchmarks.ep_engine ep_choice --prompts DIR
    python -m benchmarks.ep_engine ep_shift --prompts DIR

Ranks are processes of this machine (docs/expert_parallel_engines.md), the model is the demo model with wide
experts and a head more. Placements are made of one half of the captured requests, batches are of the other
half. Arms take turns in random order on one engine; a step's time is its wall time, the decision included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.harness import options
from benchmarks.harness.capture import Captured, captured
from benchmarks.harness.ep_engine import Decoded, EpEngine
from benchmarks.harness.replay import widened
from eldr_serve.artifacts import ExpertPlacement
from eldr_serve.expert_placement import Topology
from offline.placement.affinity import co_activation
from offline.placement.cost import LayerCost
from offline.placement.director import director_placement
from offline.placement.eplb import eplb_placement
from offline.placement.grace import grace_placement
from studies.prediction import expected_workload
from tools.cli import BadInput, run
from tools.journal import Journal
from tools.results import RESULTS, publish
from tools.stats import paired_change_percent

Ints = NDArray[np.int64]
HEADS = 4  # which 2 and 4 ranks divide
_PROMPT = 65  # tokens of a prompt, at most: what is measured is decode
_SKIPPED = 2  # decode steps after the prefill, in no figure
Ranks = Annotated[int, typer.Option(min=2, help="Ranks of the engine; each wants a core.")]
Tokens = Annotated[int, typer.Option(min=8, help="Tokens generated a request.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that every arm decodes each batch.")]


def ep_choice(
    prompts: options.Prompts = options.PROMPTS,
    batch: options.Batch = "8,32,128",
    replication: Annotated[str, typer.Option(help="Slots over experts, with commas.")] = "1,1.25,1.5,2",
    ranks: Ranks = 2,
    tokens: Tokens = 32,
    rounds: Rounds = 5,
    intermediate: options.Intermediate = 1024,
    requests: options.Captured = 640,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare placements and choices of replicas, by batch and replication."""
    batches = [int(size) for size in batch.split(",")]
    data = captured(prompts, work, requests=requests, seed=seed)
    model = widened(intermediate, work, heads=HEADS)
    fit, rest = data.split("all", 0.5, seed)
    if max(batches) > len(rest):
        raise BadInput(
            f"a batch of {max(batches)} needs as many held-out requests, and there are {len(rest)}"
        )
    settings = {
        "prompts": str(prompts), "batch": batch, "replication": replication, "ranks": ranks,
        "tokens": tokens, "rounds": rounds, "intermediate": intermediate, "requests": requests, "seed": seed,
    }  # fmt: skip
    journal = Journal(work / "ep_choice.jsonl", settings)
    experts = data.trace.decode_counts.shape[2]
    rows: list[dict[str, Any]] = []
    for ratio in map(float, replication.split(",")):
        slots = round(experts * ratio / ranks) * ranks
        arms = dict(_arms(data, fit, slots, ranks, seed))
        keys = {
            (size, turn, name): f"{ratio}/{size}/{turn}/{name}"
            for turn in range(rounds) for size in batches for name in arms
        }  # fmt: skip
        if any(journal.get(key) is None for key in keys.values()):
            with EpEngine(
                model, ranks=ranks, redundant=slots - experts, moves_a_slice=64, max_batch=max(batches)
            ) as engine:
                rng = np.random.default_rng([seed, slots])
                for turn in range(rounds):
                    for size in batches:
                        chosen = [data.tokens[n][-_PROMPT:] for n in rng.choice(rest, size, replace=False)]
                        for name in rng.permutation(list(arms)).tolist():
                            key = keys[size, turn, name]
                            if journal.get(key) is None:
                                engine.place(*arms[name])
                                journal.put(key, _summary(engine.decode(chosen, tokens)))
        for size in batches:
            measured = {
                name: [journal.get(keys[size, turn, name]) for turn in range(rounds)] for name in arms
            }
            rows += _choice_rows(measured, size, slots / experts, seed)
    publish(
        "ep_choice", rows, inputs=settings, seed=seed, out=out,
        notes="one engine of `ranks` ranks on this machine's cores; decode steps of whole batches, greedy; "
        "means over rounds of medians over steps; changes against `linear, even` where there are no "
        "replicas and against `eplb, even` at the same replication, 95 % intervals by bootstrap over rounds; "
        "away_pct: pairs served off the rank that the token would live on",
    )  # fmt: skip
    journal.remove()


def ep_shift(
    prompts: options.Prompts = options.PROMPTS,
    batch: Annotated[int, typer.Option(min=4, help="Requests of a window, which decode together.")] = 32,
    windows: Annotated[int, typer.Option(min=4, help="Windows; the domain shifts in the middle.")] = 12,
    domains: Annotated[str, typer.Option(help="Domain before and after, with a comma.")] = "code,medical",
    replication: Annotated[float, typer.Option(min=1, help="Slots over experts.")] = 1.25,
    choice: Annotated[str, typer.Option(help="Replica choice of all arms.")] = "even",
    ranks: Ranks = 2,
    tokens: Tokens = 48,
    moves_a_slice: Annotated[int, typer.Option(min=1, help="Experts that move between two steps.")] = 8,
    cost: Annotated[Path, typer.Option(help="LayerCost (JSON) that DIRECTOR plans by.")] = (
        RESULTS / "layer_cost_cpu.json"
    ),
    intermediate: options.Intermediate = 1024,
    requests: options.Captured = 640,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Follow a shift of domains by an offline, a reactive (EPLB) and a proactive (DIRECTOR) placement."""
    data = captured(prompts, work, requests=requests, seed=seed)
    model = widened(intermediate, work, heads=HEADS)
    fit, rest = data.split("all", 0.5, seed)
    settings = {
        "prompts": str(prompts), "batch": batch, "windows": windows, "domains": domains,
        "replication": replication, "choice": choice, "ranks": ranks, "tokens": tokens,
        "moves_a_slice": moves_a_slice, "cost": str(cost), "intermediate": intermediate,
        "requests": requests, "seed": seed,
    }  # fmt: skip
    journal = Journal(work / "ep_shift.jsonl", settings)
    traffic = list(_shifting(data, rest, domains.split(","), windows, batch, seed))
    experts = data.trace.decode_counts.shape[2]
    slots, topology = round(experts * replication / ranks) * ranks, Topology(ranks=ranks)
    layer_cost = LayerCost.load(cost)
    load = data.trace.decode_counts[fit].sum(axis=0)
    start = eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks)

    def reactive(window: int, held: Ints, seen: Ints | None) -> Ints | None:
        return None if seen is None else eplb_placement(seen, slots, groups=1, nodes=1, ranks=ranks)

    def proactive(window: int, held: Ints, seen: Ints | None) -> Ints | None:
        coming = traffic[window]
        expected = expected_workload(data.trace.prefill_counts[coming], data.trace.prompt_tokens[coming], 1)
        return director_placement(
            expected, topology=topology, slots=slots // ranks, cost=layer_cost, start=held, seed=seed
        )[0]

    plans: dict[str, Callable[[int, Ints, Ints | None], Ints | None]] = {
        "offline": lambda window, held, seen: None, "reactive": reactive, "proactive": proactive,
    }  # fmt: skip
    for name, plan in plans.items():
        if journal.get(name) is not None:
            continue
        with EpEngine(
            model, ranks=ranks, redundant=slots - experts, moves_a_slice=moves_a_slice, max_batch=batch
        ) as engine:
            engine.place(_placement(start, ranks, experts, "eplb"), choice)
            found, held, seen = [], start, None
            for window, coming in enumerate(traffic):
                target = plan(window, held, seen)
                decoded = engine.decode([data.tokens[n][-_PROMPT:] for n in coming], tokens, target)
                found.append(
                    _summary(decoded)
                    | {"migration_ms": 1e3 * decoded.move_s, "experts_moved": decoded.experts_moved}
                )
                held, seen = decoded.placement, decoded.routed
        journal.put(name, found)
    rows = [
        {"placement": name, "window": window, "domain": domains.split(",")[2 * window // windows]} | summary
        for name in plans
        for window, summary in enumerate(journal.get(name))
    ]
    publish(
        "ep_shift", rows, inputs=settings, seed=seed, out=out,
        notes="one engine an arm, `ranks` ranks on this machine's cores; a window's requests decode "
        "together; step times are without migration_ms, which the window's slices took between its steps; "
        "offline: EPLB on the other half of all domains; reactive: EPLB on the window before; proactive: "
        "DIRECTOR on the window's own prefill counts",
    )  # fmt: skip
    journal.remove()


def _arms(
    data: Captured, fit: Ints, slots: int, ranks: int, seed: int
) -> Iterator[tuple[str, tuple[ExpertPlacement, str]]]:
    """(name, (placement, choice of replicas)); the first is what the others are held against."""
    load = data.trace.decode_counts[fit].sum(axis=0)
    layers, experts = load.shape
    affinity = co_activation(np.concatenate([data.routes(int(n)) for n in fit]), experts)
    grace = grace_placement(affinity, load, slots, Topology(ranks=ranks), seed=seed)[0]
    eplb = eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks)
    if slots == experts:
        rows = {
            "linear, even": np.tile(np.arange(experts), (layers, 1)),
            "eplb, even": eplb,
            "grace, even": grace,
        }
    else:
        rows = {"eplb, even": eplb, "eplb, metro": eplb, "grace, metro": grace}
        rows |= {"grace, local": grace, "grace, weighted": grace}
    for name, placed in rows.items():
        method, rule = name.split(", ")
        yield name, (_placement(placed, ranks, experts, method), rule)


def _placement(rows: Ints, ranks: int, experts: int, method: str) -> ExpertPlacement:
    return ExpertPlacement(np.asarray(rows), ranks, experts, model="eldr-demo", method=method)


def _shifting(
    data: Captured, rest: Ints, domains: list[str], windows: int, batch: int, seed: int
) -> Iterator[Ints]:
    """Indices of each window's requests: of the first domain, then of the second."""
    if len(domains) != 2:
        raise BadInput("--domains takes two, with a comma")
    rng = np.random.default_rng([seed, 1])
    for window in range(windows):
        domain = domains[2 * window // windows]
        there = rest[np.asarray(data.trace.domains)[rest] == domain]
        if len(there) < batch:
            raise BadInput(f"a batch of {batch} needs as many held-out {domain!r} requests, not {len(there)}")
        yield rng.choice(there, batch, replace=False)


def _summary(decoded: Decoded) -> dict[str, float]:
    """A batch's figures: medians over steps for times, means over steps and layers else."""
    log = decoded.log[:, _SKIPPED:]
    activated, pairs, home = log[..., 1], log[..., 2], log[..., 3]
    return {
        "step_p50_ms": 1e3 * float(np.median(decoded.seconds[_SKIPPED:])),
        "step_mean_ms": 1e3 * float(np.mean(decoded.seconds[_SKIPPED:])),
        "worst_rank_experts": float(activated.max(axis=0).mean()),
        "experts_all_ranks": float(activated.sum(axis=0).mean()),
        "worst_rank_pairs": float(pairs.max(axis=0).mean()),
        "away_pct": 100 * (1 - float(home.sum() / pairs.sum())),
    }


def _choice_rows(
    measured: dict[str, list[dict[str, float]]], batch: int, replication: float, seed: int
) -> Iterator[dict[str, Any]]:
    base = np.array([one["step_p50_ms"] for one in next(iter(measured.values()))])
    for name, found in measured.items():
        placement, choice = name.split(", ")
        mine = np.array([one["step_p50_ms"] for one in found])
        change = paired_change_percent(mine, base, np.mean, seed=seed) if len(mine) > 1 else (None,) * 3
        yield {
            "replication": replication, "batch_size": batch, "placement": placement, "choice": choice,
            **{key: float(np.mean([one[key] for one in found])) for key in found[0]},
            **dict(zip(("step_change_pct", "step_low_pct", "step_high_pct"), change, strict=True)),
        }  # fmt: skip


if __name__ == "__main__":
    run(ep_choice, ep_shift)
