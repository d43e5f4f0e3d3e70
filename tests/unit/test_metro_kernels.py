"""METRO on tensors and in Triton chooses, bit for bit, as the plan in numpy; Triton is interpreted here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.experts.metro import LARGEST, UNIT, MetroPlan, route_metro
from eldr_serve.experts.metro_torch import TorchMetro
from studies.replica_choice import route_optimal


@st.composite
def cases(
    draw: st.DrawFn, *, layers: int = 3, experts: int = 24, ranks: int = 9
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int[N, E] and hosts bool[N, E, G], every expert somewhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(1, layers)), draw(st.integers(1, experts)), draw(st.integers(1, ranks))
    hosts = rng.uniform(size=shape) < draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    n, e = np.indices(shape[:2])
    hosts[n, e, rng.integers(shape[2], size=shape[:2])] = True
    tokens = rng.integers(0, 4, shape[:2]) * (rng.uniform(size=shape[:2]) < draw(st.sampled_from([0.3, 1.0])))
    return tokens, hosts


@given(case=cases())
def test_tensors_choose_as_the_plan(case: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, hosts = case
    rank = TorchMetro(MetroPlan.of(hosts)).route(torch.from_numpy(tokens))
    assert np.array_equal(rank.numpy(), route_metro(tokens, hosts))


@given(case=cases())
def test_the_plan_is_the_greedy_with_shares_turn_by_turn(case: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, hosts = case
    plan = MetroPlan.of(hosts)
    for layer, rank in enumerate(plan.route(tokens)):
        active = np.flatnonzero(tokens[layer]).tolist()
        turns = sorted(active, key=lambda e: (hosts[layer, e].sum(), e))
        load = np.zeros(hosts.shape[2], np.int64)
        for expert in turns:
            later = turns[turns.index(expert) + 1 :]
            expected = load + np.maximum(plan.shares[layer, later], 0).sum(axis=0)
            choice = min(np.flatnonzero(hosts[layer, expert]), key=lambda g: (expected[g], g))
            assert rank[expert] == choice
            load[choice] += UNIT


def test_the_greedy_is_within_three_percent_of_the_optimum_on_average() -> None:
    rng = np.random.default_rng(0)
    hosts = rng.uniform(size=(60, 64, 8)) < 0.12
    hosts[..., 0] |= ~hosts.any(axis=2)
    tokens = (rng.uniform(size=(60, 64)) < 0.5).astype(np.int64)

    def worst(rank: np.ndarray) -> float:
        return float((rank[..., None] == np.arange(8)).sum(axis=1).max(axis=1).mean())

    assert worst(route_metro(tokens, hosts)) <= 1.03 * worst(route_optimal(tokens, hosts))


def test_a_plan_too_large_for_its_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        MetroPlan.of(np.ones((LARGEST // 2 + 1, 2), bool))


@pytest.mark.parametrize(("what", "interpreter"), [("interpret", "1"), ("compile", "0")])
def test_the_triton_kernel_chooses_as_the_plan_and_compiles_for_gpus(what: str, interpreter: str) -> None:
    script = Path(__file__).with_name("metro_interpreted.py")
    path = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script, what],
        env=os.environ | {"TRITON_INTERPRET": interpreter, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
