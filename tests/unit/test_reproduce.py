"""Reproduced figures at small size: what they must show, whatever the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from eldr_serve.artifacts import CalibrationTrace
from offline.scenario import Work
from studies.figures import balanceroute, eldr, eldr_parallel
from studies.figures.common import Options
from studies.reproduce import reproduce
from tools.cli import bad_input_exits

L, E, TOP_K, STEPS = 3, 32, 2, 20
DOMAINS = ("code", "math", "medical", "legal", "en", "fr")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 requests a domain, each domain with a favourite eighth of the experts."""
    rng = np.random.default_rng(0)
    domains = [d for d in DOMAINS for _ in range(60)]
    routes = []
    for n, _ in enumerate(domains):
        weights = np.full(E, 0.02)
        weights[4 * (n // 60) : 4 * (n // 60) + 4] = 1
        weights /= weights.sum()
        routes.append(
            np.stack(
                [[rng.choice(E, TOP_K, replace=False, p=weights) for _ in range(L)] for _ in range(2 * STEPS)]
            )
        )
    kept = np.stack(routes).astype(np.uint8)  # [N, T, L, k]

    def counts(part: np.ndarray) -> np.ndarray:
        return (part[..., None] == np.arange(E)).sum(axis=(1, 3)).astype(np.uint32)

    tokens = np.full(len(domains), STEPS, np.uint32)
    trace = CalibrationTrace(
        "tiny", TOP_K, counts(kept[:, :STEPS]), counts(kept[:, STEPS:]), tokens, tokens, domains,
        [f"r{n}" for n in range(len(domains))], kept[:, STEPS:].reshape(-1, L, TOP_K),
        np.arange(len(domains) + 1) * STEPS,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    trace.save(path)
    return path


@pytest.fixture(scope="module")
def arrivals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A request trace with prompts and answers of very different lengths."""
    rng = np.random.default_rng(1)
    lines = ["timestamp_s,prompt_tokens,output_tokens"]
    times = np.cumsum(rng.exponential(0.2, 4000))
    for at, prompt, output in zip(
        times, rng.lognormal(6.5, 1, 4000), rng.lognormal(3.5, 0.7, 4000), strict=True
    ):
        lines.append(f"{at:.3f},{int(prompt) + 1},{int(output) + 1}")
    path = tmp_path_factory.mktemp("arrivals") / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[k] == v for k, v in wanted.items())]
    return row


def test_without_arguments_it_lists_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce()
    said = capsys.readouterr().out
    for name in (*eldr.FIGURES, *eldr_parallel.FIGURES, *balanceroute.FIGURES):
        assert f"  {name}" in said


def test_balance_routes_balance(arrivals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanceroute, "SLOTS", 8)
    out = tmp_path / "table1.json"
    reproduce("balanceroute", "table1", trace=[arrivals], requests=2000, out=out)
    rows = json.loads(out.read_text())["rows"]
    baselines = [row for row in rows if row["method"] in balanceroute.BASELINES]
    ours = [row for row in rows if row["method"].startswith("balance-route")]
    assert (len(baselines), len(ours)) == (5, 4)
    assert max(r["imbalance_tokens"] for r in ours) < min(r["imbalance_tokens"] for r in baselines)
    # A tail of 100 requests: single policies may change places.
    assert np.mean([r["tpot_p95_ms"] for r in ours]) < np.mean([r["tpot_p95_ms"] for r in baselines])
    assert min(r["output_tokens_per_s"] for r in ours) > max(r["output_tokens_per_s"] for r in baselines)
    assert of(rows, method="shortest-queue")["imbalance_below_jsq"] == 1
    assert of(rows, method="shortest-queue")["paper_imbalance"] == 104_737


def test_the_oracle_of_lengths_is_the_best_predictor(arrivals: Path) -> None:
    rows = balanceroute.table3(Options((arrivals,)))
    assert {row["predictor"] for row in rows} == {"survival", "prompt-keyed", "boosted-trees"}
    for row in rows:
        assert 0.5 < row["auc"] <= 1
        assert 0 < row["mae_tokens"] < 40


def test_the_imbalance_over_time_is_measured(arrivals: Path) -> None:
    options = Options((arrivals,), requests=600)
    panels = balanceroute.panels(options)
    assert {row["method"] for row in panels} == {
        "shortest-queue", "balance-route", "balance-route-horizon, survival",
    }  # fmt: skip


def test_a_placement_of_its_own_lightens_a_worker_s_slowest_rank(
    observed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A domain's favourites are neighbours, so that in order of ids one rank holds them all."""
    monkeypatch.setattr(eldr_parallel, "RATES", (20,))
    monkeypatch.setattr(eldr_parallel, "OUTPUT_TOKENS", 48)
    rows = eldr_parallel.expert_parallel(Options((observed,), requests=200))
    assert {row["workload"] for row in rows} == {"task", "language"}
    for workload in ("task", "language"):
        experts = {
            placement: of(rows, workload=workload, policy="locality-band", placement=placement)[
                "active_experts"
            ]
            for placement in ("linear", "one for all", "own")
        }
        assert experts["own"] < experts["one for all"] < experts["linear"]


def test_what_a_placement_is_fitted_on_does_not_run(observed: Path) -> None:
    scenario = eldr_parallel._scenario(Options((observed,), requests=200), (), 20, 0)
    work = Work(scenario, 0)
    assert len(work.fitted_on)
    assert not set(work.fitted_on) & set(work.requests.kind)


def test_locality_saves_experts_at_every_rate(observed: Path) -> None:
    rows = eldr._swept(Options((observed,), requests=400), [8], (60,), ("round-robin", "marginal-cost"))
    for workload in ("task", "language"):
        row = of(rows, workload=workload, policy="marginal-cost")
        assert row["active_experts_change_pct"] < -10
        assert row["tpot_p50_change_pct"] < 0
        assert of(rows, workload=workload, policy="round-robin")["tpot_p50_change_pct"] == 0


def test_a_stale_table_hurts_after_a_drift_and_a_refit_mends_it(observed: Path) -> None:
    rows = eldr.drift(Options((observed,), requests=800))
    stale = of(rows, case="locality-band, no refit")["after_tpot_p50_ms"]
    assert of(rows, case="locality-band, refit")["after_tpot_p50_ms"] < stale
    assert of(rows, case="marginal-cost")["after_tpot_p50_ms"] < stale


def test_prefix_caches_shorten_ttft_and_leave_locality_alone(observed: Path) -> None:
    rows = eldr.prefix_cache(Options((observed,), requests=600))
    on, off = (of(rows, prefix_cache=cached, policy="marginal-cost") for cached in (True, False))
    assert on["prefix_hit_tokens"] > 0
    assert off["prefix_hit_tokens"] == 0
    assert on["ttft_p50_ms"] < off["ttft_p50_ms"]
    assert on["tpot_p50_change_pct"] < 0


def test_workers_that_come_are_used(observed: Path) -> None:
    rows = eldr.scaling(Options((observed,), requests=600))
    assert len(rows) == 8
    more = of(rows, workload="16 to 24 workers", case="marginal-cost")
    fewer = of(rows, workload="16 to 8 workers", case="marginal-cost")
    assert more["after_tpot_p50_ms"] <= more["before_tpot_p50_ms"] * 1.05
    assert fewer["after_tpot_p50_ms"] > more["after_tpot_p50_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paper": "nobody"}, "unknown paper 'nobody'; there are eldr, balanceroute"),
        ({"paper": "eldr", "figure": "x"}, "eldr has no figure 'x'; there are rates"),
        ({"paper": "eldr", "figure": "rates"}, "give one --trace"),
        ({"paper": "balanceroute", "figure": "table1"}, "give --trace"),
    ],
)
def test_bad_input_gets_one_sentence(
    arguments: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(typer.Exit):
        bad_input_exits(reproduce)(**arguments, out=tmp_path / "x.json")
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "x.json").exists()
