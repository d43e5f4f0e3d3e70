"""`offline.simulate`: scenarios, fitted costs, and bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from in_process import command, sentence

from eldr_serve.command_errors import BadInput
from eldr_serve.scheduling import StepCost
from offline.gptoss import LAYERS, TOP_K, read_gptoss
from offline.scenario import Work, read_scenario
from offline.simulate import one_run
from offline.simulation.calibration import FittedCost, fit_steps, from_status
from offline.simulation.requests import SimulationError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@pytest.fixture
def gptoss(tmp_path: Path) -> Path:
    """Provide 30 records of two domains, each with its own experts."""
    rng = np.random.default_rng(0)
    lines = []
    for n in range(30):
        chosen = rng.random((200 * LAYERS, 16)).argsort(axis=1)[:, :TOP_K] + 16 * (n % 2)
        routes = "".join(LETTERS[e] for e in chosen.ravel())
        lines.append(json.dumps({"id": f"r{n}", "domain": ["code", "math"][n % 2], "routes": routes}))
    path = tmp_path / "routes.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def scenario_file(tmp_path: Path, **changes: Any) -> Path:
    document = {
        "cluster": {"decode": {"workers": 2}},
        "arrivals": {"kind": "poisson", "rate_per_s": 20, "requests": 40, "prompt_tokens": 50},
        "policies": [{"name": "shortest-queue"}, {"name": "random", "label": "any"}],
    }
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


def test_routes_become_a_calibration_trace(gptoss: Path) -> None:
    trace = read_gptoss(gptoss, prompt_steps=100, decode_steps=60)
    assert trace.prefill_counts.shape == (30, LAYERS, 32)
    assert set(trace.domains) == {"code", "math"}
    math = np.array(trace.domains) == "math"
    assert trace.prefill_counts[math][:, :, :16].sum() == 0
    assert trace.decode_counts[~math][:, :, 16:].sum() == 0
    assert np.array_equal(np.bincount(trace.routes[:60, 3].ravel(), minlength=32), trace.decode_counts[0, 3])


def test_locality_activates_fewer_experts(tmp_path: Path, gptoss: Path) -> None:
    path = scenario_file(
        tmp_path, experts={"kind": "gpt-oss", "path": str(gptoss)},
        arrivals={"kind": "poisson", "rate_per_s": 100, "requests": 200},
        policies=[{"name": n} for n in ("shortest-queue", "locality-band", "marginal-cost")],
    )  # fmt: skip
    scenario = read_scenario(path)
    *rows, again = (one_run(scenario, scenario.policies[n], seed=3) for n in (0, 1, 2, 2))
    # A domain uses 16 of the 32 experts of a layer.
    assert all(row["active_experts"] <= 0.75 * rows[0]["active_experts"] for row in rows[1:])
    timed = {"simulated_steps_per_s": 0}
    assert again | timed == rows[2] | timed


def test_a_trace_gives_times_lengths_and_prefixes(tmp_path: Path) -> None:
    records = [(0, 600, 5, [1, 2]), (1000, 1100, 1, [1, 2, 3]), (3000, 700, 9, [1, 4])]
    keys = ("timestamp_ms", "prompt_tokens", "output_tokens", "hash_ids")
    lines = (json.dumps(dict(zip(keys, record, strict=True))) for record in records)
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    prefill = {"workers": 1, "per_token_s": 1e-4, "cache_blocks": 9}
    path = scenario_file(
        tmp_path, cluster={"prefill": prefill, "decode": {"workers": 1}},
        arrivals={"kind": "trace", "path": "trace.jsonl", "speed": 2, "min_output_tokens": 5},
    )  # fmt: skip
    scenario = read_scenario(path)
    requests = Work(scenario, 0).requests
    assert requests.arrival_s.tolist() == [0, 1.5]
    assert requests.output_tokens.tolist() == [5, 9]
    assert requests.blocks == ((1, 2), (1, 4))
    assert one_run(scenario, scenario.policies[0], 0)["prefix_hit_tokens"] == 512
    twice = scenario.arrivals.model_copy(update={"repeat": 2, "speed": 1})
    requests = Work(scenario.model_copy(update={"arrivals": twice}), 0).requests
    assert requests.arrival_s.tolist() == [0, 1.5, 1.5, 3]
    assert {b % 2 for blocks in requests.blocks for b in blocks[:1]} == {0, 1}  # copies share nothing


def test_a_run_writes_one_row_for_each_policy_and_seed(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, seeds=[0, 1])
    out = tmp_path / "result.json"
    dry = command("offline.simulate", "--config", path, "--out", out, "--dry-run")
    assert (dry.exit_code, out.exists()) == (0, False)
    assert "4 runs of 40 requests on 2 workers" in dry.stdout
    done = command("offline.simulate", "--config", path, "--out", out)
    assert done.exit_code == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(row["policy"], row["seed"]) for row in result["rows"]] == [
        ("shortest-queue", 0), ("any", 0), ("shortest-queue", 1), ("any", 1),
    ]  # fmt: skip
    assert result["inputs"]["cluster"]["decode"]["workers"] == 2
    assert {"tpot_p50_ms", "tpot_p99_ms", "imbalance_tokens", "output_tokens_per_s"} <= set(result["rows"][0])


def test_a_cost_is_fitted_from_steps_and_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    true = StepCost(0.004, 1e-4, 2e-7, 5e-5)
    steps = tmp_path / "steps.jsonl"
    with steps.open("w") as file:
        for _ in range(400):
            b, kv, e = int(rng.integers(1, 40)), int(rng.integers(10, 9000)), int(rng.integers(4, 380))
            seconds = float(true.seconds(b, kv, e)) * rng.uniform(0.98, 1.02)
            record = {"requests": b, "kv_tokens": kv, "experts": e, "seconds": seconds}
            file.write(json.dumps(record) + "\n")
    fitted = fit_steps(steps)
    assert fitted.cost.per_expert_s == pytest.approx(5e-5, rel=0.05)
    assert fitted.rms_relative_error < 0.02
    out = tmp_path / "cost.json"
    assert command("offline.simulate", "--calibrate-from", steps, "--out", out).exit_code == 0
    assert FittedCost.load(out) == fitted
    result = tmp_path / "result.json"
    done = command("offline.simulate", "--config", scenario_file(tmp_path), "--cost", out, "--out", result)
    assert done.exit_code == 0, done.stderr
    assert json.loads(result.read_text())["inputs"]["cluster"]["decode"]["cost"] == fitted.cost.as_dict()


def test_a_running_service_says_what_its_steps_cost() -> None:
    status = {"step_cost": {"steps": 812.3, "relative_error": 0.05} | StepCost().as_dict()}
    fitted = from_status(status, "http://x/eldr/status")
    assert fitted.cost == StepCost()
    assert (fitted.steps, fitted.rms_relative_error) == (812, 0.05)
    with pytest.raises(SimulationError, match="has fitted no step cost yet"):
        from_status({"step_cost": {"steps": 3}}, "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": {"decode": {"workers": 0}}}, "cluster.decode.workers"),
        ({"policies": []}, "policies"),
        ({"typo": 1}, "typo"),
        ({"policies": [{"name": "fastest"}]}, "unknown policy 'fastest'"),
        ({"arrivals": {"kind": "poisson", "rate_per_s": 0, "requests": 2}}, "rate_per_s"),
        ({"arrivals": {"kind": "poisson", "rate_per_s": 1, "requests": 2}}, "prompt_tokens is missing"),
        ({"arrivals": {"kind": "trace", "path": "none.csv"}}, "none.csv"),
        ({"arrivals": {"kind": "trace", "path": "long.csv"}}, "line 3: 90 + 20 tokens are more than the 100"),
    ],
)
def test_bad_scenarios_are_reported_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "long.csv").write_text("timestamp_s,prompt_tokens,output_tokens\n0,5,5\n1,90,20\n")
    out = tmp_path / "result.json"
    changes = {"cluster": {"decode": {"workers": 1, "kv_tokens": 100}}} | changes
    config = scenario_file(tmp_path, **changes)
    assert message in sentence(command("offline.simulate", config=config, out=out))
    assert not out.exists()


def test_bad_steps_and_routes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step = '{"requests": 1, "kv_tokens": 1, "experts": 1, "seconds": 1}\n'
    for content, message in (
        ("{}\n", "line 1: not a step"),
        (step.replace('"seconds": 1', '"seconds": -1'), "line 1"),
        (step * 5, "5 steps do not determine the cost"),
    ):
        path.write_text(content)
        with pytest.raises(SimulationError, match=message):
            fit_steps(path)
    path.write_text(json.dumps({"id": "a", "domain": "", "routes": "!" * 96}))
    with pytest.raises(BadInput, match=r"steps\.jsonl, line 1: not a record"):
        read_gptoss(path)
