"""Reproduced figures at small size: results that hold on every machine."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.figures import (
    balanceroute,
    balanceroute_proxy,
    director,
    eldr,
    eldr_parallel,
    grace,
    grace_forms,
    shifting,
    together,
)
from benchmarks.papers.figures.common import Options
from benchmarks.papers.reproduce import reproduce
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from offline.expert_placement.grace_paper import polling_weights_as_written
from offline.scenario import ScenarioInputs
from tests.support.in_process import command, sentence
from tests.support.traces import favourites_trace, save_trace, synthetic_trace

DOMAINS = ("code", "math", "medical", "legal", "en", "fr")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide 60 requests of each domain, which has a favourite eighth of the experts."""
    shape = {"each": 60, "num_layers": 3, "num_experts": 32, "steps": 20, "others": 0.02}
    return save_trace(favourites_trace(DOMAINS, **shape), tmp_path_factory)


@pytest.fixture(scope="module")
def arrivals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a request trace with prompts and answers of very different lengths."""
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(0.2, 4000))
    prompts, outputs = (rng.lognormal(*shape, 4000).astype(int) + 1 for shape in ((6.5, 1), (3.5, 0.7)))
    rows = zip(times, prompts, outputs, strict=True)
    path = tmp_path_factory.mktemp("arrivals") / "trace.csv"
    lines = (f"{at:.3f},{prompt},{output}\n" for at, prompt, output in rows)
    path.write_text("timestamp_s,prompt_tokens,output_tokens\n" + "".join(lines))
    return path


def row_of(rows: list[dict[str, Any]], **columns: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[k] == v for k, v in columns.items())]
    return row


def test_without_arguments_it_lists_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce()
    output = capsys.readouterr().out
    for name in (*eldr.FIGURES, *eldr_parallel.FIGURES, *balanceroute.FIGURES):
        assert f"  {name}" in output


def test_balance_routes_reduce_imbalance(
    arrivals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balanceroute, "SLOTS", 8)
    monkeypatch.setattr(balanceroute, "TABLE_1_WORKERS", (16,))
    out = tmp_path / "table1.json"
    reproduce("balanceroute", "table1", trace=[arrivals], requests=2000, out=out)
    rows = json.loads(out.read_text())["rows"]
    baselines = [row for row in rows if row["method"] in balanceroute.BASELINES]
    ours = [row for row in rows if row["method"].startswith("balance-route")]
    assert (len(baselines), len(ours)) == (5, 4)
    assert max(r["imbalance_tokens"] for r in ours) < min(r["imbalance_tokens"] for r in baselines)
    # The tail has 100 requests, so single policies may swap their order.
    assert np.mean([r["tpot_p95_ms"] for r in ours]) < np.mean([r["tpot_p95_ms"] for r in baselines])
    assert min(r["output_tokens_per_s"] for r in ours) > max(r["output_tokens_per_s"] for r in baselines)
    assert row_of(rows, method="shortest-queue")["imbalance_below_jsq"] == 1
    assert row_of(rows, method="shortest-queue")["spread_below_jsq"] == 1
    assert max(r["spread_tokens"] for r in ours) < min(r["spread_tokens"] for r in baselines)


def test_the_papers_columns_are_beside_the_papers_number_of_workers() -> None:
    keys = ("imbalance_tokens", "spread_tokens", "tpot_p95_ms", "output_tokens_per_s")
    figures = dict.fromkeys((*keys, "ttft_p50_ms", "ttft_p99_ms"), 2.0)
    means = {"shortest-queue": figures, "balance-route": figures | {"spread_tokens": 1.0}}
    tables = (balanceroute.PAPER_TABLE_1[8], {}, balanceroute.PAPER_TABLE_2[16])
    rows = [row_of(balanceroute._rows("t", 8, means, table), method="balance-route") for table in tables]
    assert [row["spread_below_jsq"] for row in rows] == [2, 2, 2]
    assert rows[0]["paper_below_jsq"] == pytest.approx(104_737 / 54_051)
    assert rows[1]["paper_below_jsq"] is None
    assert rows[2]["paper_below_jsq"] == pytest.approx(3.1, abs=0.05)


def test_each_of_balanceroutes_tables_has_the_papers_workers(
    arrivals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[list[int], int]] = []

    def compare(_: Options, sizes: Any, arms: Any, paper: Any = balanceroute.PAPER_TABLE_1) -> list[Any]:
        compared.append((list(sizes), len(paper)))
        return []

    monkeypatch.setattr(balanceroute, "_compare", compare)
    for name in ("table1", "table2", "sensitivity", "forms"):
        balanceroute.FIGURES[name].run(Options((arrivals,)))
    assert compared == [([4, 8, 16], 1), ([4, 8, 16, 32], 3), ([8, 16], 1), ([8, 16], 1)]
    balanceroute.large(Options((arrivals,)))
    assert compared[-1][0] == [144]


def test_the_papers_proxy_lets_requests_wait_that_ours_refuses(
    arrivals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balanceroute, "SLOTS", 8)
    monkeypatch.setattr(balanceroute_proxy, "PREFILL_KV_TOKENS", 40_960)
    monkeypatch.setattr(balanceroute_proxy, "LOADS", (1.5,))
    paper, ours = balanceroute_proxy.proxy(Options((arrivals,), requests=1500, seeds=(0, 1)))
    assert (paper["proxy"], ours["proxy"]) == ("the paper's", "ours")
    assert paper["refused_pct"] == paper["expired_pct"] == paper["ttft_p99_change_pct"] == 0
    assert paper["held_back_pct"] > 0
    assert ours["refused_pct"] + ours["expired_pct"] > 0
    assert ours["ttft_p99_ms"] < paper["ttft_p99_ms"]
    assert ours["ttft_p99_change_low_pct"] <= ours["ttft_p99_change_pct"] < 0
    assert max(row["largest_prefill_kv_pct_highest"] for row in (paper, ours)) <= 100


def test_a_policy_that_knows_the_barrier_of_ranks_shortens_their_steps(
    observed: Path, arrivals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "LOADS", (0.85,))
    rows = together.ranks(Options((observed, arrivals), requests=1500))
    names = ("shortest-queue", "marginal-cost, independent ranks", "marginal-cost")
    queue, independent, ours = (row_of(rows, policy=name)["tpot_p50_ms"] for name in names)
    assert ours < min(queue, independent)
    assert all(0 < row["spread_tokens"] < row["imbalance_tokens"] for row in rows)


@pytest.mark.slow
def test_predictors_and_imbalance_are_measured(arrivals: Path) -> None:
    predictors = balanceroute.table3(Options((arrivals,)))
    assert {row["predictor"] for row in predictors} == {"survival", "prompt-keyed", "boosted-trees"}
    assert all(0.5 < row["auc"] <= 1 and 0 < row["mae_tokens"] < 40 for row in predictors)
    methods = {"shortest-queue", "balance-route", "balance-route-horizon, survival"}
    panels = balanceroute.panels(Options((arrivals,), requests=600))
    assert {(row["workers"], row["method"]) for row in panels} == set(product((8, 16), methods))
    assert all(0 <= row["spread_tokens"] <= row["imbalance_tokens"] for row in panels)


def test_a_workers_own_placement_relieves_its_slowest_rank(
    observed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A domain's favourites have neighbouring ids, so that one rank holds them all in linear order."""
    monkeypatch.setattr(eldr_parallel, "RATES", (20,))
    monkeypatch.setattr(eldr_parallel, "OUTPUT_TOKENS", 48)
    options = Options((observed,), requests=200)
    rows = [r for r in eldr_parallel.expert_parallel(options) if r["policy"] == "locality-band"]
    for workload in ("task", "language"):
        own, common, linear = (
            row_of(rows, workload=workload, placement=placement)["active_experts"]
            for placement in ("own", "one for all", "linear")
        )
        assert own < common < linear
    inputs = ScenarioInputs(eldr_parallel._scenario(options, (), 20, 0), 0)
    assert len(inputs.fitted_on)
    assert not set(inputs.fitted_on) & set(inputs.requests.kind)  # requests of the fit are not simulated


