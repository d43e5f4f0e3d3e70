"""The simulator's predictions of the trials; its decode workers also step together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from benchmarks.lib.barrier.steps import RankSteps
from benchmarks.lib.barrier.trial import ClosedLoop
from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import Policy, StepCost
from offline.simulation.cluster import Cluster
from offline.simulation.requests import Requests
from offline.simulation.run import simulate

_MIN_STEPS = 30


@dataclass(frozen=True)
class BarrierPrediction:
    """Simulated figures of the requests and steps of the measured period.

    Attributes:
        tpot_ms: float64[n].
        spread, imbalance: means over steps, KV tokens.
    """

    tpot_ms: Floats
    spread: float
    imbalance: float


def fit_cost(all_steps: Sequence[RankSteps]) -> StepCost:
    """Fit the time of a step, linear in requests and KV tokens of the rank with the most KV tokens."""
    timed = [_timed_steps(steps) for steps in all_steps]
    requests, kv_tokens, seconds = (np.concatenate(columns) for columns in zip(*timed, strict=True))
    if len(seconds) < _MIN_STEPS:
        raise UserInputError(f"{len(seconds)} steps do not determine their time: make trials longer")
    fullest = kv_tokens.argmax(axis=1)[:, None]
    columns = [np.take_along_axis(column, fullest, axis=1)[:, 0] for column in (requests, kv_tokens)]
    features = np.column_stack([np.ones(len(seconds)), *columns])
    scale = features.max(axis=0)
    fixed_s, per_request_s, per_kv_token_s = (nnls(features / scale, seconds)[0] / scale).tolist()
    return StepCost(fixed_s, per_request_s, per_kv_token_s, per_expert_s=0.0)


def fit_handover_s(all_steps: Sequence[RankSteps], slots: int, mean_output: float) -> float:
    """Return the time of a hand-over: how long a slot is empty for each request, by Little's law.

    Args:
        all_steps: steps under policies with a decode queue, which send a request when a slot is free. Without
            the queue, the next request is already at the engine.
        slots: requests that a rank runs at once.
        mean_output: mean tokens of an answer.
    """
    empty_s = tokens = 0.0
    for requests, _, seconds in map(_timed_steps, all_steps):
        empty_s += float(((slots - requests) * seconds[:, None]).sum())
        tokens += float(requests.sum())  # each request of a step gets one
    return empty_s * mean_output / tokens if tokens else 0.0


def _timed_steps(steps: RankSteps) -> tuple[Ints, Ints, Floats]:
    """Return requests int64[S,G], KV tokens int64[S,G] and seconds float64[S] of steps with known times."""
    timed = np.isfinite(steps.seconds)
    return steps.requests[timed], steps.kv_tokens[timed], steps.seconds[timed]


def predict(
    make: Callable[[], Policy], lengths: Ints, load: ClosedLoop, cluster: Cluster, requests: int, seed: int
) -> BarrierPrediction:
    """Simulate a trial.

    Args:
        make: returns a new policy.
        lengths: int64[N,2], prompt and output tokens of the trial's requests, which repeat.
        requests: number of requests to simulate, more than can end in a trial.
    """
    prompt, output = np.resize(lengths, (requests, 2)).T
    policy = make()
    policy.update_cost_model(cluster.decode.cost)
    # Clients send the length of an answer as max_tokens.
    sent = Requests(np.zeros(requests), prompt, output, max_new_tokens=output)
    outcome = simulate(sent, policy, cluster, in_flight=load.in_flight, seed=seed)
    sampled, ended = (
        (times >= load.warm_up_s) & (times < load.warm_up_s + load.seconds)
        for times in (outcome.sample_s, outcome.last_s)
    )
    return BarrierPrediction(
        1e3 * outcome.tpot_s[ended],
        float(outcome.spread[sampled].mean()),
        float(outcome.imbalance[sampled].mean()),
    )
