"""Measure expert parallelism on a running engine: replica choice, placement, migration in a shift of domains.

    python -m benchmarks.engine.ep_engine ep_choice --prompts DIR
    python -m benchmarks.engine.ep_engine ep_shift --prompts DIR

Ranks are processes of this machine (docs/expert_parallel_engines.md). With --data-parallel each rank has
requests of its own, and the results are `ep_choice_dp` and `ep_shift_dp`. The model is the demo model with
wide experts and an extra head, in 32 bits, so that all arms must give equal answers. Placements are fitted to
one half of the captured requests. Batches come from the other half. All arms take turns on one engine with
the slots of the largest replication. An arm with fewer replicas leaves slots empty. A step's time is
wall-clock time, including the choice of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import GROUPS, CapturedRoutes, load_or_capture
from benchmarks.lib.ep.batches import choose_homes, draw_disjoint_batches, summarise_batch
from benchmarks.lib.ep.engine import EpEngine
from benchmarks.lib.ep.engine_options import (
    MAX_PROMPT_TOKENS,
    NUM_HEADS,
    DataParallel,
    Minutes,
    MovesPerSlice,
    Ranks,
    Rounds,
    Tokens,
    resolve_ranks,
)
from benchmarks.lib.ep.planners import PlanMigration, migration_planners, state_bytes
from benchmarks.lib.ep.rows import BASE, BY_EXPERTS, EVEN, choice_rows, shift_rows
from benchmarks.lib.ep.turns import measure_in_turns
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.arrays import Floats, Ints
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from loadgen.journal import Journal
from loadgen.results import RESULTS, column_notes, publish
from offline.expert_placement.co_activation import co_activation
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.grace import grace_placement
from offline.expert_placement.packed_placements import eplb_placement

BENCHMARKS = {"ep_choice": "all", "ep_shift": "all"}
_NOT_INPUTS = ("data_parallel", "minutes", "work", "out")  # --data-parallel sets the ranks
_CHOICE_NOTES = column_notes(
    "One engine of `ranks` ranks, in 32 bits, decodes whole batches greedily on this machine's cores. "
    "Figures are medians over rounds of medians over steps, with 95 % bootstrap intervals over rounds. "
    "The base arm is `linear, none` without replicas.",
    {
        "change_pct": "Change of the step time against the base arm, paired by round.",
        "even_pct": "Change of the step time against `eplb, even` at the same replication, paired by round.",
        "homes": "Data-parallel ranks have equally many requests of a batch: in the batch's order (blocks), "
        "or where most of their prompts' experts are. Tensor-parallel ranks have no requests, so equal "
        "blocks of tokens stand in for them.",
        "pairs_off_home_pct": "Share of (token, expert) pairs served by another rank than the token's home.",
        "other_ranks_per_token": "Mean number of ranks that serve a token in a layer beside its home rank.",
        "moved_vs_base_pct": "Change of `other_ranks_per_token` against the base arm.",
        "blocks_pct, moved_vs_blocks_pct": "Changes of the step time and of `other_ranks_per_token` against "
        "the same arm in equal blocks.",
        "requests_equal_pct": "Share of answers whose tokens all equal those of the base arm.",
        "paper_experts_pct, paper_step_pct": "METRO's figures on its GPUs: of even spread against no "
        "replicas, and of METRO's choice against even spread.",
        "paper_moved_pct": "GRACE-MoE's groups against linear blocks, within a node, for three models.",
    },
)
_SHIFT_NOTES = column_notes(
    "One engine of `ranks` ranks, in 32 bits, runs on this machine's cores. The requests of a window decode "
    "together, and windows share no request. The arms take turns. Each begins with the offline placement. "
    "Figures are medians over rounds and windows of medians over a window's steps, with 95 % bootstrap "
    "intervals. Ranks of a new placement are renamed so that the fewest experts move, except in "
    "the arm by rank.",
    {
        "offline": "Placement of EPLB for the other half of all requests.",
        "reactive": "Placement of EPLB for the previous window.",
        "proactive": "Placement of DIRECTOR for the window's own prefill counts by rank: the better of LP "
        "with rounding and of a repair of the previous placement.",
        "proactive, by rank": "`proactive` with the price of sending tokens between data-parallel ranks, in "
        "the paper's cost. The engine gathers all tokens on all ranks, so `step_ms` lacks what it saves.",
        "other_ranks_per_token": "Mean number of ranks that serve a token in a layer beside its home rank.",
        "step_ms": "Time of a step, without the slices of a migration between steps and without `plan_ms`.",
        "with_moves_ms": "`step_ms` plus the migration's time per step of the window, without `plan_ms`.",
        "paper_pct": "DIRECTOR's change on 32 GPUs.",
    },
)


@dataclass(frozen=True)
class PlacedArm:
    """One setting: a placement int[L, P] (-1: an empty slot) and a rule that chooses replicas.

    Data-parallel ranks get a batch's prompts in equal blocks, or by the prompts' experts.
    """

    placement: Ints
    rule: str
    by_experts: bool = False


def ep_choice(
    prompts: options.Prompts = options.PROMPTS,
    batch: options.Batch = "8,32,128",
    replication: Annotated[str, typer.Option(help="Slots per expert, comma-separated.")] = "1,1.25,1.5,2",
    ranks: Ranks = 2,
    data_parallel: DataParallel = None,
    tokens: Tokens = 24,
    rounds: Rounds = 5,
    intermediate: options.Intermediate = 1024,
    requests: options.CapturedRequests = 640,
    minutes: Minutes = None,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare placements and choices of replicas, by batch and replication."""
    inputs = _inputs(locals())
    batches, ratios = options.numbers("--batch", batch), _replications(replication)
    result, ranks, attention = resolve_ranks("ep_choice", ranks, data_parallel)
    inputs["ranks"] = ranks
    files = {"folder": prompts.resolve()}
    journal = Journal(work / f"{result}.jsonl", inputs | files, varying=("rounds",))
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    model = widen_model(intermediate, work, heads=NUM_HEADS)
    fit, rest = data.split("all", 0.5, seed)
    if max(batches) > len(rest):
        raise UserInputError(
            f"there are {len(rest)} held-out requests, too few for a batch of {max(batches)}"
        )
    load = data.trace.decode_counts[fit].sum(axis=0).astype(float)
    sizes = {ratio: round(load.shape[1] * ratio / ranks) * ranks for ratio in ratios}
    arms = _arms(data, fit, sizes, ranks, seed)
    if data_parallel:
        arms |= _arms_by_experts(arms, ranks)
    drawn = _draw_batches(rest, batches, rounds, seed)
    rng = np.random.default_rng([seed, 1])
    rounds_and_sizes = product(range(rounds), batches)
    keys = [(*point, *list(arms)[n]) for point in rounds_and_sizes for n in rng.permutation(len(arms))]

    def measure(engine: EpEngine, key: tuple[int, int, float, str]) -> dict[str, Any]:
        turn, size, ratio, name = key
        arm = arms[ratio, name]
        engine.place(arm.placement, arm.rule, load)
        chosen, homes = drawn[size][turn], None
        if arm.by_experts:
            homes = choose_homes(data.trace.prefill_counts[chosen], arm.placement, ranks)
        texts = [data.tokens[n][-MAX_PROMPT_TOKENS:] for n in chosen]
        return summarise_batch(engine.decode(texts, tokens, name=f"{turn}/{size}", homes=homes))

    slots = {"redundant": max(sizes.values()) - load.shape[1], "moves_per_slice": 64}
    extra = slots | {"max_batch": max(batches)}
    start_engine = partial(EpEngine, model, ranks=ranks, data_parallel=bool(data_parallel), **extra)
    trials = measure_in_turns(journal, keys, start_engine, measure, minutes)
    rows: list[dict[str, Any]] = []
    for size in batches:
        measured = {arm: [trials[turn, size, *arm] for turn in range(rounds)] for arm in arms}
        rows += choice_rows(measured, size, seed, attention)
    publish(result, rows, inputs=inputs, seed=seed, out=out, notes=_CHOICE_NOTES)
    journal.remove()


