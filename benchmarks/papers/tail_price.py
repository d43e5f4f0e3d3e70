"""Compare prices of `marginal-cost`: tail powers and affinities, on real models' routes and whole replicas.

    eldr routes deepseek_v2_lite_routes.jsonl.gz --held-out 0.3 --out deepseek.safetensors
    python -m benchmarks.papers.tail_price --point deepseek.safetensors,cost.json,8,15 \\
        --point deepseek.held_out.safetensors,cost.json,8,15
    python -m benchmarks.papers.tail_price --whole capture.safetensors,mooncake_conversation.jsonl.gz,8

Everything is simulated. A point has decode workers, Poisson arrivals at the rate that keeps a mean batch on
each worker if experts are drawn at random, and requests that repeat the routes of a file. A whole point is
one of the three workloads of `eldr reproduce whole policies` (see there). All policies get the same requests
in a seed. A change is against the best balancer of the same seed and figure, the mean over the seeds with its
95 % interval (Student's t of the logarithms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.active_experts import active_experts
from benchmarks.papers.figures import whole
from benchmarks.papers.figures.common import Options, each_seed, mean
from benchmarks.papers.figures.eldr import BALANCERS
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import Policy, StepCost, make_policy
from eldr_serve.scheduling.cost_file import FittedCost
from loadgen.journal import Journal
from loadgen.results import publish
from loadgen.statistics import paired_ratio_percent
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate

BENCHMARKS = {"tail_price": "named"}
Figures = dict[str, float]
_METRICS = whole.METRICS
_STORED = (*_METRICS, "batch_size", "active_experts")
_NOTES = (
    "Simulated. `_change_pct` is the change against the best balancer of the same seed and figure, with a "
    "95 % interval over seeds (Student's t of the logarithms, paired). The arrival rate aims at the batch."
)


@dataclass(frozen=True)
class Point:
    """A load to simulate.

    Attributes:
        labels: columns of the point in the table, with their values.
        cost: cost of a step.
        balancers: policies that look at load, and on whole replicas at prefixes, by name.
        prepare: returns a function that simulates a policy with the requests of a seed.
    """

    labels: dict[str, Any]
    cost: StepCost
    balancers: dict[str, Callable[[], Policy]]
    prepare: Callable[[int], Callable[[Policy], Figures]]

    def __str__(self) -> str:
        return ", ".join(map(str, self.labels.values()))


def tail_price(
    point: Annotated[
        list[str] | None,
        typer.Option(help="ROUTES,COST,WORKERS,BATCH: routes, step cost (JSON), decode workers, mean batch."),
    ] = None,
    whole_point: Annotated[
        list[str] | None,
        typer.Option("--whole", help="ROUTES,ARRIVALS,WORKERS: whole replicas, three workloads."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy: NAME,KEY=VALUE,...",
            show_default="marginal-cost with tail_power 1 and 16",
        ),
    ] = None,
    per_worker: options.PerWorker = 1000,
    output_tokens: options.Output = 64,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 10,
    seed: options.Seed = 0,
    record: options.Record = None,
    out: options.Out = None,
) -> None:
    """Simulate policies and balancers on every point. Show changes of TPOT and TTFT in percent."""
    texts = policy or ("marginal-cost,tail_power=1", "marginal-cost,tail_power=16")
    parsed = {text: options.policy("--policy", text) for text in texts}
    chosen: dict[str, Callable[[], Policy]] = {
        text: partial(make_policy, name, **parameters) for text, (name, parameters) in parsed.items()
    }
    points = [_point_from_routes(text, per_worker, output_tokens) for text in point or ()]
    points += [part for text in whole_point or () for part in _points_from_whole(text)]
    if not points:
        raise UserInputError("give --point or --whole")
    settings: dict[str, Any] = {"per_worker": per_worker, "output_tokens": output_tokens}
    journal = Journal(record or options.WORK / "tail_price.jsonl", settings)
    each = each_seed(
        Options(seeds=tuple(range(seed, seed + seeds))),
        points,
        lambda case, number: _run(case, chosen, number, journal),
    )
    rows = [row for case, runs in each for row in _rows(case, runs)]
    inputs = settings | {"seeds": seeds, "points": point or [], "whole": whole_point or []}
    inputs["costs"] = [simulated.cost.as_dict() for simulated in points]
    publish("tail_price", rows, inputs=inputs, seed=seed, out=out, notes=_NOTES)
    if record is None:
        journal.remove()


def _parse_files_and_numbers(option: str, text: str, pattern: str) -> tuple[list[Path], list[int]]:
    """Return the files and the numbers of an option's value. Raise UserInputError if it does not match."""
    parts = text.split(",")
    files = [Path(part) for part in parts if not part.isdigit()]
    numbers = [int(part) for part in parts if part.isdigit() and int(part)]
    if [len(files), len(numbers)] != [2, len(pattern.split(",")) - 2]:
        raise UserInputError(f"{option} must be {pattern}, got {text!r}")
    return files, numbers


