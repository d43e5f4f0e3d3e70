"""`offline.simulate`: scenarios, fitted costs, and bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost_file import FittedCost
from offline.scenario import ScenarioInputs, read_scenario
from offline.simulate import one_run, scale_workers
from offline.simulation.calibration import cost_from_status, fit_step_cost
from offline.simulation.requests import SimulationError
from tests.support.in_process import command, sentence
from tests.support.traces import route_file, route_records


@pytest.fixture
def gptoss(tmp_path: Path) -> Path:
    """Provide 30 records of two domains, each with its own experts."""
    records = route_records("gpt-oss-20b", ("code", "math"), each=15, tokens=(200, 201))
    return route_file(tmp_path / "routes.jsonl.gz", records)


def scenario_file(tmp_path: Path, **changes: Any) -> Path:
    document = {
        "cluster": {"decode": {"workers": 2}},
        "arrivals": {"kind": "poisson", "rate_per_s": 20, "requests": 40, "prompt_tokens": 50},
        "policies": [{"name": "shortest-queue"}, {"name": "random", "label": "any"}],
    }
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


def test_locality_activates_fewer_experts(tmp_path: Path, gptoss: Path) -> None:
    path = scenario_file(
        tmp_path,
        experts={"kind": "gpt-oss", "path": str(gptoss)},
        arrivals={"kind": "poisson", "rate_per_s": 100, "requests": 200},
        policies=[{"name": n} for n in ("shortest-queue", "locality-band", "marginal-cost")],
    )
    scenario = read_scenario(path)
    *rows, again = (one_run(scenario, scenario.policies[n], seed=3) for n in (0, 1, 2, 2))
    # A domain uses 16 of the 32 experts of a layer.
    assert all(row["active_experts"] <= 0.75 * rows[0]["active_experts"] for row in rows[1:])
    timed = {"simulated_steps_per_s": 0}
    assert again | timed == rows[2] | timed


def test_rows_by_domain_are_those_of_its_requests(tmp_path: Path, gptoss: Path) -> None:
    path = scenario_file(
        tmp_path,
        experts={"kind": "gpt-oss", "path": str(gptoss)},
        arrivals={"kind": "poisson", "rate_per_s": 100, "requests": 60},
        policies=[{"name": n} for n in ("shortest-queue", "marginal-cost")],
    )
    out = tmp_path / "result.json"
    assert command("offline.simulate", "--config", path, "--out", out, "--by-domain").exit_code == 0
    rows = json.loads(out.read_text())["rows"]
    of_run = [(p, d) for p in ("shortest-queue", "marginal-cost") for d in ("all", "code", "math")]
    assert [(row["policy"], row["domain"]) for row in rows] == of_run
    for whole, *parts in (rows[:3], rows[3:]):
        assert whole["requests"] == sum(part["requests"] for part in parts) == 60
        medians = [part["tpot_p50_ms"] for part in parts]
        assert min(medians) <= whole["tpot_p50_ms"] <= max(medians)
        assert set(parts[0]) == {"policy", "seed", "domain", "requests", "tpot_p50_ms", "tpot_p99_ms"}


def test_a_dense_model_has_no_rows_by_domain(tmp_path: Path) -> None:
    path = scenario_file(tmp_path)
    done = command("offline.simulate", "--config", path, "--out", tmp_path / "r.json", "--by-domain")
    assert "`experts`" in sentence(done)


def test_a_trace_gives_times_lengths_and_prefixes(tmp_path: Path) -> None:
    records = [(0, 600, 5, [1, 2]), (1000, 1100, 1, [1, 2, 3]), (3000, 700, 9, [1, 4])]
    keys = ("timestamp_ms", "prompt_tokens", "output_tokens", "hash_ids")
    lines = (json.dumps(dict(zip(keys, record, strict=True))) for record in records)
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    prefill = {"workers": 1, "per_token_s": 1e-4, "cache_blocks": 9}
    path = scenario_file(
        tmp_path,
        cluster={"prefill": prefill, "decode": {"workers": 1}},
        arrivals={"kind": "trace", "path": "trace.jsonl", "speed": 2, "min_output_tokens": 5},
    )
    scenario = read_scenario(path)
    requests = ScenarioInputs(scenario, 0).requests
    assert requests.arrival_s.tolist() == [0, 1.5]
    assert requests.output_tokens.tolist() == [5, 9]
    assert requests.blocks == ((1, 2), (1, 4))
    assert one_run(scenario, scenario.policies[0], 0)["prefix_hit_tokens"] == 512
    twice = scenario.arrivals.model_copy(update={"repeat": 2, "speed": 1})
    requests = ScenarioInputs(scenario.model_copy(update={"arrivals": twice}), 0).requests
    assert requests.arrival_s.tolist() == [0, 1.5, 1.5, 3]
    assert {b % 2 for blocks in requests.blocks for b in blocks[:1]} == {0, 1}  # copies share nothing


def test_a_recording_is_resampled_to_a_rate(tmp_path: Path) -> None:
    # A burst: 60 of 100 requests in the last tenth of the time.
    times = np.sort(np.concatenate([np.linspace(0, 90, 40), np.linspace(90.1, 100, 60)]))
    lines = (f"{at:.3f},{10 + n},{1 + n % 7}" for n, at in enumerate(times))
    (tmp_path / "trace.csv").write_text("\n".join(["timestamp_s,prompt_tokens,output_tokens", *lines]))
    arrivals = {"kind": "trace", "path": "trace.csv", "rate_per_s": 50}
    path = scenario_file(tmp_path, arrivals=arrivals | {"requests": 1030})
    scenario = read_scenario(path)
    requests = ScenarioInputs(scenario, 0).requests
    assert len(requests) == 1030
    assert requests.arrival_s[-1] == pytest.approx(1030 / 50, rel=0.01)
    assert (requests.arrival_s > 0.9 * 1030 / 50).mean() == pytest.approx(0.6, abs=0.02)
    occurring = np.bincount(requests.prompt_tokens - 10)
    assert len(occurring) == 100
    assert set(occurring) <= {10, 11}
    assert np.array_equal((requests.prompt_tokens - 10) % 7 + 1, requests.output_tokens)
    assert np.array_equal(requests.arrival_s, ScenarioInputs(scenario, 0).requests.arrival_s)
    assert not np.array_equal(requests.arrival_s, ScenarioInputs(scenario, 1).requests.arrival_s)
    larger = scale_workers(scenario, 6)
    assert (larger.arrivals.rate_per_s, larger.arrivals.requests) == (150, 3090)
    few = scenario.arrivals.model_copy(update={"requests": 10})
    lengths = ScenarioInputs(scenario.model_copy(update={"arrivals": few}), 0).requests.prompt_tokens
    assert len(set(lengths)) == 10


def test_more_workers_than_observed_requests_share_centroids(tmp_path: Path, gptoss: Path) -> None:
    experts = {"kind": "gpt-oss", "path": str(gptoss)}
    arrivals = {"kind": "poisson", "rate_per_s": 2000, "requests": 1500}
    policies = [{"name": "shortest-queue"}, {"name": "locality-band"}]
    changes: dict[str, Any] = {
        "arrivals": arrivals,
        "policies": policies,
        "cluster": {"decode": {"workers": 40}},
    }
    without = read_scenario(scenario_file(tmp_path, experts=experts, **changes))
    assert ScenarioInputs(without, 0).table is None
    scenario = read_scenario(scenario_file(tmp_path, experts=experts | {"centroids": 2}, **changes))
    rows = [one_run(scenario, policy, seed=0) for policy in scenario.policies]
    assert rows[1]["active_experts"] < 0.8 * rows[0]["active_experts"]
    mixed = read_scenario(scenario_file(tmp_path, experts=experts | {"parts": 2, "mixtures": 50}, **changes))
    inputs = ScenarioInputs(mixed, 0)
    assert inputs.experts is not None
    assert len(inputs.experts.domains) == 50
    assert len(set(inputs.requests.kind)) == 50


def test_objectives_add_goodput(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, objectives={"ttft_ms": 1e6, "tpot_ms": 1e6})
    scenario = read_scenario(path)
    assert one_run(scenario, scenario.policies[0], 0)["good_pct"] == 100


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
        ("shortest-queue", 0),
        ("any", 0),
        ("shortest-queue", 1),
        ("any", 1),
    ]
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
    fitted = fit_step_cost(steps)
    assert fitted.cost.per_expert_s == pytest.approx(5e-5, rel=0.05)
    assert fitted.rms_relative_error < 0.02
    out = tmp_path / "cost.json"
    assert command("offline.simulate", "--calibrate-from", steps, "--out", out).exit_code == 0
    assert FittedCost.load(out) == fitted
    result = tmp_path / "result.json"
    done = command("offline.simulate", "--config", scenario_file(tmp_path), "--cost", out, "--out", result)
    assert done.exit_code == 0, done.stderr
    used = json.loads(result.read_text())["inputs"]["cluster"]["decode"]["cost"]
    assert StepCost(**used) == fitted.cost


def test_a_running_service_says_what_its_steps_cost() -> None:
    status = {"step_cost": {"steps": 812.3, "relative_error": 0.05} | StepCost().as_dict()}
    fitted = cost_from_status(status, "http://x/eldr/status")
    assert fitted.cost == StepCost()
    assert (fitted.steps, fitted.rms_relative_error) == (812, 0.05)
    with pytest.raises(SimulationError, match="has fitted no step cost yet"):
        cost_from_status({"step_cost": {"steps": 3}}, "it")


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
        ({"arrivals": {"kind": "trace", "path": "long.csv", "rate_per_s": 1}}, "give both or neither"),
        (
            {"arrivals": {"kind": "trace", "path": "l.csv", "rate_per_s": 1, "requests": 2, "speed": 3}},
            "replaces speed, limit and repeat",
        ),
        ({"objectives": {"ttft_ms": 0, "tpot_ms": 1}}, "objectives.ttft_ms"),
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


def test_bad_steps_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step = '{"requests": 1, "kv_tokens": 1, "experts": 1, "seconds": 1}\n'
    for content, message in (
        ("{}\n", "line 1: not a step"),
        (step.replace('"seconds": 1', '"seconds": -1'), "line 1"),
        (step * 5, "5 steps do not determine the cost"),
    ):
        path.write_text(content)
        with pytest.raises(SimulationError, match=message):
            fit_step_cost(path)
