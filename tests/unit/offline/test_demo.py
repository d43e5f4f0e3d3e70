"""The demo's report and engine settings, from trials and files. No engine is started."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eldr_serve.errors import UserInputError
from eldr_serve.experts.fitting.table import fit_table
from loadgen.application import _gpus
from loadgen.trial import LoadSpec, ScheduledTrial, Trial
from offline import demo
from offline.demo_arguments import demo_arguments
from tests.support.shipped import ROOT
from tests.support.traces import synthetic_trace

DEPLOYMENT = ROOT / "deployments/cpu_demo.yaml"
MODEL = Path("somewhere/model_64")


def plan(out: Path, rounds: int = 4) -> demo._Plan:
    load = LoadSpec(
        "prompts", "eldr-demo", rate=0.0, seconds=10, warm_up_s=0, users=8, max_tokens=8, temperature=0.8
    )
    arguments = demo_arguments(DEPLOYMENT, MODEL, 3, 20)
    return demo._Plan(arguments, load, rounds, 2, out, 0)


def trials(rounds: int, *, failed: bool = False) -> list[Trial]:
    """Return rounds of unequal size. In each, marginal-cost reads 10 % fewer experts in 5 % less time."""
    all_trials = []
    for round_ in range(rounds):
        for policy, experts, seconds in (
            ("shortest-queue", 1.0, 1.0),
            ("marginal-cost", 0.9, 0.95),
            ("locality-band", 0.8, 1.02),
        ):
            size = 1 + round_
            engines = {"steps": 10.0, "requests": 80.0, "token_seconds": 1.0}
            engines |= {"active_experts": 200 * size * experts, "seconds": 0.4 * size * seconds}
            requests: list[dict[str, Any]] = [
                {
                    "number": n,
                    "id": "p",
                    "due_s": None,
                    "late_s": None,
                    "sent_s": 0.1 * n,
                    "ttft_s": 0.1,
                    "tpot_s": 0.01,
                    "itl_s": [0.01] * 7,
                    "end_s": 1.0,
                    "handover_s": 0.004,
                }
                for n in range(5)
            ]
            if failed:
                requests[0] = {**requests[0], "error": "HTTP 503"}
            all_trials.append(Trial(policy, round_, requests, engines, 5, 4, [(0.5, [1, 2, 3])]))
    return all_trials


def publish(out: Path, rounds: int, *, failed: bool = False) -> None:
    trace = synthetic_trace()
    trace.save(out / "trace.safetensors")
    fit_table(trace, 3, band=0.1, seed=0)[0].save(out / "table.safetensors")
    results = trials(rounds, failed=failed)
    demo._publish(plan(out, rounds), results, "GREEDY", out / "trace.safetensors", out / "table.safetensors")


def test_terminal_and_report_begin_with_the_effect_of_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, 4)
    output = capsys.readouterr().out
    first, second = (
        "marginal-cost reads 10.0 % fewer experts per step than shortest-queue [10.0, 10.0]; "
        "its steps take 5.0 % less CPU time per token [5.0, 5.0].",
        "locality-band reads 20.0 % fewer experts per step than shortest-queue [20.0, 20.0]; "
        "its steps take 2.0 % more CPU time per token [2.0, 2.0].",
    )
    assert output.startswith(
        f"{first}\n{second}\nGREEDY\nCalculated, not run: with the layers of Qwen3-30B-A3B"
    )
    assert re.search(r"4 engines, the ingress and the load generator share \d+ cores", output)
    report = (tmp_path / "report.html").read_text()
    order = [
        report.index(text)
        for text in (
            first,
            second,
            "<img",
            "GREEDY",
            "Calculated, not run: ",
            "TPOT p50",
            "<table",
            "Settings",
        )
    ]
    assert order == sorted(order)
    result = json.loads((tmp_path / "demo.json").read_text())
    assert [row["policy"] for row in result["rows"]] == demo.POLICIES
    assert [row["h100_step_ms"] > 0 for row in result["rows"]] == [True] * 3
    assert result["inputs"]["decode_engines"] == 3
    assert result["inputs"]["model"] == "model_64"


def test_one_round_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, 1)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.count("(one round, so no interval)") == 2


def test_a_round_in_which_no_answer_ends_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = iter(trials(1)[0].requests[:n] for n in (5, 0, 5))

    def load(service: object, plan: object, step: ScheduledTrial, *_: object, **__: object) -> Trial:
        return Trial(step.policy, step.round, next(ended))

    monkeypatch.setattr(demo, "_run_load", load)
    measured_trials = demo._measure_rounds(None, plan(tmp_path, 1))  # type: ignore[arg-type]
    assert [len(trial.requests) for trial in measured_trials] == [5, 0, 5]
    output = " ".join(capsys.readouterr().out.split())
    assert output == "no answer ended in the measured 10 s: increase --seconds"


def test_failed_requests_raise_an_error_after_the_report(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="12 requests failed"):
        publish(tmp_path, 4, failed=True)
    assert (tmp_path / "report.html").exists()


def test_the_number_of_engines_can_be_set_and_then_caches_are_small() -> None:
    deployed = yaml.safe_load(DEPLOYMENT.read_text())["applications"][0]["args"]
    for count in (0, 3):
        arguments = demo_arguments(DEPLOYMENT, MODEL, count, 20)
        for role in ("prefill_config", "decode_config"):
            assert arguments[role].pop("model_loading_config")["model_source"] == str(MODEL)
            env = arguments[role]["runtime_env"]["env_vars"]
            assert ("VLLM_CPU_KVCACHE_SPACE" in env) == (count == 0)
            assert ("kv_cache_memory_bytes" in arguments[role]["engine_kwargs"]) == (count > 0)
        expected = count or deployed["decode_config"]["deployment_config"]["num_replicas"]
        assert arguments["decode_config"]["deployment_config"]["num_replicas"] == expected
        assert arguments["prefill_config"]["deployment_config"]["num_replicas"] == 1


def test_a_deployment_with_a_signature_pool_has_the_demos_table_and_no_refit() -> None:
    deployment = ROOT / "deployments/cpu_demo_eldr.yaml"
    deployed = yaml.safe_load(deployment.read_text())["applications"][0]["args"]["signatures"]
    signatures = demo_arguments(deployment, MODEL, 2, 20)["signatures"]
    assert signatures["first_table"] == 20 != deployed["first_table"]
    assert signatures["every_s"] > 3600 > deployed["every_s"]
    assert signatures["window"] == deployed["window"]


def test_engines_that_share_a_gpu_request_no_more_than_the_gpu() -> None:
    arguments = demo_arguments(DEPLOYMENT, MODEL, 2, 20, gpu=True)
    shares = 0.0
    for role in ("prefill_config", "decode_config"):
        config = arguments[role]
        assert config["placement_group_config"]["bundles"] == [{"CPU": 0.1}]  # the replica has the share
        options = config["deployment_config"]["ray_actor_options"]
        shares += config["deployment_config"]["num_replicas"] * options["num_gpus"]
        assert config["accelerator_config"] == {"kind": "gpu"}
        assert config["engine_kwargs"]["gpu_memory_utilization"] == options["num_gpus"] == 0.3
        assert config["engine_kwargs"]["distributed_executor_backend"] == "uni"
        assert not [name for name in config["runtime_env"]["env_vars"] if name.startswith("VLLM_CPU_")]
    assert 0.89 < shares <= 1
    assert _gpus(arguments) == 1
    assert _gpus(demo_arguments(DEPLOYMENT, MODEL, 2, 20)) is None
    load = LoadSpec("p", "m", rate=0.0, seconds=1, warm_up_s=0, users=1, max_tokens=1, temperature=0.0)
    described = demo._Plan(arguments, load, 1, 1, Path("out"), 0)
    assert described.clock == "engine time"
    assert described.hardware.startswith("one GPU and ")


class _Service:
    """A service whose pool refuses the first tables. Each load brings samples for another one."""

    def __init__(self, refusals: int) -> None:
        self.loads = 0
        self._refusals = refusals

    def status(self) -> dict[str, Any]:
        refusal = {"why": "a reason"} if self._refusals else None
        pool = {"samples": 30 * self.loads, "needed": 24, "last_refusal": refusal, "note": "a note"}
        return {"table": None if self.loads <= self._refusals else {"version": 1}, "signatures": pool}

    def trace(self) -> bytes:
        return b"trace"

    table = trace


@pytest.mark.parametrize(("refusals", "loads"), [(0, 1), (2, 3), (100, demo._MAX_TABLE_LOADS)])
def test_load_repeats_longer_each_time_until_the_service_has_a_routing_table(
    refusals: int, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _Service(refusals)
    seconds: list[int] = []

    def run_load(_service: Any, _plan: Any, _step: Any, load: LoadSpec, **_: Any) -> None:
        service.loads += 1
        seconds.append(load.seconds)

    monkeypatch.setattr(demo, "_run_load", run_load)
    if refusals < loads:
        demo._make_table(service, plan(tmp_path))
    else:
        with pytest.raises(UserInputError, match="no routing table after 168 s of load: a note"):
            demo._make_table(service, plan(tmp_path))
    assert seconds == [8 * (number + 1) for number in range(loads)]
