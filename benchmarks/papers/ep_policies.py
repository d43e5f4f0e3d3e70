"""Compare ELDR's policies over decode engines with expert parallelism (the paper's Figure 18).

    python -m benchmarks.papers.ep_policies --prompts DIR

The serving policies place requests on K decode workers, each an engine of several ranks. They first place one
half of the captured requests, in a closed loop, then as many of the other half as all workers run together. A
worker's own placement is fitted to its requests of the first half. Each worker's batch then decodes on one
engine, worker after worker and arm after arm (an arm is a policy with a placement), so only the concurrency
of the workers is simulated. The caveats are those of benchmarks/engine/ep_engine.py.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import CapturedRoutes, load_or_capture
from benchmarks.lib.ep.batches import draw_disjoint_batches, summarise_batch
from benchmarks.lib.ep.engine import EpEngine
from benchmarks.lib.ep.engine_options import MAX_PROMPT_TOKENS, NUM_HEADS, Minutes, Ranks, Rounds, Tokens
from benchmarks.lib.ep.turns import measure_in_turns
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.arrays import Ints
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.scheduling import PlacementRequest, StepCost, make_policy
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.types import Lease, LeaseState
from loadgen.journal import Journal
from loadgen.results import column_notes, publish
from loadgen.statistics import paired_change_percent
from offline.expert_placement.packed_placements import activation_placement

BENCHMARKS = {"ep_policies": "all"}
BASE = ("shortest-queue", "linear")
ARMS = (
    BASE,
    ("shortest-queue", "one for all"),
    *((policy, name) for policy in ("locality-band", "marginal-cost") for name in ("linear", "own")),
)
NumWorkers = Annotated[int, typer.Option(min=2, help="Number of decode engines.")]
MeanBatch = Annotated[int, typer.Option(min=2, help="Mean requests in flight per worker.")]
PAPER = {("locality-band", "own"): {"paper_p50_pct": "-2.7..-4.3", "paper_p99_pct": "-0.6..-2.0"}}
_NOTES = column_notes(
    "The policies place requests on `workers` decode workers. Each worker's batch decodes alone on an engine "
    "of `ranks` ranks, in 32 bits. A request's TPOT is its worker's median step. The base arm is "
    "shortest-queue with the linear placement. The 95 % intervals, by bootstrap over requests, are too "
    "narrow, since the requests of a worker share its steps.",
    {
        "placement": "linear; own: fitted to the worker's earlier requests; one for all: fitted to all "
        "requests of the other half.",
        "p50_pct, p99_pct": "Change of the TPOT percentile against the base arm.",
        "requests_equal_pct": "Share of answers whose tokens all equal those of the base arm.",
        "paper_p50_pct, paper_p99_pct": "ELDR's change against the best balancer, on 8 workers of 4 GPUs.",
    },
)


def ep_policies(
    prompts: options.Prompts = options.PROMPTS,
    workers: NumWorkers = 4,
    batch: MeanBatch = 16,
    groups: options.Groups = "all,language",
    ranks: Ranks = 2,
    tokens: Tokens = 24,
    rounds: Rounds = 2,
    intermediate: options.Intermediate = 1024,
    requests: options.CapturedRequests = 640,
    minutes: Minutes = None,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare policies over expert-parallel decode engines, with and without per-worker placements."""
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    model = widen_model(intermediate, work, heads=NUM_HEADS)
    settings: dict[str, Any] = {"prompts": prompts.name, "workers": workers, "batch": batch, "groups": groups}
    settings |= {"ranks": ranks, "tokens": tokens, "intermediate": intermediate}
    settings |= {"requests": requests, "seed": seed}
    journal = Journal(work / "ep_policies.jsonl", settings)
    experts = data.trace.decode_counts.shape[2]
    names = groups.split(",")
    cases = {group: EpWorkload(data, group, workers, batch, rounds, ranks, seed) for group in names}
    keys = [(turn, group, *arm) for turn in range(rounds) for group in names for arm in ARMS]

    def measure(engine: EpEngine, key: tuple[int, str, str, str]) -> list[dict[str, Any]]:
        turn, group, policy, placement = key
        summaries = []
        for batch_of_worker, slots in cases[group].batches((policy, placement), turn):
            engine.place(slots, "none", np.ones((len(slots), experts)))
            chosen = [data.tokens[n][-MAX_PROMPT_TOKENS:] for n in batch_of_worker]
            name = hashlib.sha256(batch_of_worker.tobytes()).hexdigest()
            decoded = engine.decode(chosen, tokens, name=name)
            summaries.append(summarise_batch(decoded) | {"requests": batch_of_worker.tolist()})
        return summaries

    def start_engine() -> EpEngine:
        return EpEngine(model, ranks=ranks, redundant=0, moves_per_slice=64, max_batch=workers * batch)

    trials = measure_in_turns(journal, keys, start_engine, measure, minutes)
    rows = [
        row
        for group in names
        for row in policy_rows(
            {arm: [trials[turn, group, *arm] for turn in range(rounds)] for arm in ARMS}, group, seed
        )
    ]
    publish("ep_policies", rows, inputs=settings | {"rounds": rounds}, seed=seed, out=out, notes=_NOTES)
    journal.remove()


