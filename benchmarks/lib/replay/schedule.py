"""TPOT of placements without contention: each worker's schedule is replayed alone on a real engine.

A policy places Poisson arrivals of prefilled requests on K workers in simulation, with a step cost that was
first fitted to this engine. A real engine with a core of its own then serves each worker's requests at their
arrival times, so that workers do not share cores as they would if all ran here. Only the placement is
simulated. The times are the real engine's. The prompts' KV blocks are in the prefix cache, as if they had
been transferred. The model is the demo model with wider experts, which compute the same function but do not
fit the CPU's caches.
"""

from __future__ import annotations

import copy
import heapq
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.active_experts import active_experts
from benchmarks.lib.captured_routes import CapturedRoutes, groups_of, load_or_capture
from benchmarks.lib.engine_pool import ReplayEngines
from benchmarks.lib.engines import weights_name
from benchmarks.lib.replay.engine import ENGINE_ENV, ReplayArrival, StepRecords
from eldr_serve.errors import UserInputError
from eldr_serve.experts.fitting.clustering import kmeans
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import DEFAULT_TRANSFORM
from eldr_serve.scheduling import Decision, Loads, PlacementRequest, Policy, StepCost, make_policy
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from examples.demo_model import WEIGHTS
from loadgen.journal import Journal
from loadgen.progress import progress_bar
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate

FIT_REQUESTS = 304  # the default has four batches of each of these sizes
_FIT_BATCHES = (2, 10, 24, 40)