def _draw_batches(requests: Ints, sizes: list[int], rounds: int, seed: int) -> dict[int, list[Ints]]:
    """Draw a batch of requests for each round, by its size."""
    return {
        size: draw_disjoint_batches(requests, size, rounds, np.random.default_rng([seed, size]))
        for size in sizes
    }


def _replications(value: str) -> list[float]:
    """Return the values of `--replication`. Raise UserInputError if 1, the base, is not among them."""
    ratios = options.ratios("--replication", value)
    if 1.0 not in ratios:
        raise UserInputError(f"--replication is {value!r}, without 1, the base of the comparison: add 1")
    return ratios


def ep_shift(
    prompts: options.Prompts = options.PROMPTS,
    batch: Annotated[int, typer.Option(min=4, help="Requests of a window, which decode together.")] = 32,
    windows: Annotated[int, typer.Option(min=4, help="Number of windows; domains change halfway.")] = 10,
    groups: Annotated[str, typer.Option(help="First and second workload, with a comma.")] = "task,language",
    replication: Annotated[float, typer.Option(min=1, help="Slots per expert.")] = 1.25,
    choice: Annotated[str, typer.Option(help="Replica choice of all arms.")] = "even",
    ranks: Ranks = 2,
    data_parallel: DataParallel = None,
    tokens: Tokens = 48,
    rounds: Rounds = 4,
    moves_per_slice: MovesPerSlice = 8,
    cost: Annotated[Path, typer.Option(help="LayerCost (JSON) for DIRECTOR's plans.")] = (
        RESULTS / "layer_cost_cpu.json"
    ),
    intermediate: options.Intermediate = 1024,
    requests: options.CapturedRequests = 640,
    minutes: Minutes = None,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare offline, reactive (EPLB) and proactive (DIRECTOR) placements in a shift of domains."""
    inputs = _inputs(locals())
    workloads = _two_groups(groups)
    result, ranks, attention = resolve_ranks("ep_shift", ranks, data_parallel)
    inputs["ranks"] = ranks
    files = {"folder": prompts.resolve(), "cost_file": cost.resolve()}
    journal = Journal(work / f"{result}.jsonl", inputs | files, varying=("rounds",))
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    model = widen_model(intermediate, work, heads=NUM_HEADS)
    fit, rest = data.split("all", 0.5, seed)
    load, slots, start = _eplb_start(data, fit, replication, ranks)
    token_bytes = state_bytes(model) if data_parallel else None
    planners = migration_planners(data, slots, ranks, LayerCost.load(cost), seed, token_bytes)
    rng = np.random.default_rng([seed, 1])
    traffic, keys = {}, []
    for turn in range(rounds):
        traffic[turn] = list(_draw_windows(data, rest, workloads, windows, batch, rng))
        keys += [(turn, str(name)) for name in rng.permutation(list(planners))]

    def measure(engine: EpEngine, key: tuple[int, str]) -> list[dict[str, Any]]:
        turn, name = key
        engine.place(start, choice, load)
        return _decode_windows(engine, planners[name], data, traffic[turn], start, tokens, turn)

    extra = {"redundant": slots - load.shape[1], "moves_per_slice": moves_per_slice, "max_batch": batch}
    start_engine = partial(EpEngine, model, ranks=ranks, data_parallel=bool(data_parallel), **extra)
    trials = measure_in_turns(journal, keys, start_engine, measure, minutes)
    measured = {name: [trials[turn, name] for turn in range(rounds)] for name in planners}
    rows = list(shift_rows(measured, seed, attention))
    publish(result, rows, inputs=inputs, seed=seed, out=out, notes=_SHIFT_NOTES)
    journal.remove()


def _two_groups(value: str) -> list[str]:
    """Return the workloads of `--groups`. Raise UserInputError unless there are two known ones."""
    groups = value.split(",")
    if len(groups) != 2 or not set(groups) <= set(GROUPS):
        raise UserInputError(
            f"--groups is {value!r}: it must be two of {', '.join(GROUPS)}, separated by a comma"
        )
    return groups


def _inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments on which the result depends. A path is given as its name."""
    return {
        name: value.name if isinstance(value, Path) else value
        for name, value in arguments.items()
        if name not in _NOT_INPUTS
    }


def _eplb_start(data: CapturedRoutes, fit: Ints, replication: float, ranks: int) -> tuple[Floats, int, Ints]:
    """Return the fitted load, the slots of a layer, and EPLB's placement for this load."""
    load = data.trace.decode_counts[fit].sum(axis=0).astype(float)
    slots = round(load.shape[1] * replication / ranks) * ranks
    return load, slots, eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks)


