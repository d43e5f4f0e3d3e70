"""ELDR's figures on signatures, clusters and domains at small size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.figures import eldr_domains, eldr_signatures
from benchmarks.papers.figures.common import Options
from eldr_serve.errors import UserInputError
from eldr_serve.experts.signature import TRANSFORMS
from offline.scenario import read_calibration_trace
from tests.support.traces import favourites_trace, route_file, route_records, save_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide 30 requests of each of three domains, each with a favourite eighth of the experts."""
    shape: dict[str, Any] = {"each": 30, "num_layers": 3, "num_experts": 32, "steps": 12, "others": 0.02}
    return save_trace(favourites_trace(("law", "math", "en"), **shape), tmp_path_factory)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide published routes of two domains."""
    records = route_records("deepseek-v2-lite", each=20, tokens=(80, 120))
    return route_file(tmp_path_factory.mktemp("routes") / "routes.jsonl.gz", records)


def test_each_half_has_half_of_every_domain(trace: Path) -> None:
    requests = read_calibration_trace(trace)
    fit, test = eldr_domains.halves(requests, seed=3)
    assert sorted([*fit, *test]) == list(range(90))
    for part in (fit, test):
        assert np.unique(np.array(requests.domains)[part], return_counts=True)[1].tolist() == [15, 15, 15]
    with pytest.raises(UserInputError, match="one request of law"):
        eldr_domains.halves(requests.subset_without_routes(np.array([0, 40, 41])), seed=3)


def test_requests_are_drawn_in_the_mix(trace: Path) -> None:
    indices = np.arange(10, 90)  # 20, 30 and 30 requests
    requests = read_calibration_trace(trace).subset_without_routes(indices)
    assert eldr_domains.shares(requests, "even") == pytest.approx(dict.fromkeys(("law", "math", "en"), 1 / 3))
    assert eldr_domains.shares(requests, "as recorded") == pytest.approx(
        {"law": 1 / 4, "math": 3 / 8, "en": 3 / 8}
    )
    chat = eldr_domains.shares(requests, "chat")
    assert sorted(chat.values()) == pytest.approx([8.1 / 82.9, 16.6 / 82.9, 58.2 / 82.9])
    assert min(chat, key=chat.__getitem__) == "law"
    among = np.arange(0, 80, 2)
    kinds = eldr_domains.draw_requests(requests, among, "chat", 3000, np.random.default_rng(0))
    assert set(kinds) == set(among)
    names, counts = np.unique(np.array(requests.domains)[kinds], return_counts=True)
    assert dict(zip(names, counts / 3000, strict=True)) == pytest.approx(chat, abs=0.03)


def test_domains_have_a_worst_and_a_best(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eldr_domains, "WORKERS", (3,))
    monkeypatch.setattr(eldr_domains, "MIXES", ("chat",))
    rows = eldr_domains.domains(Options((trace,), requests=240, seeds=(0, 1)))
    assert [row["policy"] for row in rows] == list(eldr_domains.POLICIES)
    reference, *others = rows
    assert {reference[f"{which}_p99_change_pct"] for which in ("worst", "best")} == {0}
    for row in others:
        assert row["best_p50_change_pct"] <= row["worst_p50_change_pct"]
        assert row["best_p50_domain"] in ("law", "math", "en")
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy["marginal-cost"]["active_experts"] < reference["active_experts"]


def test_a_capture_has_tasks_and_languages_in_the_mix_of_chat(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("code", "math", "medical", "legal", "ar", "en", "zh")
    shape: dict[str, Any] = {"each": 12, "num_layers": 2, "num_experts": 32, "steps": 8, "others": 0.02}
    capture = favourites_trace(names, **shape)
    # One German request, which one half would lack, and a language without a share of its own.
    capture = replace(capture, domains=[*capture.domains[:-6], "de", *["ko"] * 5])
    monkeypatch.setattr(eldr_domains, "WORKERS", (2,))
    monkeypatch.setattr(eldr_domains, "LANGUAGE_WORKERS", (3,))
    monkeypatch.setattr(eldr_domains, "MIXES", ("chat",))
    rows = eldr_domains.domains(Options((save_trace(capture, tmp_path_factory),), requests=300, seeds=(0, 1)))
    cases = [(row["workload"], row["workers"]) for row in rows[:: len(eldr_domains.POLICIES)]]
    assert cases == [("task", 2), ("language", 3)]
    languages = eldr_domains.select_workload(capture, "language")
    assert set(languages.domains) == {"ar", "en", "zh"}
    # Arabic and English have equally many requests, but not in chat.
    assert eldr_domains.shares(languages, "chat") == pytest.approx(
        {"en": 58.2 / 82.9, "zh": 16.6 / 82.9, "ar": 8.1 / 82.9}
    )
    kept = np.flatnonzero(np.isin(capture.domains, ("ar", "en", "zh")))
    assert np.array_equal(languages.decode_routes(np.arange(len(kept))), capture.decode_routes(kept))
    with pytest.raises(UserInputError, match="no domain of the trace has 4 requests of the workload 'all'"):
        eldr_domains.select_workload(capture.subset_without_routes(np.array([0, 1])), "all")


def test_other_domains_are_one_workload(trace: Path) -> None:
    requests = read_calibration_trace(trace)
    assert eldr_domains.split_workloads(requests) == {"all": ("en", "law", "math")}
    tasks = ["code", "math", "medical", "legal", "other"]  # as in GPT-OSS-20B's routes
    other = replace(requests, domains=tasks * 18)
    assert eldr_domains.split_workloads(other) == {"all": tuple(sorted(tasks))}
    languages = replace(requests, domains=["zh", "en", "ko"] * 30)
    assert eldr_domains.split_workloads(languages) == {"language": ("en", "zh")}


def test_rare_domains_are_neither_worst_nor_best(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORKERS", (2,)), ("MIXES", ("even",)), ("FEW_SIMULATED", 10**6)):
        monkeypatch.setattr(eldr_domains, name, value)
    rows = eldr_domains.domains(Options((trace,), requests=60))
    assert len(rows) == len(eldr_domains.POLICIES)
    assert all("p50_change_pct" in row and "worst_p50_domain" not in row for row in rows)


def test_signatures_are_measured_on_other_requests(trace: Path) -> None:
    rows = eldr_signatures.signatures(Options((trace,), seeds=(0, 1)))
    assert [row["transform"] for row in rows] == list(TRANSFORMS)
    for row in rows:
        assert 0.3 < row["rho_held_out_all_layers"] < 1
        assert row["rho_held_out_all_layers"] != row["rho_fit_all_layers"]
        assert 1 <= row["layers_kept"] <= row["layers"] == 3


def test_rho_is_measured_by_prompt_length(published: Path, trace: Path) -> None:
    rows = eldr_signatures.prompt_length(Options((published, trace)))
    assert [row["prompt_tokens"] for row in rows] == [16, 32, "all", "all"]
    used = [row["experts_of_nearly_all_pct"] for row in rows[:3]]
    assert used == sorted(used)
    assert [row["tokens_p50"] for row in rows[:2]] == [16, 32]
    assert all(min(row["rho_count"], row["rho_count-idf"]) > 0.5 for row in rows)
    assert rows[2]["rho_count"] > rows[0]["rho_count"]
    assert rows[3]["pearson"] > 0.9


def test_more_starts_are_nearer_to_the_best(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eldr_signatures, "CLUSTERS", (5,))
    rows = eldr_signatures.starts(Options((trace,)))
    above = [row["above_best_mean_pct"] for row in rows]
    assert above == sorted(above, reverse=True)
    assert above[0] > above[-1] >= 0
    assert rows[-1]["cpu_ms"] == pytest.approx(32 * rows[0]["cpu_ms"])


def test_variants_differ_in_one_respect(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eldr_signatures, "WORKERS", (3,))
    rows = eldr_signatures.variants(Options((trace,), requests=240))
    assert [row["arm"] for row in rows] == ["shortest-queue", "marginal-cost", *eldr_signatures.VARIANTS]
    assert rows[0]["p50_change_pct"] == 0
    experts = {row["arm"]: row["active_experts"] for row in rows}
    assert experts["count, band 0"] < experts["shortest-queue"]
