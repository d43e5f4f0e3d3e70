"""What replays by step are made of, without an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import synthetic_trace

from benchmarks.moe_layer_latency import routes
from benchmarks.rig import replay
from benchmarks.rig.capture import Captured
from benchmarks.rig.replay import Bench, Load, loads_of
from benchmarks.rig.replay_engine import BLOCK, aligned
from offline.cli import BadInput


@given(st.lists(st.integers(0, 99), min_size=1, max_size=200))
def test_aligned_prompts_end_as_they_did_and_fill_blocks_and_one_token(tokens: list[int]) -> None:
    filled = aligned(tokens)
    assert len(filled) % BLOCK == 1
    assert len(filled) >= min(len(tokens), BLOCK + 1)
    assert filled[-len(tokens) :] == tokens
    assert len(filled) < len(tokens) + BLOCK + 1


@given(seed=st.integers(0, 999), batch=st.integers(1, 40), top_k=st.integers(1, 8), more=st.integers(0, 56))
def test_routes_activate_exactly_so_many_experts(seed: int, batch: int, top_k: int, more: int) -> None:
    active = min(top_k + more, batch * top_k)
    ids = routes(batch, active, 64, top_k, np.random.default_rng(seed))
    assert ids.shape == (batch, top_k)
    assert len(np.unique(ids)) == active
    assert all(len(set(token)) == top_k for token in ids.tolist())


def test_loads() -> None:
    assert loads_of("task", "4,8", "16", 5) == [Load("task", 4, 16, 5), Load("task", 8, 16, 5)]
    for groups, workers, batch in (("tasks", "4", "8"), ("task", "four", "8"), ("task", "4", "0")):
        with pytest.raises(BadInput):
            loads_of(groups, workers, batch, 5)


def test_workloads_are_split_without_overlap() -> None:
    data = Captured(synthetic_trace(), [])
    domains = np.array(data.trace.domains)
    data.trace.domains[:3] = ["code", "math", "legal"]
    domains = np.array(data.trace.domains)
    task, language = data.group("task"), data.group("language")
    assert set(domains[task]) <= {"code", "math", "medical", "legal"}
    assert sorted([*task, *language]) == sorted(data.group("all")) == list(range(len(domains)))
    fit, rest = data.split("all", 0.4, 1)
    assert not set(fit) & set(rest)
    assert len(fit) == round(0.4 * len(domains))
    assert data.trace.subset(fit).ids == [data.trace.ids[i] for i in fit]


def test_a_table_of_gate_scores_is_that_of_counts_where_the_scores_are_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = synthetic_trace()
    scores = {"gate-prob": trace.prefill_counts.astype(np.float32)}
    monkeypatch.setattr(replay, "gate_scores", lambda tokens, work: scores)
    bench = Bench.__new__(Bench)
    bench.data, bench._seed, bench._work = Captured(trace, []), 0, Path()
    fit = np.arange(0, len(trace.ids), 2)
    by_scores, by_counts = (bench._table(fit, 3, True, name) for name in ("gate-prob", "count"))
    assert by_scores.spec.layers.tolist() == by_counts.spec.layers.tolist()
    assert np.array_equal(by_scores.centroids, by_counts.centroids)