def _decode_windows(
    engine: EpEngine,
    plan_migration: PlanMigration,
    data: CapturedRoutes,
    traffic: list[Ints],
    start: Ints,
    tokens: int,
    turn: int,
) -> list[dict[str, Any]]:
    """Decode the requests of each window after its planned migration, and return the windows' summaries.

    Args:
        traffic: requests of each window, as indices into `data`.
        start: int[L, P], the placement before the first window.
    """
    rows: list[dict[str, Any]] = []
    placement, previous_routes = start, None
    for window, requests in enumerate(traffic):
        prompts = [data.tokens[n][-MAX_PROMPT_TOKENS:] for n in requests]
        started_at_s = perf_counter()
        migration = plan_migration(requests, placement, previous_routes)
        plan_s = perf_counter() - started_at_s
        target, expected = migration or (None, None)
        decoded = engine.decode(prompts, tokens, name=f"{turn}/{window}", migrate_to=target, load=expected)
        row, moved_ms = summarise_batch(decoded), 1e3 * decoded.move_s
        row |= {"plan_ms": 1e3 * plan_s, "migration_ms": moved_ms}
        row["with_moves_ms"] = row["step_ms"] + moved_ms / len(decoded.seconds)
        row |= {key: getattr(decoded, key) for key in ("experts_moved", "slices", "slices_left")}
        rows.append(row)
        placement, previous_routes = decoded.placement, decoded.routed
    return rows


