"""Compare an engine that starts with the expert placement of its position with one that migrates to it.

    python -m benchmarks.papers.ep_start --prompts DIR

In ELDR's paper (section 5) a decode engine starts with the placement of its cluster. Here it starts with the
placement of the configuration, learns its position from the router, and migrates between the steps of its
requests. Requests are placed on K workers by `locality-band` as in benchmarks/papers/ep_policies.py, and a
worker's own placement is fitted to its earlier requests. Its batch decodes on an engine that has this
placement, on an engine that migrates to it from the linear placement, and on an engine that keeps the linear
placement. The question to the router, which a replica asks every 2 s, is not part of it. The caveats are
those of benchmarks/engine/ep_engine.py.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from benchmarks.lib import options
from benchmarks.lib.captured_routes import CapturedRoutes, groups_of, load_or_capture
from benchmarks.lib.ep.batches import summarise_batch
from benchmarks.lib.ep.engine import EpEngine
from benchmarks.lib.ep.engine_options import (
    MAX_PROMPT_TOKENS,
    NUM_HEADS,
    Minutes,
    MovesPerSlice,
    Ranks,
    Rounds,
    Tokens,
)
from benchmarks.lib.ep.rows import KEEPS, MIGRATES, STARTS, start_rows
from benchmarks.lib.ep.turns import measure_in_turns
from benchmarks.lib.replay.schedule import widen_model
from benchmarks.papers.ep_policies import EpWorkload, MeanBatch, NumWorkers
from eldr_serve.arrays import Ints
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.journal import Journal
from loadgen.results import column_notes, publish

BENCHMARKS = {"ep_start": "all"}
WAYS = (STARTS, MIGRATES, KEEPS)
_NOTES = column_notes(
    "`locality-band` places requests on `workers` decode workers. Each worker's batch decodes alone on an "
    "engine of `ranks` ranks, in 32 bits, which has the worker's own placement, or migrates to it from the "
    "linear one, or keeps the linear one. Figures are medians over batches of medians over steps, with 95 % "
    "bootstrap intervals over batches. Changes are against the engine that has it from the start, paired by "
    "batch, in the same steps.",
    {
        "during_ms": "Time of a step while the migration lasts, without its slices.",
        "with_moves_ms": "The same with the slice between two steps.",
        "after_ms": "Time of a step after the migration.",
        "migration_ms": "Sum of the slices.",
        "holds_after_ms": "From the first slice until the placement holds, with the steps in between.",
        "received_mib": "Weights that the ranks received from each other.",
        "requests_equal_pct": "Share of answers whose tokens all equal those of the base.",
    },
)


def ep_start(
    prompts: options.Prompts = options.PROMPTS,
    workers: NumWorkers = 4,
    batch: MeanBatch = 16,
    groups: options.Groups = "language,task",
    ranks: Ranks = 2,
    tokens: Tokens = 64,
    rounds: Rounds = 4,
    moves_per_slice: MovesPerSlice = 8,
    intermediate: options.Intermediate = 1024,
    requests: options.CapturedRequests = 640,
    minutes: Minutes = None,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare engines that start with their position's placement, migrate to it, or never have it."""
    names = groups_of(groups)
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    model = widen_model(intermediate, work, heads=NUM_HEADS)
    inputs: dict[str, Any] = {"prompts": prompts.name, "workers": workers, "batch": batch, "groups": groups}
    inputs |= {"ranks": ranks, "tokens": tokens, "rounds": rounds, "moves_per_slice": moves_per_slice}
    inputs |= {"intermediate": intermediate, "requests": requests, "seed": seed}
    journal = Journal(work / "ep_start.jsonl", inputs)
    workloads = {group: EpWorkload(data, group, workers, batch, rounds, ranks, seed) for group in names}
    rng = np.random.default_rng([seed, 1])
    keys = [
        (turn, group, str(way))
        for turn in range(rounds)
        for group in names
        for way in rng.permutation(list(WAYS))
    ]

    def measure(engine: EpEngine, key: tuple[int, str, str]) -> list[dict[str, Any]]:
        turn, group, way = key
        return measure_batches(
            engine, data, workloads[group].batches(("locality-band", "own"), turn), way, tokens
        )

    def start_engine() -> EpEngine:
        return EpEngine(
            model, ranks=ranks, redundant=0, moves_per_slice=moves_per_slice, max_batch=workers * batch
        )

    trials = measure_in_turns(journal, keys, start_engine, measure, minutes)
    rows: list[dict[str, Any]] = []
    for group in names:
        measured = {way: [b for turn in range(rounds) for b in trials[turn, group, way]] for way in WAYS}
        rows += start_rows(measured, group, seed)
    publish("ep_start", rows, inputs=inputs, seed=seed, out=out, notes=_NOTES)
    journal.remove()


def measure_batches(
    engine: EpEngine, data: CapturedRoutes, batches: list[tuple[Ints, Ints]], way: str, tokens: int
) -> list[dict[str, Any]]:
    """Decode each worker's batch, with its own placement int[L, E] reached in one of WAYS.

    Raises:
        UserInputError: the batch ends before the migration.
    """
    summaries = []
    for requests, own in batches:
        linear = np.tile(np.arange(own.shape[1]), (len(own), 1))
        engine.place(own if way == STARTS else linear, "none", np.ones(own.shape))
        decoded = engine.decode(
            [data.tokens[n][-MAX_PROMPT_TOKENS:] for n in requests],
            tokens,
            name=hashlib.sha256(requests.tobytes()).hexdigest(),
            migrate_to=own if way == MIGRATES else None,
        )
        if decoded.slices >= len(decoded.seconds):
            raise UserInputError(
                f"--tokens is {tokens}, too few for the {decoded.slices} slices of a migration: raise it, or "
                "raise --moves-per-slice"
            )
        summaries.append(
            summarise_batch(decoded)
            | {
                "steps_ms": (1e3 * decoded.seconds).tolist(),
                "slices": decoded.slices,
                "experts_moved": decoded.experts_moved,
                "received_mib": decoded.received_bytes / 2**20,
                "migration_ms": 1e3 * decoded.move_s,
            }
        )
    return summaries


if __name__ == "__main__":
    run(ep_start)