def test_locality_saves_experts_at_every_rate(observed: Path) -> None:
    rows = eldr._sweep(Options((observed,), requests=400), [8], (60,), ("round-robin", "marginal-cost"))
    for workload in ("task", "language"):
        row = row_of(rows, workload=workload, policy="marginal-cost")
        assert row["active_experts_change_pct"] < -10
        assert row["tpot_p50_change_pct"] < 0


def test_a_stale_table_costs_time_after_a_drift_until_a_refit(observed: Path) -> None:
    rows = eldr.drift(Options((observed,), requests=800))
    cases = ("locality-band, no refit", "locality-band, refit", "marginal-cost")
    stale, refit, online = (row_of(rows, case=case)["after_tpot_p50_ms"] for case in cases)
    assert max(refit, online) < stale


def test_prefix_caches_shorten_ttft_and_keep_the_gain_of_locality(observed: Path) -> None:
    rows = eldr.prefix_cache(Options((observed,), requests=600))
    on, off = (row_of(rows, prefix_cache=cached, policy="marginal-cost") for cached in (True, False))
    assert on["prefix_hit_tokens"] > 0 == off["prefix_hit_tokens"]
    assert on["ttft_p50_ms"] < off["ttft_p50_ms"]
    assert on["tpot_p50_change_pct"] < 0


