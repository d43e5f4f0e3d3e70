"""Compare policies in simulation on 16 to 1,024 workers, with a GPU's step cost and recorded arrivals.

    python -m benchmarks.papers.at_scale --routes trace.safetensors --cost cost.json \
        --arrivals azure_llm_2023_conv.csv.gz --arrivals mooncake_conversation.jsonl.gz

The arrivals are resampled (`arrivals.rate_per_s` of a scenario), so that a worker runs `--batch` requests on
average if requests are spread at random, whatever the number of workers. With several `--routers`, each
router has an equal share of the workers and its own queue, like several deployments of the application. A
load balancer that knows nothing of the routers sends each request to one of them at random. All routers are
alike, so with `--simulated-routers 2` only two of them are simulated, with their workers and requests.

A router makes one placement after the other. `router_us` is the time of a placement: the CPU time of the
placer for the placement and its release, measured here with all requests of the router in flight, and the
rest as `router_actor` measured it. `router_load_pct` is the share of the time that a router is busy with
placements. Above 100 % its queue grows.

Changes are against shortest-queue on as many routers, with 95 % intervals over the seeds (paired).
`saved_p99_pct` says how many workers fewer give the policy the p99 of shortest-queue on all workers, at the
same arrivals in the first seed. A negative value says how many more workers the policy needs. The figures are
those of the requests that arrive after the first fifth and before the last tenth.

A stopped run resumes from `--journal`, and other sizes, policies or seeds can be added to the journal.
`--finished-only` publishes the runs that the journal has.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a Ray actor has the same settings

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.router_time import channel_s, placement_cpu_s
from benchmarks.papers.figures.common import mean
from benchmarks.papers.scaled_arrivals import BASE, StudySettings, WorkerLoad, load_at_batch, scenario_of
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import Policy
from eldr_serve.scheduling.cost_file import FittedCost
from loadgen.journal import Journal
from loadgen.progress import progress_bar
from loadgen.results import publish
from loadgen.statistics import LatencyObjective, paired_ratio_percent
from offline.scenario import PolicyChoice, Scenario, ScenarioInputs, read_calibration_trace
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Requests
from offline.simulation.run import simulate

_OURS = "marginal-cost,tail_power=1,marginal-cost,tail_power=16"
POLICIES = f"shortest-queue,least-tokens,power-of-two,locality-band,{_OURS}"
_SHARE_STEP = 1 / 32  # step of the search for fewer workers, as a share of the workers
_MIN_SHARE, _MAX_SHARE = 0.6, 1.25  # range of that search, as shares of the workers
_WINDOW = (0.2, 0.9)  # share of the arrivals before and until which figures count
_COMPARED = ("tpot_p50_ms", "tpot_p99_ms", "goodput_per_s")


def divide_among_routers(requests: Requests, routers: int, seed: int) -> list[Requests]:
    """Return the requests of each router, to which a load balancer sends them at random."""
    router = np.random.default_rng(seed).integers(routers, size=len(requests))
    columns = requests.arrival_s, requests.prompt_tokens, requests.output_tokens, requests.kind
    return [Requests(*(column[router == number] for column in columns)) for number in range(routers)]


def figures_in_window(outcomes: Sequence[Outcome], objective: LatencyObjective) -> dict[str, float]:
    """Return the figures of the requests in the window, of all routers together."""

    def join(values: Callable[[Outcome], NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([values(outcome) for outcome in outcomes])

    arrival_s = join(lambda one: one.arrival_s)
    start, end = np.quantile(arrival_s, _WINDOW)
    inside = (arrival_s >= start) & (arrival_s <= end)
    tpot_s, ttft_s = join(lambda one: one.tpot_s)[inside], join(lambda one: one.ttft_s)[inside]
    row: dict[str, float] = {}
    for name, values in (("tpot", tpot_s), ("ttft", ttft_s)):
        for q in (50, 99):
            row[f"{name}_p{q}_ms"] = 1e3 * float(np.nanpercentile(values, q))
    good, step_s = join(lambda one: one.meets(objective))[inside], join(lambda one: one.seconds)
    return row | {
        "goodput_per_s": float(good.sum() / (end - start)),
        "good_pct": 100 * float(good.mean()),
        "batch_size": float(np.average(join(lambda one: one.batch), weights=step_s)),
        "active_experts": float(np.average(join(lambda one: one.experts), weights=step_s)),
    }


def find_smallest(counts: Sequence[int], meets: Callable[[int], bool]) -> int | None:
    """Return the smallest of ascending counts that meets a goal, or None. All larger ones must meet it."""
    low, high = 0, len(counts)
    while low < high:
        middle = (low + high) // 2
        if meets(counts[middle]):
            high = middle
        else:
            low = middle + 1
    return counts[low] if low < len(counts) else None


@dataclass(frozen=True)
class Size:
    """A number of workers, of which each router has an equal share.

    Attributes:
        simulated: number of routers that are simulated. The others are like them.
    """

    workers: int
    routers: int
    simulated: int

    @property
    def share(self) -> int:
        """Return the workers of a router."""
        return self.workers // self.routers


class UnfinishedError(Exception):
    """A run is missing in the journal, and no run may be made."""


class JournaledRuns:
    """Simulations of one recording on one number of workers, each made once and kept in the journal.

    Args:
        finished_only: make no run, and raise UnfinishedError instead.
        on_requests: called during a simulation with the number of further finished requests.
        on_run: called with the key of each simulation before it begins.
    """

    def __init__(
        self,
        study: StudySettings,
        arrivals: Path,
        load: WorkerLoad,
        size: Size,
        journal: Journal,
        *,
        finished_only: bool,
        on_requests: Callable[[int], None],
        on_run: Callable[[str], None],
    ) -> None:
        self._study, self.arrivals, self.size, self._journal = study, arrivals, size, journal
        self.load = load
        self._finished_only = finished_only
        self._on_requests, self._on_run = on_requests, on_run
        self._last_inputs: tuple[int, ScenarioInputs] | None = None  # seed, and its requests and experts

    def placement_us(self, policy: str) -> float:
        """Return the CPU time of a placement by this policy among one router's workers, in microseconds."""

        def measure() -> float:
            inputs, share = self._make_inputs(0), self.size.share
            requests = divide_among_routers(inputs.requests, self.size.routers, 0)[0]
            in_flight = self._study.batch * share
            return 1e6 * placement_cpu_s(
                self._policy(inputs, policy, share), requests, inputs.experts, share, in_flight
            )

        return float(self._get_or_make(self._key(policy, "placement_us"), measure))

    def router_s(self, policy: str) -> float:
        """Return the time that a router needs for a placement, in seconds."""
        return 1e-6 * self.placement_us(policy) + channel_s()

    def router_load_pct(self, policy: str) -> float:
        """Return the share of the time that a router is busy."""
        return 100 * self.router_s(policy) * self.load.rate_per_s * self.size.share

    def figures_of_seed(self, policy: str, seed: int, workers: int) -> dict[str, float]:
        """Return a run's figures on this number of workers, at the arrivals for all workers."""
        key = self._key(policy, f"{workers}/{seed}")

        def run() -> dict[str, float]:
            self._on_run(key)
            return self._run(policy, seed, workers)

        return dict(self._get_or_make(key, run))

    def available_seeds(self, policy: str, seeds: int) -> int:
        """Return how many of the seeds can be shown: all, or the finished ones if no runs are to be made."""
        keys = [self._key(policy, f"{self.size.workers}/{seed}") for seed in range(seeds)]
        missing = (number for number, key in enumerate(keys) if self._journal.get(key) is None)
        return next(missing, seeds) if self._finished_only else seeds

    def figures_of_seeds(self, policy: str, seeds: int) -> list[dict[str, float]]:
        """Return the figures of each seed, on all workers."""
        return [self.figures_of_seed(policy, seed, self.size.workers) for seed in range(seeds)]

    def fewest_workers(self, policy: str, quantile: str) -> int | None:
        """Return the fewest workers that give the policy the base's quantile on all workers, in one seed."""
        goal, share = self.figures_of_seed(BASE, 0, self.size.workers)[quantile], self.size.share
        counts = range(
            round(_MIN_SHARE * share), round(_MAX_SHARE * share) + 1, max(1, round(_SHARE_STEP * share))
        )

        def meets_goal(count: int) -> bool:
            return self.figures_of_seed(policy, 0, count * self.size.routers)[quantile] <= goal

        count = find_smallest(counts, meets_goal)
        return None if count is None else count * self.size.routers

    def _run(self, policy: str, seed: int, workers: int) -> dict[str, float]:
        inputs, share = self._make_inputs(seed), workers // self.size.routers
        parts = divide_among_routers(inputs.requests, self.size.routers, seed)[: self.size.simulated]
        cluster = self._scenario(1.0, share).cluster.model_copy(update={"router_s": self.router_s(policy)})
        started = time.thread_time()
        outcomes = [
            simulate(
                requests,
                self._policy(inputs, policy, share),
                cluster,
                experts=inputs.experts,
                seed=seed,
                on_finished=self._on_requests,
            )
            for requests in parts
        ]
        row = figures_in_window(outcomes, self.load.objective)
        row["goodput_per_s"] *= self.size.routers / len(parts)
        return row | {"requests": sum(map(len, parts)), "run_s": time.thread_time() - started}

    def _policy(self, inputs: ScenarioInputs, text: str, workers: int) -> Policy:
        name, parameters = options.policy("--policies", text)
        choice = PolicyChoice(name=name, parameters=parameters)
        return inputs.policy(choice, self._scenario(1.0, workers).cluster)

    def _make_inputs(self, seed: int) -> ScenarioInputs:
        if self._last_inputs is None or self._last_inputs[0] != seed:
            rate = self.load.rate_per_s * self.size.workers
            self._last_inputs = seed, ScenarioInputs(self._scenario(rate, self.size.workers), seed)
        return self._last_inputs[1]

    def _scenario(self, rate_per_s: float, workers: int) -> Scenario:
        return scenario_of(self._study, self.arrivals, workers, rate_per_s)

    def _get_or_make(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the journal's value. Make and store it, or raise UnfinishedError, if it has none."""
        if self._finished_only and self._journal.get(key) is None:
            raise UnfinishedError(key)
        return self._journal.get_or_put(key, make)

    def _key(self, policy: str, rest: str) -> str:
        routers = f"{self.size.simulated} of {self.size.routers}"
        return f"{_stem(self.arrivals)}/{self.size.workers}/{routers}/{policy}/{rest}"


def rows_of(
    runs: JournaledRuns, policies: Sequence[str], saving: Sequence[str], seeds: int
) -> list[dict[str, Any]]:
    """Return a row for each policy with runs that are finished or may be made, with means over seeds.

    Args:
        saving: policies whose saved workers are searched.
    """
    rows, workers = [], runs.size.workers
    case = {"arrivals": _stem(runs.arrivals), "workers": workers, "routers": runs.size.routers}
    case |= {"simulated_routers": runs.size.simulated}
    for policy in policies:
        number = min(runs.available_seeds(name, seeds) for name in (BASE, policy))
        if not number:
            continue
        with suppress(UnfinishedError):
            rows.append(case | {"policy": policy, "seeds": number} | _row(runs, policy, number))
            for q in ("p50", "p99") if policy in saving and policy != BASE else ():
                count = runs.fewest_workers(policy, f"tpot_{q}_ms")
                rows[-1][f"workers_for_{q}"] = count
                rows[-1][f"saved_{q}_pct"] = None if count is None else 100 * (1 - count / workers)
    return rows


def _row(runs: JournaledRuns, policy: str, seeds: int) -> dict[str, Any]:
    base, runs_of_policy = runs.figures_of_seeds(BASE, seeds), runs.figures_of_seeds(policy, seeds)
    row = mean(runs_of_policy) | {"router_us": 1e6 * runs.router_s(policy)}
    row |= {"router_load_pct": runs.router_load_pct(policy), "slo_tpot_ms": runs.load.objective.tpot_ms}
    for key in _COMPARED:
        values, base_values = ([run[key] for run in some] for some in (runs_of_policy, base))
        if all(base_values):
            name = f"{key.removesuffix('_ms').removesuffix('_per_s')}_change_pct"
            row[name], low, high = paired_ratio_percent(values, base_values)
            if seeds > 1:
                row |= {f"{name}_low": low, f"{name}_high": high}
    return row


def _stem(path: Path) -> str:
    """Return the file's name without any of its suffixes."""
    return path.name.partition(".")[0]


def _split(policies: str) -> list[str]:
    """Split a comma-separated list of policies, NAME or NAME,KEY=VALUE."""
    return re.split(r",(?![^,]*=)", policies)


def _sizes(workers: str, routers: str, simulated: int) -> list[Size]:
    """Return the sizes to simulate. Raise UserInputError if routers cannot share their workers equally."""
    totals = options.numbers("--workers", workers)
    divisions = _expand_to_sizes("--routers", routers, len(totals))
    sizes = [Size(*pair, simulated=min(pair[1], simulated)) for pair in zip(totals, divisions, strict=True)]
    if wrong := [size for size in sizes if size.workers % size.routers]:
        raise UserInputError(
            f"--routers is {routers}: {wrong[0].routers} cannot share {wrong[0].workers} workers equally"
        )
    return sizes


def _expand_to_sizes(option: str, value: str, sizes: int) -> list[int]:
    """Return an option's number for each size."""
    numbers = options.numbers(option, value)
    if len(numbers) not in (1, sizes):
        raise UserInputError(f"{option} must be one number, or one for each of --workers, got {value}")
    return numbers * sizes if len(numbers) == 1 else numbers


def at_scale(
    routes: Annotated[Path, typer.Option(help="Calibration trace with routes, or published routes.")],
    cost: Annotated[Path, typer.Option(help="Step cost, JSON, by `eldr cost`.")],
    arrivals: Annotated[list[Path], typer.Option(help="Recorded requests, Azure or Mooncake; repeatable.")],
    workers: options.Workers = "16,64,256",
    routers: Annotated[str, typer.Option(help="Number of routers, or one for each of --workers.")] = "1",
    simulated_routers: Annotated[int, typer.Option(min=1, help="Maximum number of simulated routers.")] = 8,
    policies: Annotated[str, typer.Option(help="Policies: NAME or NAME,KEY=VALUE, ...")] = POLICIES,
    saving: Annotated[str, typer.Option(help="Policies whose saving of workers is searched for.")] = POLICIES,
    seeds: Annotated[str, typer.Option(help="Number of seeds, or one for each of --workers.")] = "3",
    batch: Annotated[int, typer.Option(min=1, help="Requests that a worker runs on average.")] = 12,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated time of arrivals, s.")] = 10.0,
    parts: Annotated[
        int, typer.Option(min=1, help="Observed requests in a simulated one; 1: copies of single ones.")
    ] = 1,
    centroids: Annotated[int, typer.Option(min=1, help="Clusters of locality-band's table.")] = 16,
    ttft_ms: Annotated[float, typer.Option(min=1, help="Objective of TTFT, ms.")] = 100.0,
    slack: Annotated[float, typer.Option(min=1, help="Objective of TPOT, in steps at --batch.")] = 1.05,
    journal: Annotated[Path, typer.Option(help="File of finished runs.")] = options.WORK / "at_scale.jsonl",
    finished_only: Annotated[bool, typer.Option(help="Publish the journal's runs without new ones.")] = False,
    out: options.Out = None,
) -> None:
    """Simulate policies by number of workers, with the time that the router needs."""
    fitted = FittedCost.load(cost)
    study = StudySettings(routes, fitted.cost, batch, seconds, parts, centroids, ttft_ms, slack)
    sizes, names = _sizes(workers, routers, simulated_routers), _split(policies)
    counts = _expand_to_sizes("--seeds", seeds, len(sizes))
    for name in names:
        options.policy("--policies", name)
    inputs = asdict(study) | {"routes": routes.name}
    finished_runs = Journal(journal, inputs)
    loads = {path: load_at_batch(study, path) for path in arrivals}
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        bar = progress.add_task("", total=len(sizes) * len(arrivals))
        requests = progress.add_task("requests", total=None)
        start_runs = partial(
            JournaledRuns,
            finished_only=finished_only,
            on_requests=partial(progress.advance, requests),
            on_run=lambda name: progress.update(bar, description=name),
        )
        for (size, count), path in product(zip(sizes, counts, strict=True), arrivals):
            runs = start_runs(study, path, loads[path], size, finished_runs)
            rows += rows_of(runs, names, _split(saving), count)
            progress.advance(bar)
    trace = read_calibration_trace(routes)
    publish(
        out.stem if out else "at_scale",
        rows,
        seed=0,
        out=out,
        inputs=inputs
        | {"routes": f"{len(trace.ids)} requests of {trace.model}, {trace.fingerprint}"}
        | {"cost_source": fitted.source, "arrivals": [path.name for path in arrivals]},
        notes="Simulated: nothing ran on a GPU. Figures are means over seeds. The router's time is the CPU "
        f"time of the placer here, and {1e6 * channel_s():.0f} us of the channel (router_actor).",
    )


if __name__ == "__main__":
    run(at_scale)
