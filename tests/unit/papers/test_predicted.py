"""The study of predicted signatures at small size: held-out requests and expected results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import signature_methods
from benchmarks.papers.figures import predicted, predicted_signatures
from benchmarks.papers.figures.common import Options
from benchmarks.papers.reproduce import reproduce
from tests.support.in_process import command, sentence
from tests.support.traces import favourites_trace


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, observed: Path) -> Options:
    for name, value in {"SIZES": (20, 40), "USUAL": 40, "WORKERS": (4,), "LEARNT": 80}.items():
        monkeypatch.setattr(predicted, name, value)
        monkeypatch.setattr(predicted_signatures, name, value, raising=False)
    monkeypatch.setattr(predicted, "GROUPS", ("all", "task"))
    return Options((observed,), requests=240, seeds=(0, 1))


def test_measured_requests_are_not_in_the_fit(small: Options) -> None:
    trace = predicted_signatures.prompts_of(small).trace
    for group in ("all", "language", "task"):
        parts = [predicted_signatures.fit_and_test(trace, group, size, seed=3) for size in (20, 40)]
        (few, _), (more, test) = parts
        assert set(few) < set(more)
        assert not set(more) & set(test)
        assert (parts[0][1] == test).all()
    among = predicted_signatures.members_of_group(trace, "all")
    domains = predicted_signatures.members_by_domain(trace, among)
    assert sorted(np.concatenate(domains)) == sorted(among)
    assert all(len({trace.domains[i] for i in part}) == 1 for part in domains)


@pytest.mark.slow
def test_every_method_recognises_the_domain(small: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "GROUPS", ("all",))
    rows = predicted.methods(small)
    served = "served predictor, rank 64"
    row_by_method = {row["method"]: row for row in rows if row["workload"] == "all" and row["prompts"] == 40}
    assert served in row_by_method
    assert row_by_method["prefill"]["prefill_gain"] == pytest.approx(1)
    for method, row in row_by_method.items():
        assert row["decode_cosine"] > 0.5, method
        assert row["cluster_experts_pct"] < -10, method
        assert row["decode_cosine_lowest"] <= row["decode_cosine"] <= row["decode_cosine_highest"]
    sizes = {row["prompts"] for row in rows if row["method"] == served}
    assert sizes == {20, 40}


def test_predicted_signatures_improve_placement(small: Options) -> None:
    rows = predicted.placement(small)
    for row in rows:
        assert row["p50_change_pct"] < -3, row["signature"]
    true = [row for row in rows if row["signature"] == "true prefill"]
    assert {row["p50_share_of_gain_pct"] for row in true} == {100}


def test_an_answer_of_one_token_is_not_in_the_tpot(small: Options) -> None:
    trace = predicted_signatures.prompts_of(small).trace
    num_removed = int(trace.route_offsets[1]) - 1
    steps, offsets = trace.decode_steps.copy(), trace.route_offsets.copy()
    steps[0] = 1
    offsets[1:] -= num_removed
    counts = trace.decode_counts.copy()
    counts[0] = 0
    np.put_along_axis(counts[0], trace.routes[0].astype(np.int64), 1, axis=1)
    routes = np.delete(trace.routes, slice(1, 1 + num_removed), axis=0)
    cut = replace(trace, decode_counts=counts, decode_steps=steps, routes=routes, route_offsets=offsets)
    signatures = {"true prefill": cut.prefill_counts.astype(np.float32)}
    figures = predicted._simulate_policies(cut, signatures, np.arange(100), 4, small, 0, in_order=True)
    assert all(np.isfinite(list(times.values())).all() for times in figures.values())


def test_the_previous_turn_is_another_prompt_of_the_domain() -> None:
    shape = {"each": 4, "num_layers": 2, "num_experts": 16, "steps": 4, "others": 0.05}
    prompts = signature_methods.Prompts.from_trace(favourites_trace(("a", "b"), **shape))
    alone = np.array([0, 1, 2, 4])
    test = prompts[alone if len(set(np.array(prompts.trace.domains)[alone])) == 2 else alone + 1]
    predictions = signature_methods.previous_turn(prompts, test)
    domains = np.array(test.trace.domains)
    for number, domain in enumerate(domains):
        mates = test.frequencies[(domains == domain) & (np.arange(len(domains)) != number)]
        expected = mates if len(mates) else prompts.frequencies.mean(axis=0)[None]
        assert any(np.array_equal(predictions[number], row) for row in expected)


def test_a_share_of_the_gain_is_paired_by_seed() -> None:
    true = [-10.0, -20.0, -40.0]
    same = predicted._share("s", [-9.0, -18.0, -36.0], true)
    assert list(same) == ["s", "s_ci_low", "s_ci_high"]
    assert list(same.values()) == pytest.approx([90, 90, 90])  # all differences between seeds give the same
    other = predicted._share("s", [-10.0, -10.0, -40.0], true)
    assert other == pytest.approx({"s": 600 / 7, "s_ci_low": 50, "s_ci_high": 100})
    assert predicted._share("s", [-1.0], [-2.0]) == {"s": 50}
    assert predicted._share("s", [-1.0, 1.0], [-0.5, 0.5]) == {"s": None}


def test_online_learning_follows_a_shift_that_a_frozen_fit_misses(small: Options) -> None:
    rows = [row for row in predicted.shift(small) if row["workload"] == "task"]
    cosine = {row["signature"]: row["first_100_cosine"] for row in rows}
    assert cosine["online"] > cosine["frozen"] + 0.1
    assert cosine["true prefill"] == pytest.approx(1)


def test_a_domain_outside_the_fit_is_predicted_worse(small: Options) -> None:
    rows = [row for row in predicted.held_out(small) if row["workload"] == "task"]
    change = {row["signature"]: row["p50_change_pct"] for row in rows}
    assert change["predicted, own domain seen"] < change["predicted, own domain not seen"]


def test_a_trace_without_token_ids_is_refused(observed: Path, tmp_path: Path) -> None:
    from eldr_serve.experts.calibration_trace import CalibrationTrace

    bare = tmp_path / "bare.safetensors"
    replace(CalibrationTrace.load(observed), token_ids=None).save(bare)
    message = sentence(command(reproduce, "predicted", "methods", trace=bare, out=tmp_path / "x.json"))
    assert "no routes or no token ids" in message


@pytest.mark.slow
def test_a_bag_of_embeddings_learns_and_repeats() -> None:
    shape = {"each": 30, "num_layers": 2, "num_experts": 16, "steps": 10, "others": 0.05}
    prompts = signature_methods.Prompts.from_trace(favourites_trace(("a", "b"), **shape))
    fit, test = prompts[np.arange(0, 60, 2)], prompts[np.arange(1, 60, 2)]
    predictions = [signature_methods.bag_of_embeddings(fit, test) for _ in range(2)]
    np.testing.assert_array_equal(*predictions)
    mean = fit.frequencies.mean(axis=0)
    error, of_mean = (np.square(guess - test.frequencies).sum() for guess in (predictions[0], mean))
    assert error < 0.7 * of_mean