def test_added_workers_are_used(observed: Path) -> None:
    rows = eldr.scaling(Options((observed,), requests=600))
    more, fewer = (row_of(rows, workload=f"16 to {n} workers", case="marginal-cost") for n in (24, 8))
    assert more["after_tpot_p50_ms"] <= more["before_tpot_p50_ms"] * 1.05
    assert fewer["after_tpot_p50_ms"] > more["after_tpot_p50_ms"]


@pytest.mark.parametrize(
    ("paper", "figure", "message"),
    [
        ("nobody", "", "unknown paper 'nobody'; choose from eldr, balanceroute"),
        ("eldr", "x", "eldr has no figure 'x'; choose from rates"),
        ("eldr", "rates", "give one --trace"),
        ("balanceroute", "table1", "give --trace"),
        ("grace", "fig5", "give --trace"),
        ("metro", "fig8", "give --trace"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(paper: str, figure: str, message: str, tmp_path: Path) -> None:
    words = (paper, figure) if figure else (paper,)
    assert message in sentence(command(reproduce, *words, out=tmp_path / "x.json"))
    assert not (tmp_path / "x.json").exists()


# -- GRACE-MoE --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = synthetic_trace(n=40, domains=4, num_layers=2)
    domains = [grace.DOMAINS[int(d[1:])] for d in trace.domains]
    return save_trace(replace(trace, domains=domains), tmp_path_factory)


def test_components_change_traffic_and_load_as_in_the_paper(four_domains: Path) -> None:
    rows = grace.components(Options((four_domains,), requests=8, seeds=(0, 1)))
    arms = ("linear", "HG", "HG+DR, WRR", "HG+DR, TAR")
    for ranks in ("2 x 2", "2 x 4"):
        linear, grouped, replicated, local = (row_of(rows, ranks=ranks, arm=arm) for arm in arms)
        assert grouped["copies"] < linear["copies"]
        assert replicated["load_std_pct"] < grouped["load_std_pct"]
        assert local["copies"] < replicated["copies"]
        assert local["against"] == "HG+DR, WRR"
    ours, eplb = (row_of(rows, ranks="2 x 2", arm=arm) for arm in ("equal slots, TAR", "EPLB, as many slots"))
    assert ours["copies"] < eplb["copies"]


def test_the_papers_forms_of_grouping_are_compared_with_ours(
    four_domains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(*arguments: Any) -> Any:
        calls.append("polling")
        return polling_weights_as_written(*arguments)

    monkeypatch.setattr(grace_forms, "polling_weights_as_written", counted)
    rows = grace_forms.forms(Options((four_domains,), requests=4))
    assert len(calls) == 2 * 2  # topologies, layers
    for ranks in ("2 x 2", "2 x 4"):
        for part in ("grouping", "all"):
            of_part = [row for row in rows if (row["ranks"], row["part"]) == (ranks, part)]
            assert [row["form"] for row in of_part] == list(grace_forms.GROUPINGS)
            assert of_part[0]["copies_change_pct"] == of_part[0]["load_std_change_pct"] == 0
        polling = [row["form"] for row in rows if (row["ranks"], row["part"]) == (ranks, "polling")]
        assert polling == ["ours", "as in the paper"]


def test_the_other_figures_have_their_rows(four_domains: Path) -> None:
    options = Options((four_domains,), requests=4)
    strict = grace.strictness(options)
    uniform, linear = row_of(strict, part="a", placement="uniform"), row_of(strict, placement="linear")
    assert uniform["copies"] < linear["copies"]
    spread = [row_of(strict, placement=f"{n} most active")["load_std_pct"] for n in (16, 0)]
    assert spread[0] < spread[1]
    assert [row["layer"] for row in grace.concentration(options)] == [0, 1]
    curve = [row for row in grace.ratios(options) if row["ranks"] == "2 x 2"]
    assert [row["ratio"] for row in curve] == list(grace.RATIOS)
    assert curve[0]["affinity_within_pct"] <= curve[-1]["affinity_within_pct"] <= 100
    domains = grace.generalisation(options)
    worst = row_of(domains, fitted_on="worst of other domains")["against_own_domain_pct"]
    assert worst == max(row["against_own_domain_pct"] for row in domains if row["fitted_on"] in grace.DOMAINS)


# -- DIRECTOR ---------------------------------------------------------------------------------------

L, E, TOP_K, STEPS = 2, 16, 2, 8


def test_the_shares_of_a_layers_experts_add_up(four_domains: Path) -> None:
    rows = director.frequencies(Options((four_domains,), requests=20))
    assert sum(row["share_pct"] for row in rows) == pytest.approx(100)
    assert [row["share_pct"] for row in rows] == sorted((row["share_pct"] for row in rows), reverse=True)
    assert all(row["share_pct_lowest"] <= row["share_pct"] <= row["share_pct_highest"] for row in rows)
    assert {row["layer"] for row in rows} == {1}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"each": 12, "num_layers": L, "num_experts": E, "steps": STEPS, "others": 0.05}
    return save_trace(favourites_trace(("code", "math", "en", "fr"), **shape), tmp_path_factory)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, few: Path) -> Options:
    for name, value in (("RANKS", 4), ("BATCHES", 4)):
        monkeypatch.setattr(director, name, value)
    return Options(traces=(few,))


def test_a_placement_that_knows_the_batch_beats_a_static_one(small: Options) -> None:
    rows = director.FIGURES["fig7"].run(small)
    assert {row["cluster"] for row in rows} == set(shifting.CLUSTERS)
    for name in shifting.CLUSTERS:
        took = {row["placement"]: row for row in rows if row["cluster"] == name}
        oracle = took["proactive, oracle"]
        assert took["offline"]["change_pct"] == 0
        assert oracle["change_pct"] < -5
        assert director.STOPPED in took
        assert oracle["batch_ms"] <= took["proactive, signature"]["batch_ms"] * 1.02
        assert oracle["moves_a_batch"] > 0 == took["vanilla"]["moves_a_batch"]


def test_rounded_placements_are_above_their_bounds(small: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def synthetic(
        seed: int, ranks: int
    ) -> tuple[dict[str, object], shifting.GpuCluster, list[np.ndarray], np.ndarray]:
        rng = np.random.default_rng(seed)
        work = [rng.poisson(rng.lognormal(3, 1, (L, 1, E)), (L, 4, E)).astype(float)]
        return (
            {"workload": "random", "gpus": ranks, "layers": L},
            shifting.GpuCluster.from_name("H200", 4, E),
            work,
            np.ones(1),
        )

    monkeypatch.setattr(director, "synthetic_case", synthetic)
    rows = director.FIGURES["fig11"].run(small)
    methods = {"LP rounding", "LP rounding, tokens by expert alone"}
    assert {row["method"] for row in rows} == methods
    sizes = [row["gpus"] for row in rows if row["method"] == "LP rounding"]
    assert sizes == [8, 4] * 3  # of two clusters and the random workload
    for row in rows:
        assert -1e-6 <= row["above_bound_pct"] <= row["above_lp_pct"] + 1e-9


def test_a_batch_holds_every_token_on_its_rank(few: Path, tmp_path: Path) -> None:
    routes = shifting.read_routes(few)
    fit, measure = shifting.split(routes, 0)
    assert not set(fit) & set(measure)
    (batch,) = shifting.shifting_batches(routes, measure, 1, 4, 0)
    assert set(batch.requests) <= set(measure)
    assert batch.tokens.shape == (STEPS, L, 4, E)
    assert (batch.tokens.sum(axis=3) == TOP_K * shifting.PER_RANK).all()
    CalibrationTrace.load(few).subset_without_routes(np.arange(10)).save(tmp_path / "bare.safetensors")
    with pytest.raises(UserInputError, match="no routes"):
        director.FIGURES["fig7"].run(Options(traces=(tmp_path / "bare.safetensors",)))
