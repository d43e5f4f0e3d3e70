"""DIRECTOR's forms and forecasts beside ours at small size: both run on the same input."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.figures import director_forecast, director_forms, shifting
from benchmarks.papers.figures.common import Options
from benchmarks.papers.migration import Links, plan_migration
from offline.expert_placement.alignment import minimise_moves
from tests.support.traces import favourites_trace, save_trace

L, E, RANKS = 3, 16, 4
TRACE_CASES = [(4, 0), (4, 1), (2, 1)]  # GPUs and spare slots


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"each": 12, "num_layers": L, "num_experts": E, "steps": 8, "others": 0.05}
    return save_trace(favourites_trace(("code", "math", "en", "fr"), **shape), tmp_path_factory)


def test_both_forms_place_the_same_workloads(
    few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("GPUS", (4,)), ("RANKS", 2), ("MAX_VARIABLES", 2 * 4 * E)):
        monkeypatch.setattr(director_forms, name, value)
    placed: dict[str, list[np.ndarray]] = {"director_placement": [], "director_paper_placement": []}

    def record(name: str) -> None:
        original = getattr(director_forms, name)

        def place(workload: np.ndarray, **options: Any) -> Any:
            placed[name].append(workload)
            return original(workload, **options)

        monkeypatch.setattr(director_forms, name, place)

    for name in placed:
        record(name)
    rows = director_forms.FIGURES["forms"].run(Options(traces=(few,), seeds=(0, 1)))
    ours, theirs = placed.values()
    assert len(ours) == len(theirs) == 2 * 4  # seeds, cases
    assert all(one is other for one, other in zip(ours, theirs, strict=True))
    assert [row["form"] for row in rows] == ["ours", "Algorithm 1"] * 4
    of_trace, synthetic = rows[:6], rows[6:]
    assert [(row["gpus"], row["spare_slots"]) for row in of_trace[::2]] == TRACE_CASES
    assert {(row["layers"], row["experts"]) for row in of_trace[:4]} == {(2, E)}  # by MAX_VARIABLES
    assert {(row["workload"], row["layers"], row["experts"]) for row in synthetic} == {("synthetic", 1, 128)}
    for row in rows:
        assert row["instances"] == 2
        assert row["latency_above_lp_pct_lowest"] >= -0.01
        assert row["latency_above_lp_pct"] > row["above_budget_pct"]
        assert (row["above_theorem"] > 0) == (row["below_theorem_pct_lowest"] < -1e-4)
        assert row["load_max_over_mean_lowest"] >= 1
        assert 0 <= row["remote_pct_lowest"] <= row["remote_pct_highest"] <= 100
    assert capsys.readouterr().out.count("infeasible") >= len(ours)


def test_a_placement_above_the_bound_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    cluster = shifting.GpuCluster.from_name("H200", RANKS, E)
    tokens = rng.poisson(rng.lognormal(3, 1, (1, 1, E)), (1, RANKS, E)).astype(float)
    measures = director_forms.measure_forms(cluster, tokens, 0)
    monkeypatch.setattr(
        director_forms, "two_maxima_s", lambda *_, **__: 1.0
    )  # a second, far above every bound
    slow = director_forms.measure_forms(cluster, tokens, 0)
    for row in director_forms._rows_of_case({"gpus": RANKS}, [measures, slow]):
        kept = measures[row["form"]]["below_theorem_pct"] >= -1e-4
        assert (row["gpus"], row["instances"], row["above_theorem"]) == (RANKS, 2, 1 if kept else 2)


@settings(max_examples=25)
@given(seed=st.integers(0, 9999), byte_s=st.sampled_from([0.0, 1e-12, 1e-11, 1e-10, 1e-9, 1e-3]))
def test_a_stop_moves_the_layers_that_save_most(seed: int, byte_s: float) -> None:
    rng = np.random.default_rng(seed)
    links = Links(expert_bytes=1e6, near_byte_s=byte_s, far_byte_s=byte_s, commit_s=1e-6)
    cluster = replace(shifting.GpuCluster.from_name("H200", RANKS, E), links=links)
    before, expected = rng.poisson(rng.lognormal(3, 1, (2, L, 1, E)), (2, L, RANKS, E)).astype(float)
    placement, target = cluster.place(before), cluster.place(expected)
    change = shifting.plan_change(cluster, expected, placement, target, overlapped=False)
    new = minimise_moves(placement, target, RANKS)
    now_s, new_s = (cluster.step_s(expected, rows) for rows in (placement, new))
    plan = plan_migration(
        placement,
        new,
        topology=cluster.topology,
        links=links,
        windows_s=cluster.windows_s(expected, placement),
        gain_s=now_s - new_s,
        steps=shifting.STEPS,
    )
    saved_s = [0.0]
    for stop_s in plan.ready_s:
        ready = (plan.placement == new).all(axis=1) & (plan.ready_s <= stop_s)
        moves = sum(bool(ready[move.layer]) for move in plan.moves)
        saved = (now_s - new_s)[ready].sum() * shifting.STEPS
        saved_s.append(saved - stop_s - links.commit_s * moves)
    assert change.saved_s == pytest.approx(max(saved_s), abs=1e-12)
    after_s = cluster.step_s(expected, change.placement)
    assert change.saved_s == pytest.approx(
        (now_s - after_s).sum() * shifting.STEPS - change.stopped_s, abs=1e-12
    )
    assert not change.waits.any()
    assert change.moves == (change.placement != placement).sum()


def test_experts_that_move_in_no_time_need_no_compute_window(few: Path) -> None:
    trace = shifting.read_routes(few)
    links = Links(expert_bytes=1, near_byte_s=0, far_byte_s=0)
    cluster = replace(shifting.GpuCluster.from_name("H200", RANKS, E), links=links)
    batches = shifting.shifting_batches(trace, np.arange(len(trace.ids)), 3, RANKS, 0)
    start = cluster.vanilla(L, E)
    overlapped, stopped = (
        shifting.serve_adaptively(cluster, batches, start, lambda batch: batch.workload, overlapped=overlaps)
        for overlaps in (True, False)
    )
    assert stopped.batch_ms == pytest.approx(overlapped.batch_ms)
    assert stopped.moves.tolist() == overlapped.moves.tolist()
    assert stopped.moves[0] > 0


@given(seed=st.integers(0, 9999), accuracy=st.floats(0, 1))
def test_a_predictor_of_some_accuracy_keeps_every_sum(seed: int, accuracy: float) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, (5, 2, 6)).astype(np.uint32)
    popularity = rng.random((2, 6)) + 0.1
    predicted = director_forecast.predicted_counts(counts, popularity, accuracy)
    assert predicted.sum(axis=2) == pytest.approx(counts.sum(axis=2).astype(float))
    assert director_forecast.predicted_counts(counts, popularity, 1.0) == pytest.approx(counts.astype(float))
    spread = director_forecast.predicted_counts(counts, popularity, 0.0)
    share = popularity / popularity.sum(axis=1, keepdims=True)
    assert spread == pytest.approx(counts.sum(axis=2, keepdims=True) * share)


def test_forecasts_are_compared_with_the_true_workload(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GPUS", RANKS), ("WINDOWS", 4)):
        monkeypatch.setattr(director_forecast, name, value)
    original, accuracies = director_forecast.predicted_counts, []

    def predict(counts: np.ndarray, popularity: np.ndarray, accuracy: float) -> np.ndarray:
        accuracies.append(accuracy)
        return original(counts, popularity, accuracy)

    monkeypatch.setattr(director_forecast, "predicted_counts", predict)
    rows = director_forecast.FIGURES["forecast"].run(Options(traces=(few,), seeds=(0, 1)))
    cascade, replica = director_forecast.ACCURACY.values()
    assert accuracies == [cascade, replica, replica, 1.0] * 4  # seeds, services
    for service in director_forecast.SERVICES:
        of_service = {row["forecast"]: row for row in rows if row["service"] == service}
        true, ours, waiting = (
            of_service[name] for name in ("true workload", "ours", "paper, without errors")
        )
        assert true["wrong_expert_pct"] == true["above_true_pct"] == 0
        assert all(row["wrong_expert_pct"] > 0 for name, row in of_service.items() if name != "true workload")
        assert all(row["load_max_over_mean"] >= 1 for row in of_service.values())
        if service == director_forecast.CONTINUOUS:
            assert waiting["wrong_expert_pct"] > ours["wrong_expert_pct"]
        else:
            assert waiting["wrong_expert_pct"] == pytest.approx(ours["wrong_expert_pct"])
