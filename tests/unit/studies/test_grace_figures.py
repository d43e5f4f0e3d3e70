"""GRACE-MoE's figures at small size: what they must show, whatever the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import synthetic_trace

from studies.figures import grace
from studies.figures.common import Options


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = synthetic_trace(n=40, domains=4, num_layers=2)
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    replace(trace, domains=[grace.DOMAINS[int(d[1:])] for d in trace.domains]).save(path)
    return path


def of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if all(row[k] == v for k, v in wanted.items())]
    return row


def test_components_move_traffic_and_load_as_in_the_paper(observed: Path) -> None:
    rows = grace.components(Options((observed,), requests=8, seeds=(0, 1)))
    arms = ("linear", "HG", "HG+DR, WRR", "HG+DR, TAR")
    for ranks in ("2 x 2", "2 x 4"):
        linear, grouped, replicated, local = (of(rows, ranks=ranks, arm=arm) for arm in arms)
        assert grouped["copies"] < linear["copies"]
        assert replicated["load_std_pct"] < grouped["load_std_pct"]
        assert local["copies"] < replicated["copies"]
        assert local["against"] == "HG+DR, WRR"
    ours, eplb = (of(rows, ranks="2 x 2", arm=arm) for arm in ("equal slots, TAR", "EPLB, as many slots"))
    assert ours["copies"] < eplb["copies"]


def test_the_other_figures_have_their_rows(observed: Path) -> None:
    options = Options((observed,), requests=4)
    strict = grace.strictness(options)
    assert of(strict, part="a", placement="uniform")["copies"] < of(strict, placement="linear")["copies"]
    spread = [of(strict, placement=f"{n} most active")["load_std_pct"] for n in (16, 0)]
    assert spread[0] < spread[1]
    assert [row["layer"] for row in grace.concentration(options)] == [0, 1]
    curve = [row for row in grace.ratios(options) if row["ranks"] == "2 x 2"]
    assert [row["ratio"] for row in curve] == list(grace.RATIOS)
    assert curve[0]["affinity_within_pct"] <= curve[-1]["affinity_within_pct"] <= 100
    domains = grace.generalisation(options)
    worst = of(domains, fitted_on="worst of other domains")["against_own_domain_pct"]
    assert worst == max(row["against_own_domain_pct"] for row in domains if row["fitted_on"] in grace.DOMAINS)
