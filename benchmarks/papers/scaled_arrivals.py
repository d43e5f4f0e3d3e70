"""Recorded arrivals, resampled for any number of workers so that the load of each is the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib.active_experts import active_experts
from eldr_serve.scheduling import StepCost
from loadgen.statistics import LatencyObjective
from loadgen.traces import read_arrival_trace
from offline.scenario import ArrivalTrace, PolicyChoice, Scenario, ScenarioInputs, routes_of
from offline.simulation.cluster import Cluster, Decode

BASE = "shortest-queue"


@dataclass(frozen=True)
class StudySettings:
    """All settings of the simulations except workers, policies and seeds.

    Attributes:
        batch: requests that a worker runs on average if they are spread at random.
        seconds: simulated time of arrivals in seconds.
        parts: observed requests of a domain that make up a simulated one. See `offline.scenario.Routes`.
        centroids: clusters of the table.
        ttft_ms: objective, from arrival at the router (prompts arrive prefilled).
        slack: objective of TPOT, as a multiple of the step time at `batch`.
    """

    routes: Path
    cost: StepCost
    batch: int
    seconds: float
    parts: int
    centroids: int
    ttft_ms: float
    slack: float


@dataclass(frozen=True)
class WorkerLoad:
    """The load of one worker, and its latency objective.

    Attributes:
        rate_per_s: requests/s per worker.
        step_ms: step time at the wanted batch.
    """

    rate_per_s: float
    step_ms: float
    objective: LatencyObjective


def load_at_batch(study: StudySettings, arrivals: Path) -> WorkerLoad:
    """Return the load at which a worker runs the wanted batch of random routes, by Little's law."""
    # The kinds of requests and their experts do not depend on the workers and the rate.
    inputs = ScenarioInputs(scenario_of(study, arrivals, 16, 100.0), seed=0)
    assert inputs.experts is not None
    records = read_arrival_trace(arrivals)
    prompt, output = np.array([(r.prompt_tokens, r.output_tokens) for r in records]).T
    context = float(np.average(prompt + output / 2, weights=output))  # mean context of a running request
    kinds, rng = np.unique(inputs.requests.kind), np.random.default_rng(0)
    active = active_experts(inputs.experts, kinds, study.batch, rng)
    step_s = float(study.cost.seconds(study.batch, study.batch * context, active))
    rate = study.batch / (float(output.mean()) * step_s)
    return WorkerLoad(rate, 1e3 * step_s, LatencyObjective(study.ttft_ms, 1e3 * study.slack * step_s))


def scenario_of(study: StudySettings, arrivals: Path, workers: int, rate_per_s: float) -> Scenario:
    """Return a scenario in which all workers together get `rate_per_s` requests/s."""
    experts = routes_of(study.routes).model_copy(
        update={"parts": study.parts, "centroids": study.centroids, "fit_share": 0.3}
    )
    return Scenario(
        cluster=Cluster(decode=Decode(workers=workers, cost=study.cost), handover_fixed_s=5e-3),
        arrivals=ArrivalTrace(
            kind="trace",
            path=arrivals,
            rate_per_s=rate_per_s,
            requests=max(2, round(rate_per_s * study.seconds)),
        ),
        experts=experts,
        policies=(PolicyChoice(name=BASE),),
    )
