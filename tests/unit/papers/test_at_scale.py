"""The study of many workers at small size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers import at_scale as module
from benchmarks.papers.at_scale import at_scale, divide_among_routers, find_smallest
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost_file import FittedCost
from offline.simulation.requests import Requests
from tests.support.in_process import command, sentence
from tests.support.traces import favourites_trace, save_trace


@pytest.fixture
def options(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Provide the command's options: routes of three domains, 300 recorded requests, a cost."""
    trace = favourites_trace(
        ("code", "math", "fr"), each=20, num_layers=3, num_experts=16, steps=12, others=0.02
    )
    rng = np.random.default_rng(0)
    lines = (
        f"{time_s:.3f},{rng.integers(20, 90)},{rng.integers(2, 30)}" for time_s in np.cumsum(rng.random(300))
    )
    arrivals = tmp_path / "azure.csv"
    arrivals.write_text("\n".join(["timestamp_s,prompt_tokens,output_tokens", *lines]))
    cost = tmp_path / "cost.json"
    fitted = StepCost(fixed_s=2e-3, per_request_s=1e-4, per_expert_s=2e-4)
    FittedCost(
        cost=fitted, steps=100, rms_relative_error=0.01, median_relative_error=None, source="steps"
    ).save(cost)
    return {
        "routes": save_trace(trace, tmp_path_factory),
        "arrivals": arrivals,
        "cost": cost,
        "batch": 6,
        "seconds": 4,
        "centroids": 3,
        "workers": "4,8",
        "journal": tmp_path / "journal.jsonl",
        "out": tmp_path / "at_scale.json",
    }


def test_a_run_has_rows_by_workers_and_policy_and_resumes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "shortest-queue,marginal-cost"
    all_options = options | {"policies": names, "saving": "marginal-cost", "seeds": "1"}
    done = command(at_scale, **all_options)
    assert done.exit_code == 0, done.output
    rows = json.loads(Path(str(options["out"])).read_text())["rows"]
    assert [(row["workers"], row["policy"]) for row in rows] == [
        (size, name) for size in (4, 8) for name in names.split(",")
    ]
    for row in rows:
        assert row["arrivals"] == "azure"
        assert 3 < row["batch_size"] < 12
        assert 0 < row["router_load_pct"] < 90
        assert 0 <= row["goodput_per_s"] <= row["requests"] / 4 * 1.2
    base, ours = rows[:2]
    assert (base["tpot_p50_change_pct"], base["tpot_p99_change_pct"]) == (0, 0)
    assert "tpot_p50_change_pct_low" not in ours  # one seed has no interval
    assert ours["tpot_p50_change_pct"] < -3
    assert ours["active_experts"] < base["active_experts"]
    assert ours["workers_for_p50"] <= 4
    assert ours["saved_p50_pct"] == 100 * (1 - ours["workers_for_p50"] / 4)
    assert "workers_for_p50" not in rows[2]
    monkeypatch.setattr(module, "simulate", lambda *a, **k: pytest.fail("simulated again"))
    assert command(at_scale, **all_options).exit_code == 0
    assert json.loads(Path(str(options["out"])).read_text())["rows"] == rows
    more = all_options | {"policies": "power-of-two,marginal-cost", "seeds": "1,2"}
    assert command(at_scale, "--finished-only", **more).exit_code == 0
    finished = json.loads(Path(str(options["out"])).read_text())["rows"]
    assert finished == [rows[1], rows[3]]  # on 8 workers the second seed is missing
    assert "different settings (batch)" in sentence(command(at_scale, **all_options | {"batch": 7}))


