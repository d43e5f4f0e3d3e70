"""The shadow's benchmark with a fake service, and its rows from synthetic trials."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving import shadow as module
from benchmarks.serving.shadow import Part, make_rows, read_sums, shadow
from eldr_serve.commands import client
from eldr_serve.errors import UserInputError
from tests.support.fake_service import KEY, fake_service

# 100 steps of 4 requests, 10 ms each; tokens at the client take twice as long.
PART = Part(
    tokens=400,
    live=4.4,
    shadow=5.5,
    steps=100,
    requests=400,
    active_experts=2000,
    seconds=1.0,
    token_seconds=4.0,
    tpot=0.02,
    step_cost={"steps": 100.0},
)


def test_a_prediction_is_compared_with_measurements_of_the_engines() -> None:
    other = replace(
        PART, live=5.5, shadow=4.4, seconds=1.2, token_seconds=5.0, tpot=0.019, active_experts=2500
    )
    parts = {"marginal-cost": [PART, PART], "random": [other, other]}
    by_figure = {row["figure"]: row for row in make_rows(("marginal-cost", "random"), parts, seed=0)}
    for live in parts:
        row = by_figure[f"priced, {live} live"]
        assert (row["marginal-cost"], row["random"]) == pytest.approx((11.0, 13.75))
        assert row["change_pct"] == pytest.approx(-20)
        assert [row[f"off{end}_pct"] for end in ("", "_low", "_high")] == pytest.approx([0, 0, 0])
    assert (by_figure["step"]["marginal-cost"], by_figure["step"]["random"]) == pytest.approx((10.0, 12.5))
    assert by_figure["step"]["off_pct"] is None
    assert by_figure["engine"]["change_pct"] == pytest.approx(100 / 1.2 - 100)
    assert by_figure["tpot"]["change_pct"] == pytest.approx(100 * (20 / 19 - 1))
    assert by_figure["tpot"]["off_pct"] == pytest.approx(by_figure["tpot"]["change_pct"] + 20)
    assert (by_figure["experts"]["marginal-cost"], by_figure["experts"]["random"]) == (20, 25)


def test_rounds_that_differ_give_an_interval() -> None:
    slow = replace(PART, live=8.8, shadow=5.5)
    same = [PART, PART]
    row = make_rows(("a", "b"), {"a": [PART, slow], "b": same}, seed=0)[0]
    assert row["low_pct"] == pytest.approx(-20)
    assert row["low_pct"] < row["change_pct"] < row["high_pct"]


def test_a_status_before_the_first_token_has_sums() -> None:
    names = ("steps", "requests", "active_experts", "seconds", "token_seconds")
    totals = dict(zip(names, range(1, 6), strict=True))
    now = {"live": {}, "shadow": {}}
    status = {"comparison": {"now": now}, "decode_totals": totals}
    assert read_sums(status).tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    priced = now | {"tokens": 10, "live_ms": 100.0, "shadow_ms": 200.0}
    status["comparison"] = {"now": priced}
    assert read_sums(status)[:3] == pytest.approx([10, 1, 2])


@pytest.mark.parametrize("bad", [{"policies": "random"}, {"policies": "a,a"}, {"intermediate": "16"}])
def test_bad_input_is_reported_in_one_sentence(bad: dict[str, str]) -> None:
    with pytest.raises(UserInputError, match=r"\A--.+"):
        shadow(**bad)


@pytest.mark.benchmarks
def test_each_policy_is_live_once_in_each_round_with_the_other_as_shadow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, policies = tmp_path / "out.json", ["random", "shortest-queue"]
    with fake_service() as service:
        service.reports_steps, service.model = True, "eldr-demo"
        monkeypatch.setattr(module, "_STARTS_S", 0.5)
        monkeypatch.setattr(client, "_STABLE_S", 0.1)  # the fake's steps are counted at once
        served = nullcontext(client.OperatorClient(service.url, KEY))
        monkeypatch.setattr(module, "serve_shortest_queue_without_pool", lambda arguments, port: served)
        load = {"rounds": 1, "trial_seconds": 6, "warm_up_seconds": 1, "in_flight": 4, "output_tokens": 8}
        shadow(policies=",".join(policies), intermediate="32", work=tmp_path, out=out, **load)
    assert sorted(service.policies_set) == sorted(service.shadows) == policies
    assert service.policies_set != service.shadows
    by_figure = {row["figure"]: row for row in json.loads(out.read_text())["rows"]}
    # Both policies are equal here, so each prices its shadow at 10 of its own 11 ms.
    assert by_figure["priced, random live"]["change_pct"] == pytest.approx(10, abs=0.1)
    assert by_figure["priced, shortest-queue live"]["change_pct"] == pytest.approx(-100 / 11, abs=0.1)
    assert by_figure["step"]["random"] == pytest.approx(10, abs=0.1)
    assert by_figure["tpot"]["random"] > 10
    assert not (tmp_path / "shadow.jsonl").exists()