def _point_from_routes(text: str, per_worker: int, output_tokens: int) -> Point:
    (routes, cost_file), (workers, batch) = _parse_files_and_numbers(
        "--point", text, "ROUTES,COST,WORKERS,BATCH"
    )
    experts, cost = Experts.from_trace(read_calibration_trace(routes)), FittedCost.load(cost_file).cost

    def prepare(seed: int) -> Callable[[Policy], Figures]:
        requests = _requests(experts, cost, workers, batch, workers * per_worker, output_tokens, seed)
        cluster = Cluster(decode=Decode(workers=workers, cost=cost))

        def outcome(policy: Policy) -> Figures:
            policy.update_cost_model(cost)
            return simulate(requests, policy, cluster, experts=experts, seed=seed).summary()

        return outcome

    labels = {"workload": routes.name.removesuffix(".safetensors"), "workers": workers, "batch": batch}
    return Point(labels, cost, {name: partial(make_policy, name) for name in BALANCERS}, prepare)


def _requests(
    experts: Experts, cost: StepCost, workers: int, batch: int, number: int, output_tokens: int, seed: int
) -> Requests:
    """Return Poisson arrivals that keep `batch` requests on each worker if routes are drawn at random."""
    kinds = np.arange(len(experts.domains))
    active = active_experts(experts, kinds, batch, np.random.default_rng(0))
    kv_tokens = float(experts.count_tokens.mean()) + output_tokens / 2  # mean KV tokens of a running request
    step_s = float(cost.seconds(batch, batch * kv_tokens, active))
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(output_tokens * step_s / (workers * batch), number))
    kind = rng.choice(kinds, number)
    return Requests(arrival_s, experts.count_tokens[kind], np.full(number, output_tokens), kind)


def _points_from_whole(text: str) -> list[Point]:
    files, (workers,) = _parse_files_and_numbers("--whole", text, "ROUTES,ARRIVALS,WORKERS")
    inputs = whole.Inputs.read(files[0], files[1], whole.OUR_COST)

    def prepare(name: str, seed: int) -> Callable[[Policy], Figures]:
        return whole.WholeCase(inputs, name, workers, None, seed).outcome

    return [
        Point(
            {"workload": f"whole, {name}", "workers": workers, "batch": whole.BATCH},
            inputs.cost,
            whole.BASELINES,
            partial(prepare, name),
        )
        for name in whole.WORKLOADS
    ]


def _run(
    point: Point, policies: dict[str, Callable[[], Policy]], seed: int, journal: Journal
) -> dict[str, Figures]:
    """Return the figures of each policy in a seed. Those that the journal has are not simulated again."""
    prepare = cache(point.prepare)

    def figures(make: Callable[[], Policy]) -> Figures:
        row = prepare(seed)(make())
        return {key: row[key] for key in _STORED}

    return {
        name: journal.get_or_put(f"{point}, {seed}, {name}", partial(figures, make))
        for name, make in (point.balancers | policies).items()
    }


def _rows(point: Point, runs: Sequence[dict[str, Figures]]) -> list[dict[str, Any]]:
    rows = []
    for name in runs[0]:
        row = point.labels | {"policy": name} | mean([figures_of[name] for figures_of in runs])
        for metric in _METRICS:
            best = [min(figures_of[balancer][metric] for balancer in point.balancers) for figures_of in runs]
            change = paired_ratio_percent([figures_of[name][metric] for figures_of in runs], best)
            key = metric.replace("_ms", "_change_pct")
            row |= dict(zip((key, f"{key}_low", f"{key}_high"), change, strict=True))
        rows.append(row)
    return rows


if __name__ == "__main__":
    run(tail_price)
