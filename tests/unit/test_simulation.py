"""The simulated decode workers against a plain reading of the same rules."""

from __future__ import annotations

import numpy as np
import pytest

from eldr_serve.routing import Handoff, StepCost, make_policy
from eldr_serve.simulation.decode import Job, expert_bits, simulate

COST = StepCost(1.0, 0.1, 0.001, 0.01)
L, E, TOP_K = 2, 70, 3


def jobs(n: int, seed: int = 0, gap_s: float = 2.0) -> tuple[list[Job], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    routes = [
        np.stack([[rng.choice(E, TOP_K, replace=False) for _ in range(L)] for _ in range(rng.integers(1, 9))])
        for _ in range(n)
    ]
    arrivals = np.cumsum(rng.exponential(gap_s, n))
    return [
        Job(Handoff(f"r{i}", None, 10 + i, len(r)), float(t), expert_bits(r, E))
        for i, (r, t) in enumerate(zip(routes, arrivals, strict=True))
    ], routes


def test_bits_are_the_experts() -> None:
    _, (routes, *_) = jobs(1)
    bits = expert_bits(routes, E).reshape(len(routes), L, 2)
    for step, layers in enumerate(routes):
        for layer, chosen in enumerate(layers):
            found = {e for e in range(E) if int(bits[step, layer, e // 64]) >> (e % 64) & 1}
            assert found == set(chosen.tolist())


def test_one_worker_step_by_step() -> None:
    work, routes = jobs(6)
    outcome = simulate(work, make_policy("shortest-queue"), 1, COST, max_batch=2)
    now, running, waiting, done = 0.0, [], list(range(6)), [0] * 6
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while running or waiting:
        if not running:
            now = max(now, work[waiting[0]].arrival_s)
        while waiting and len(running) < 2 and work[waiting[0]].arrival_s <= now:
            running.append(waiting.pop(0))
        experts = sum(len({e for j in running for e in routes[j][done[j]][layer]}) for layer in range(L))
        now += COST.seconds(len(running), sum(10 + j + done[j] for j in running), experts)
        for j in list(running):
            first.setdefault(j, now)
            last[j] = now
            done[j] += 1
            if done[j] == len(routes[j]):
                running.remove(j)
    assert outcome.first_s == pytest.approx([first[j] for j in range(6)])
    assert outcome.last_s == pytest.approx([last[j] for j in range(6)])


def test_same_seed_same_run_and_no_job_is_lost() -> None:
    work, _ = jobs(80, seed=1, gap_s=0.3)
    runs = [simulate(work, make_policy("random"), 3, COST, seed=5) for _ in range(2)]
    assert np.array_equal(runs[0].last_s, runs[1].last_s)
    assert set(runs[0].worker) == {0, 1, 2}
    assert runs[0].batch.sum() == sum(len(job.steps) for job in work)
    assert np.all(runs[0].last_s >= runs[0].first_s)
    assert np.isnan(runs[0].tpot_s).sum() == sum(len(job.steps) == 1 for job in work)
