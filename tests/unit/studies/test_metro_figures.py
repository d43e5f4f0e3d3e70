"""METRO's figures at small size: what they must show, whatever the machine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr_serve.artifacts import CalibrationTrace
from offline.placement.cost import LayerWork
from studies.figures import metro
from studies.figures.common import Options
from tools.cli import BadInput

L, E, TOP_K, STEPS, N = 2, 32, 4, 5, 40


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Requests that prefer the experts of low number."""
    rng = np.random.default_rng(0)
    weight = 1 / (8 + np.arange(E))
    weight /= weight.sum()
    routes = np.array(
        [[rng.choice(E, TOP_K, replace=False, p=weight) for _ in range(L)] for _ in range(N * STEPS)],
        np.uint8,
    )
    counts = (
        (routes.reshape(N, STEPS, L, TOP_K)[..., None] == np.arange(E)).sum(axis=(1, 3)).astype(np.uint32)
    )
    tokens = np.full(N, STEPS, np.uint32)
    trace = CalibrationTrace(
        "tiny", TOP_K, counts, counts, tokens, tokens, [""] * N, [f"r{n}" for n in range(N)],
        routes, np.arange(N + 1) * STEPS,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    trace.save(path)
    return Options((path,), requests=10, seeds=(0, 1))


def test_the_example_is_the_papers() -> None:
    for row in metro.figure_4(Options()):
        assert row["most_activated_of_a_rank"] == row["paper_most_activated"]
        assert row["most_tokens_of_a_rank"] == 2


@pytest.mark.parametrize("routing", ["even", "greedy", "metro", "optimum"])
def test_every_routing_serves_every_token_where_its_expert_is(options: Options, routing: str) -> None:
    half = metro.Source.read(options.traces[0], 0)
    plan = half.plan(1.5)
    tokens = half.batches(16, 5, 0)
    assert (tokens.sum(axis=2) == 16 * TOP_K).all()
    served = metro.served(routing, plan, tokens)
    assert np.array_equal(served.sum(axis=-1), tokens)
    assert not served[:, plan.shares < 0].any()
    replicas = (served > 0).sum(axis=-1)
    assert routing == "even" or (replicas <= 1).all()


def test_held_out_requests_are_not_those_that_placed_the_experts(options: Options) -> None:
    half = metro.Source.read(options.traces[0], 0)
    assert not set(half.fit) & set(half.test)
    assert len(half.fit) + len(half.test) == N


def test_figure_8_has_metro_between_the_optimum_and_eplb(options: Options) -> None:
    for row in metro.figure_8(options):
        assert row["optimum"] <= row["metro"] <= row["even"]
        assert row["optimum"] <= row["greedy"] <= row["even"]
        assert row["metro_above_optimum_pct"] <= 10.9
    assert max(row["metro_below_even_pct"] for row in metro.figure_8(options)) > 20


def test_figure_5_has_eplb_activate_more_with_every_replica(options: Options) -> None:
    rows = metro.figure_5(options)
    for a, b in pairwise(rows):
        if a["batch_a_rank"] == b["batch_a_rank"]:
            assert b["most_activated"] > a["most_activated"]
            assert b["tpot_pct"] > a["tpot_pct"]


def test_figures_9_and_11_pay_for_the_decision(options: Options) -> None:
    most = [row for row in metro.figure_9(options) if row["replication"] == 1.5]
    assert all(row["tpot_pct"] < 0 < row["tokens_per_s_pct"] for row in most)
    for row in metro.figure_11(options):
        assert row["layer_us"] == pytest.approx(row["rest_us"] + row["decide_us"] + row["ffn_us"])
        assert (row["decide_us"] > 0) == (row["routing"] == "metro")


def test_figure_12_has_fronts_on_which_nobody_beats_anybody(options: Options) -> None:
    rows = metro.figure_12(options)
    fronts: dict[Any, list[Any]] = {}
    for row in rows:
        fronts.setdefault((row["replication"], row["routing"]), []).append(row)
    for (_, routing), front in fronts.items():
        assert all(
            a["tpot_ms"] < b["tpot_ms"] and a["tokens_per_s"] < b["tokens_per_s"] for a, b in pairwise(front)
        )
        if routing == "even":
            assert {row["times_eplb"] for row in front} == {1.0}


def test_a_bed_has_the_bytes_and_flops_of_its_model(options: Options) -> None:
    trace = metro.Source.read(options.traces[0], 0).trace
    cost = metro.A100.cost(trace)
    all_of_a_layer = LayerWork(*(np.array([float(x)]) for x in (E, TOP_K, 0, 0)))
    weights = 3 * 2048 * 768
    expected = 2 * weights * 128 / metro.A100.bytes_per_s + 2 * weights * 8 / metro.A100.flop_per_s
    assert cost.rank_s(all_of_a_layer)[0] == pytest.approx(expected)


def test_a_trace_is_needed() -> None:
    with pytest.raises(BadInput, match="give --trace"):
        metro.figure_8(Options())


def test_plots_are_drawn(options: Options, tmp_path: Path) -> None:
    for name in ("fig8", "fig12"):
        figure = metro.FIGURES[name]
        assert figure.plot is not None
        figure.plot(figure.run(options), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