class EpWorkload:
    """A workload: each policy's assignment of requests, and placements fitted to the other half."""

    def __init__(
        self, data: CapturedRoutes, group: str, workers: int, batch: int, rounds: int, ranks: int, seed: int
    ) -> None:
        self._data, self._workers, self._batch, self._ranks, self._seed = data, workers, batch, ranks, seed
        self._fit, rest = data.split(group, 0.5, seed)
        if len(rest) < workers * batch:
            raise UserInputError(
                f"{workers} x {batch} held-out requests of {group!r} are needed, but there are {len(rest)}"
            )
        self._rounds = draw_disjoint_batches(rest, workers * batch, rounds, np.random.default_rng([seed, 2]))
        self._table, _ = fit_table(data.trace.subset_without_routes(self._fit), workers, seed=seed)

    def batches(self, arm: tuple[str, str], turn: int) -> list[tuple[Ints, Ints]]:
        """Return (requests, placement int[L, E]) for each worker with requests."""
        policy, placement = arm
        earlier, batch = place_requests(
            self._data,
            self._table,
            policy,
            self._workers,
            self._batch,
            self._fit,
            self._rounds[turn],
            seed=self._seed + turn,
        )
        layers, experts = self._data.trace.decode_counts.shape[1:]
        make = {
            "linear": lambda history: np.tile(np.arange(experts), (layers, 1)),
            "one for all": lambda history: self._placement(self._fit),
            "own": self._placement,
        }[placement]
        pairs = zip(batch, earlier, strict=True)
        return [(requests, make(history)) for requests, history in pairs if len(requests)]

    def _placement(self, history: Ints) -> Ints:
        """Return a placement for batches of such requests, by how probably a step activates an expert."""
        if not len(history):
            history = self._fit
        probability = self._data.trace.decode_probability[history].mean(axis=0)
        return activation_placement(1 - (1 - probability) ** self._batch, self._ranks)


def place_requests(
    data: CapturedRoutes,
    table: RoutingTable,
    policy: str,
    workers: int,
    batch: int,
    earlier: Ints,
    batch_of_all: Ints,
    *,
    seed: int,
) -> tuple[list[Ints], list[Ints]]:
    """Place requests by the policy and return those of each worker.

    Args:
        earlier: requests that are placed first, in a closed loop with `workers * batch` requests in flight.
        batch_of_all: requests that are placed last, as many as all workers run together.

    Returns:
        The `earlier` requests of each worker, and the requests of `batch_of_all` of each worker.
    """
    policy_with_table = make_policy(policy).set_table(table)
    policy_with_table.update_cost_model(StepCost())
    placer = Placer(policy_with_table, on_policy_error=_fail, seed=seed)
    names = [f"w{worker}" for worker in range(workers)]
    placer.set_workers(names)
    numbers: list[list[list[int]]] = [[[] for _ in names], [[] for _ in names]]
    running: list[str] = []
    for part, requests in enumerate((earlier, batch_of_all)):
        for number in requests.tolist():
            if len(running) == workers * batch:
                placer.finish(running.pop(0))
            counts, tokens = data.trace.prefill_counts[number], int(data.trace.prompt_tokens[number])
            similarity = table.similarity(counts)
            request = PlacementRequest(
                f"{part}-{number}", tokens, 64, expert_counts=counts, similarity=similarity
            )
            (lease,) = placer.submit([Lease(request, LeaseState.SENT, "benchmark")])
            running.append(lease.request_id)
            numbers[part][names.index(lease.worker)].append(number)
    first, second = ([np.array(of_worker, np.int64) for of_worker in part] for part in numbers)
    return first, second


def policy_rows(
    measured: dict[tuple[str, str], list[list[dict[str, Any]]]], group: str, seed: int
) -> list[dict[str, Any]]:
    """Return a row per arm, from the measurements of each worker's batch in each round."""
    by_arm = {arm: index_by_request(turns) for arm, turns in measured.items()}
    base = by_arm[BASE]
    rows = []
    for arm, turns in measured.items():
        workers = [worker for turn in turns for worker in turn]
        batch_sizes = np.array([len(worker["answers"]) for worker in workers])
        row: dict[str, Any] = {"workload": group, "policy": arm[0], "placement": arm[1]}
        ms, base_ms = (np.array([steps[request][0] for request in base]) for steps in (by_arm[arm], base))
        for q in (50, 99):
            of_q = partial(np.percentile, q=q)
            row[f"tpot_p{q}_ms"] = float(of_q(ms))
            change = paired_change_percent(ms, base_ms, of_q, seed=seed)
            row |= zip((f"p{q}_pct", f"p{q}_low_pct", f"p{q}_high_pct"), change, strict=True)
        for key in ("worst_rank_experts", "experts_all_ranks"):
            row[key] = float(np.average([worker[key] for worker in workers], weights=batch_sizes))
        equal = [by_arm[arm][request][1] == answer for request, (_, answer) in base.items()]
        row["requests_equal_pct"] = 100 * float(np.mean(equal))
        row |= {"largest_batch": int(batch_sizes.max()), "paper_p50_pct": None, "paper_p99_pct": None}
        rows.append(row | (PAPER.get(arm, {}) if group == "language" else {}))
    return rows


def index_by_request(turns: list[list[dict[str, Any]]]) -> dict[tuple[int, int], tuple[float, str]]:
    """Return {(round, request): (median step of the request's worker in ms, the answer)}."""
    return {
        (turn, number): (worker["step_ms"], answer)
        for turn, workers in enumerate(turns)
        for worker in workers
        for number, answer in zip(worker["requests"], worker["answers"], strict=True)
    }


def _fail(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    run(ep_policies)