def fit_batches(requests: int) -> list[int]:
    """Return batch sizes that sum to a quarter of the requests. Few requests give fewer, smaller batches."""
    ends = np.rint(np.cumsum(_FIT_BATCHES) / sum(_FIT_BATCHES) * (requests // 4))
    return [int(size) for size in np.diff(ends, prepend=0) if size]


@dataclass(frozen=True)
class Arm:
    """One setting of a comparison: a policy, its parameters and its input."""

    label: str
    policy: str
    parameters: dict[str, Any] = field(default_factory=dict)
    true_decode: bool = False  # the policy gets the true decode activations
    balanced: bool = True  # clusters of equal size
    transform: str = DEFAULT_TRANSFORM


@dataclass(frozen=True)
class ReplayLoad:
    """A workload on K workers. The arrival rate aims at a mean batch of `batch` requests."""

    group: str
    workers: int
    batch: int
    per_worker: int


@dataclass
class ReplayCase:
    """A load with its jobs, and each arm's placement and replay."""

    load: ReplayLoad
    rate: float  # requests/s
    requests: NDArray[np.int64]  # index into the capture, by job
    arrival_s: NDArray[np.float64]
    outcomes: dict[str, Outcome]
    replayed_tpot_s: dict[str, NDArray[np.float64]]  # times of each arm, [repeats, jobs]
    replayed_first_s: dict[str, NDArray[np.float64]]  # arrival to the end of the first decode step
    steps: dict[str, StepRecords]

    @property
    def tpot_s(self) -> dict[str, NDArray[np.float64]]:
        """Return the median TPOT of a job's replays in seconds, by arm."""
        return {label: np.median(times, axis=0) for label, times in self.replayed_tpot_s.items()}

    @property
    def first_s(self) -> dict[str, NDArray[np.float64]]:
        """Return the median seconds from a job's arrival to the end of its first decode step, by arm."""
        return {label: np.median(times, axis=0) for label, times in self.replayed_first_s.items()}


@dataclass(frozen=True)
class _Replay:
    """One worker's schedule in one arm, once."""

    case: ReplayCase
    worker: int
    repeat: int
    label: str

    @property
    def key(self) -> str:
        return f"{self.case.load} worker {self.worker} repeat {self.repeat} {self.label}"

    @property
    def jobs(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.case.outcomes[self.label].worker == self.worker)

    def entry_of(self, times: dict[str, NDArray[np.float64]], steps: StepRecords) -> dict[str, Any]:
        """Return the engine's answer as the journal stores it."""
        token_times = [times[str(j)] for j in self.jobs]
        return {
            "tpot_s": [(t[-1] - t[0]) / (len(t) - 1) for t in token_times],
            "first_s": [t[0] - self.case.arrival_s[j] for t, j in zip(token_times, self.jobs, strict=True)],
            "steps": vars(steps),
        }

    def copy_into_case(self, entry: dict[str, Any]) -> None:
        """Copy the journal's entry into the case."""
        self.case.replayed_tpot_s[self.label][self.repeat, self.jobs] = entry["tpot_s"]
        self.case.replayed_first_s[self.label][self.repeat, self.jobs] = entry["first_s"]
        self.case.steps[self.label].extend(StepRecords(**entry["steps"]))


class _RepeatPlacements(Policy):
    """A policy that repeats earlier placements. Request ids are the simulator's numbers."""

    def __init__(self, worker: NDArray[np.int64]) -> None:
        super().__init__()
        self._worker = worker

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(self._worker[int(request.request_id)]), reason="placed")


class ReplayExperiment:
    """The captured requests, one engine, and its step cost."""

    def __init__(
        self,
        prompts: Path,
        *,
        engine_pool: ReplayEngines,
        requests: int,
        output_tokens: int,
        intermediate: int,
        work: Path,
        seed: int,
        journal: Journal,
        device: str = "cpu",
        fit_requests: int = FIT_REQUESTS,
    ) -> None:
        self._journal = journal
        self._engine_pool = engine_pool
        self.data: CapturedRoutes = load_or_capture(
            prompts, work, requests=requests, output_tokens=output_tokens, seed=seed, device=device
        )
        self._output_tokens = output_tokens
        self._experts_by_truth: dict[bool, Experts] = {}  # experts with and without true decode activations
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._probe_s: float = journal.get_or_put("probe_s", engine_pool.probe_s)
        self._fitting_records = self._measure_fitting_steps(fit_requests)
        self.cost, self.cost_error = self._fit_cost()
        typer.echo(f"step cost {self.cost.as_dict()}, relative error {self.cost_error:.1%}")
        self.inputs = {
            "device": device,
            "intermediate": intermediate,
            "output_tokens": output_tokens,
            "captured": requests,
            "step_cost": self.cost.as_dict(),
            "step_cost_relative_error": self.cost_error,
        }

    def compare(self, loads: Sequence[ReplayLoad], arms: Sequence[Arm], repeats: int = 1) -> list[ReplayCase]:
        """Place and replay every load in every arm. Arms alternate, so that all meet the same machine speeds.

        A request's times are the medians of its `repeats` replays. StepRecords are those of all replays.
        """
        cases = [self._plan(load, arms, repeats) for load in loads]
        schedule = [
            _Replay(case, worker, repeat, arms[n].label)
            for repeat in range(repeats)
            for case in cases
            for worker in range(case.load.workers)
            for n in self._rng.permutation(len(arms))
        ]
        futures = {
            replay.key: self._engine_pool.replay(self._arrivals(replay), self._probe_s)
            for replay in schedule
            if self._journal.get(replay.key) is None
        }
        with progress_bar() as progress:
            bar = progress.add_task("replaying", total=len(schedule))
            for replay in schedule:
                load = replay.case.load
                progress.update(bar, description=f"{load.group}, K={load.workers}, worker {replay.worker}")
                if replay.key in futures:
                    self._journal.put(replay.key, replay.entry_of(*futures.pop(replay.key).result()))
                replay.copy_into_case(self._journal.get(replay.key))
                progress.advance(bar)
        return cases

    def regret(self, case: ReplayCase) -> dict[str, NDArray[np.float64]]:
        """Return the cost of each job's choice beyond the best worker in hindsight, s per step, by arm.

        Placements are those of the arm's simulated run. Costs use the requests' true decode activations.
        """
        trace = self.data.trace
        by_arm = {}
        for label, outcome in case.outcomes.items():
            evaluator = MarginalCost(affinity=0, tail_power=1, cost=self.cost.as_dict())
            ledger = LoadLedger()
            ledger.name_workers(range(case.load.workers))
            workers = ledger.rows_of(range(case.load.workers))
            ends: list[tuple[float, int]] = []
            regret = np.zeros(len(case.requests))
            for j in np.argsort(case.arrival_s):
                while ends and ends[0][0] <= case.arrival_s[j]:
                    request_id = str(heapq.heappop(ends)[1])
                    evaluator.on_finished(request_id)
                    ledger.release(request_id)
                i = int(case.requests[j])
                counts, steps = trace.decode_counts[i], int(trace.decode_steps[i])
                request = PlacementRequest(str(j), steps, self._output_tokens, expert_counts=counts)
                added = evaluator.added_cost(request, ledger.loads(workers))
                worker = int(outcome.worker[j])
                regret[j] = added[worker] - added.min()
                evaluator.on_assigned(request, worker)
                ledger.add(str(j), worker, request.prompt_tokens)
                heapq.heappush(ends, (float(outcome.last_s[j]), int(j)))
            by_arm[label] = regret
        return by_arm

    def simulate_again(self, case: ReplayCase, label: str, cost: StepCost) -> Outcome:
        """Simulate the arm's placements again with another step cost."""
        policy = _RepeatPlacements(case.outcomes[label].worker)
        return self._simulate(case.load, case.requests, case.arrival_s, policy, cost)

    def step_lines(self) -> str:
        """Return the steps behind the cost, as `eldr simulate --calibrate-from` reads them."""
        s = self._fitting_records
        records = zip(s.requests, s.kv_tokens, s.experts, s.seconds, strict=True)
        names = ("requests", "kv_tokens", "experts", "seconds")
        return "".join(json.dumps(dict(zip(names, record, strict=True))) + "\n" for record in records)

    def _measure_fitting_steps(self, requests: int) -> StepRecords:
        """Measure the steps of batches of different sizes, of one domain and of all."""
        if (entry := self._journal.get("fitting steps")) is not None:
            return StepRecords(**entry)
        steps, domains = StepRecords(), np.array(self.data.trace.domains)
        names, sizes = np.unique(domains, return_counts=True)
        single = names[np.argsort(-sizes)[:2]]
        futures = []
        for pool in (domains != "", domains == single[0], domains == single[-1], domains != ""):
            for size in fit_batches(requests):
                chosen = self._rng.choice(np.flatnonzero(pool), size)
                gaps = self._rng.exponential(0.02, size)  # such gaps let the batch fill and empty
                arrivals = [
                    ReplayArrival(f"fit{n}", float(t), self.data.tokens[i], self._output_tokens, int(i))
                    for n, (i, t) in enumerate(zip(chosen, np.cumsum(gaps), strict=True))
                ]
                futures.append(self._engine_pool.replay(arrivals, self._probe_s))
        for future in futures:
            steps.extend(future.result()[1])
        self._journal.put("fitting steps", vars(steps))
        return steps

    def _fit_cost(self) -> tuple[StepCost, float]:
        steps = self._fitting_records
        sums = StepSums.from_steps(steps.requests, steps.kv_tokens, steps.experts, steps.seconds)
        cost = sums.fit()
        if cost is None:
            raise UserInputError(
                f"no step cost fits the engine's {len(steps.seconds)} steps: they are too few (give more "
                "--fit-requests), or their time does not depend on active experts (give more --intermediate)"
            )
        return cost, sums.relative_rms_error(cost)

    def _plan(self, load: ReplayLoad, arms: Sequence[Arm], repeats: int) -> ReplayCase:
        fit, rest = self.data.split(load.group, 0.4, self._seed)
        rng = np.random.default_rng([self._seed, load.workers, load.batch])
        number = load.workers * load.per_worker
        chosen = rng.choice(rest, number, replace=number > len(rest))
        experts = active_experts(self._experts(False), chosen, load.batch, rng)
        # Little's law: arrivals per second and worker = batch / time in the worker.
        stay_s = self._output_tokens * float(self.cost.seconds(load.batch, 200 * load.batch, experts))
        rate = load.workers * load.batch / stay_s
        arrival_s = np.cumsum(rng.exponential(1 / rate, number))
        tables = {
            key: self._table(fit, load.workers, *key)
            for key in {(arm.balanced, arm.transform) for arm in arms}
        }
        mix = {"mix": dict(Counter(self.data.trace.domains[i] for i in fit))}
        outcomes = {}
        for arm in arms:
            table = tables[arm.balanced, arm.transform]
            parameters = dict(arm.parameters) | (mix if arm.policy == "domain" else {})
            policy = make_policy(arm.policy, **parameters).set_table(table)
            policy.update_cost_model(self.cost)
            outcomes[arm.label] = self._simulate(
                load, chosen, arrival_s, policy, self.cost, true_decode=arm.true_decode
            )
        empty = {arm.label: np.zeros((repeats, number)) for arm in arms}
        return ReplayCase(
            load,
            rate,
            chosen,
            arrival_s,
            outcomes,
            empty,
            copy.deepcopy(empty),
            {arm.label: StepRecords() for arm in arms},
        )

    def _table(self, fit: NDArray[np.int64], workers: int, balanced: bool, transform: str) -> RoutingTable:
        trace = self.data.trace.subset_without_routes(fit)
        table, _ = fit_table(trace, workers, transform=transform, seed=self._seed)
        if balanced:
            return table
        clusters = kmeans(table.spec.encode(trace.prefill_counts), workers, seed=self._seed)
        return replace(table, centroids=clusters.centroids, cluster_sizes=clusters.sizes)

    def _simulate(
        self,
        load: ReplayLoad,
        chosen: NDArray[np.int64],
        arrival_s: NDArray[np.float64],
        policy: Policy,
        cost: StepCost,
        *,
        true_decode: bool = False,
    ) -> Outcome:
        experts = self._experts(true_decode)
        requests = Requests(
            arrival_s, experts.count_tokens[chosen], np.diff(experts.offset)[chosen], kind=chosen
        )
        cluster = Cluster(decode=Decode(workers=load.workers, cost=cost))
        return simulate(requests, policy, cluster, experts=experts, seed=self._seed)

    def _experts(self, true_decode: bool) -> Experts:
        if true_decode not in self._experts_by_truth:
            self._experts_by_truth[true_decode] = Experts.from_trace(
                self.data.trace, max_steps=self._output_tokens, true_decode=true_decode
            )
        return self._experts_by_truth[true_decode]

    def _arrivals(self, replay: _Replay) -> list[ReplayArrival]:
        requests, arrival_s = replay.case.requests.tolist(), replay.case.arrival_s.tolist()
        tokens, output_tokens = self.data.tokens, self._output_tokens
        return [
            ReplayArrival(str(j), arrival_s[j], tokens[requests[j]], output_tokens, requests[j])
            for j in replay.jobs.tolist()
        ]


def parse_loads(groups: str, workers: str, batch: str, per_worker: int) -> list[ReplayLoad]:
    """Return all combinations of the options' values. Raise UserInputError for invalid values."""
    counts, sizes = options.numbers("--workers", workers), options.numbers("--batch", batch)
    return [ReplayLoad(g, k, b, per_worker) for g in groups_of(groups) for k in counts for b in sizes]


def widen_model(intermediate: int, work: Path, *, heads: int | None = None) -> Path:
    """Return the demo model with experts of `intermediate` neurons and `heads` heads. Make it if needed."""
    if intermediate == 32 and heads is None:
        return WEIGHTS
    path = work / f"model_{intermediate}_{weights_name()}{'' if heads is None else f'_{heads}_heads'}"
    if not (path / "config.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "offline.widen", "--intermediate", str(intermediate)]
        command += [] if heads is None else ["--heads", str(heads)]
        subprocess.run(
            [*command, "--out", str(path)], check=True, env=os.environ | ENGINE_ENV, stdout=subprocess.DEVNULL
        )
    return path