def test_changes_have_intervals_over_the_seeds(options: dict[str, Any]) -> None:
    names = "shortest-queue,marginal-cost,marginal-cost,tail_power=1"
    arguments = options | {"policies": names, "saving": "none", "seeds": "3", "workers": "4"}
    assert command(at_scale, **arguments).exit_code == 0
    rows = json.loads(Path(str(options["out"])).read_text())["rows"]
    assert [row["policy"] for row in rows] == [
        "shortest-queue",
        "marginal-cost",
        "marginal-cost,tail_power=1",
    ]
    for row in rows:
        for figure in ("tpot_p50", "tpot_p99", "goodput"):
            low, high = (row[f"{figure}_change_pct_{end}"] for end in ("low", "high"))
            assert low <= row[f"{figure}_change_pct"] <= high
    assert rows[1]["tpot_p50_change_pct_high"] > rows[1]["tpot_p50_change_pct_low"]
    assert rows[1]["tpot_p99_ms"] != rows[2]["tpot_p99_ms"]


def test_a_router_delays_placements_and_several_share_its_work(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "shortest-queue,marginal-cost"
    all_options = options | {"policies": names, "saving": "none", "seeds": "1", "workers": "8"}
    monkeypatch.setattr(module, "placement_cpu_s", lambda *_: 5e-5)  # measured times vary
    row_by_setting = {}
    for routers, channel_s in ((1, 0.0), (1, 1e-3), (1, 0.05), (4, 1e-3)):
        monkeypatch.setattr(module, "channel_s", lambda s=channel_s: s)
        case = {"journal": options["journal"].with_suffix(f".{channel_s}"), "routers": str(routers)}
        assert command(at_scale, **all_options | case).exit_code == 0
        row = json.loads(Path(str(options["out"])).read_text())["rows"][0]
        assert row["routers"] == routers
        row_by_setting[routers, channel_s] = row
    fast, slow, overloaded, four = row_by_setting.values()
    assert 1 < slow["ttft_p50_ms"] - fast["ttft_p50_ms"] < 20
    assert overloaded["router_load_pct"] > 1000
    assert overloaded["ttft_p50_ms"] > 1000  # its queue grows while requests arrive
    assert four["router_load_pct"] == pytest.approx(slow["router_load_pct"] / 4, rel=0.2)
    assert four["ttft_p99_ms"] < slow["ttft_p99_ms"]
    assert four["requests"] == slow["requests"]
    assert command(at_scale, **all_options | case | {"simulated_routers": 2}).exit_code == 0
    two = json.loads(Path(str(options["out"])).read_text())["rows"][0]
    assert (four["simulated_routers"], two["simulated_routers"]) == (4, 2)
    assert two["requests"] == pytest.approx(four["requests"] / 2, rel=0.2)
    for figure in ("router_load_pct", "tpot_p50_ms", "goodput_per_s"):
        assert two[figure] == pytest.approx(four[figure], rel=0.25)


def test_a_request_goes_to_one_router_drawn_at_random() -> None:
    requests = Requests(np.arange(4000.0), *np.random.default_rng(0).integers(1, 9000, (3, 4000)))
    parts = divide_among_routers(requests, 4, seed=1)
    assert all(900 < len(part) < 1100 for part in parts)
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "kind"):
        together = np.concatenate([getattr(part, name) for part in parts])
        order = np.argsort(np.concatenate([part.arrival_s for part in parts]))
        assert (together[order] == getattr(requests, name)).all()
    (same,) = divide_among_routers(requests, 1, seed=1)
    assert (same.kind == requests.kind).all()


@pytest.mark.parametrize("goal", range(10))
def test_the_fewest_workers_are_found_with_few_runs(goal: int) -> None:
    counts, measured = list(range(2, 9)), []

    def meets(count: int) -> bool:
        measured.append(count)
        return count >= goal

    found: Callable[[], int | None] = lambda: next((c for c in counts if c >= goal), None)  # noqa: E731
    assert find_smallest(counts, meets) == found()
    assert len(measured) <= 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seeds": "1,2,3"}, "--seeds must be one number, or one for each of --workers, got 1,2,3"),
        ({"routers": "1,2,4"}, "--routers must be one number, or one for each of --workers, got 1,2,4"),
        ({"routers": "3"}, "--routers is 3: 3 cannot share 4 workers equally"),
        ({"policies": "marginal-cost,tail_power=0"}, "tail_power"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], given: dict[str, str], words: str) -> None:
    assert words in sentence(command(at_scale, **options | given))
    assert not Path(str(options["out"])).exists()