def _arms(
    data: CapturedRoutes, fit: Ints, sizes: dict[float, int], ranks: int, seed: int
) -> dict[tuple[float, str], PlacedArm]:
    """Return the arms by replication and name. `sizes` has the slots of each replication."""
    load = data.trace.decode_counts[fit].sum(axis=0)
    layers, experts = load.shape
    affinity = co_activation(np.concatenate([data.routes(int(n)) for n in fit]), experts)
    arms = {}
    for ratio, slots in sizes.items():
        grace = grace_placement(affinity, load, slots, Topology(ranks=ranks), seed=seed)[0]
        eplb = eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks)
        if slots == experts:
            placements = {
                BASE: np.tile(np.arange(experts), (layers, 1)),
                "eplb, none": eplb,
                "grace, none": grace,
            }
        else:
            placements = {EVEN: eplb, "eplb, metro": eplb, "eplb, metro-paper": eplb}
            placements |= dict.fromkeys(("grace, metro", "grace, local", "grace, weighted"), grace)
        for name, rows in placements.items():
            arms[ratio, name] = PlacedArm(
                add_empty_slots(rows, max(sizes.values()), ranks), name.split(", ")[1]
            )
    return arms


def _arms_by_experts(
    arms: dict[tuple[float, str], PlacedArm], ranks: int
) -> dict[tuple[float, str], PlacedArm]:
    """Return arms that put prompts on the ranks of their experts, unless each rank holds all experts."""
    return {
        (ratio, f"{name}, {BY_EXPERTS}"): replace(arm, by_experts=True)
        for (ratio, name), arm in arms.items()
        if name in (BASE, "grace, none", "grace, local") and ratio < ranks
    }


def add_empty_slots(placement: Ints, slots: int, ranks: int) -> Ints:
    """Return the placement int[L, P] with empty slots (-1) appended on each rank."""
    by_rank = np.asarray(placement).reshape(len(placement), ranks, -1)
    empty = slots // ranks - by_rank.shape[2]
    return np.pad(by_rank, ((0, 0), (0, 0), (0, empty)), constant_values=-1).reshape(len(placement), slots)


def _draw_windows(
    data: CapturedRoutes, rest: Ints, groups: list[str], windows: int, batch: int, rng: np.random.Generator
) -> Iterator[Ints]:
    """Yield the indices of each window's requests: of the first workload, then of the second."""
    halves = windows // 2, windows - windows // 2
    for group, number in zip(groups, halves, strict=True):
        available = rest[np.isin(rest, data.group(group))]
        if len(available) < batch * number:
            raise UserInputError(
                f"there are {len(available)} held-out {group!r} requests, too few for {number} windows of "
                f"{batch}"
            )
        yield from draw_disjoint_batches(available, batch, number, rng)


if __name__ == "__main__":
    run(ep_choice, ep_shift)
