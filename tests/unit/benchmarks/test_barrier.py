"""The arithmetic of the benchmark of ranks that step together, and its table."""

import asyncio
import itertools
import json
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.barrier import any_rank, recording
from benchmarks.lib.barrier.predicted import BarrierPrediction, fit_cost, fit_handover_s, predict
from benchmarks.lib.barrier.requests import TraceScale, order_for_round, read_stems, request_bodies
from benchmarks.lib.barrier.rows import policy_rows
from benchmarks.lib.barrier.steps import RankSteps, join_ranks, read_steps, steps_file
from benchmarks.lib.barrier.trial import BarrierTrial, ClosedLoop, timed_loop
from benchmarks.lib.client import Answer
from benchmarks.serving.barrier import (
    _measure,
    barrier,
    barrier_arguments,
    policy_and_parameters,
    predictions_of,
    schedule,
)
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.engine import VllmEngine
from eldr_serve.errors import UserInputError
from eldr_serve.ingress.openai_endpoints import _NOT_FOR_ENGINES
from eldr_serve.scheduling import StepCost, make_policy
from loadgen.sse import StreamTiming
from loadgen.traces import RecordedArrival
from offline.simulation.cluster import Cluster, Decode
from tests.support.in_process import command, sentence
from tests.support.shipped import ROOT

# Forward, requests, KV tokens, start; the second rank is idle in forward 12, and forward 14 is unknown.
LINES = (
    [[11, 2, 100, 1.0], [12, 2, 102, 1.5], [13, 1, 40, 2.25], [15, 1, 41, 4.0]],
    [[11, 1, 70, 1.1], [13, 3, 90, 2.0], [15, 3, 93, 4.0]],
)


def steps_of(kv_tokens: list[list[int]], seconds: float = 0.1, requests: int = 2) -> RankSteps:
    """Return steps of equal times and batches."""
    kv = np.array(kv_tokens)
    times = np.arange(len(kv)) * seconds
    return RankSteps(times, np.full(len(kv), seconds), np.full_like(kv, requests), kv)


def trial_of(tpot_ms: list[float], kv_tokens: list[list[int]]) -> BarrierTrial:
    number = np.arange(len(tpot_ms))
    return BarrierTrial(2 * len(tpot_ms), number, np.array(tpot_ms), number + 50.0, steps_of(kv_tokens), {})


def test_the_steps_of_ranks_are_joined_by_their_forward() -> None:
    steps = join_ranks(LINES)
    assert steps.start_s.tolist() == [1.1, 1.5, 2.25, 4.0]
    assert steps.seconds[:2].tolist() == pytest.approx([0.4, 0.75])
    assert np.isnan(steps.seconds[2:]).all()
    assert steps.requests.tolist() == [[2, 1], [2, 0], [1, 3], [1, 3]]
    assert steps.spread.tolist() == [30, 102, 50, 52]
    assert steps.imbalance.tolist() == [30, 102, 50, 52]  # equal for two ranks
    assert steps.tokens_per_s == pytest.approx(5 / 1.15)
    part = steps.select_period(1.5, 4.0)
    assert part.kv_tokens.tolist() == [[102, 0], [40, 90]]
    stored = json.loads(json.dumps(steps.to_json()))
    for stored_array, array in zip(
        vars(RankSteps.from_json(stored)).values(), vars(steps).values(), strict=True
    ):
        np.testing.assert_array_equal(stored_array, array)


def test_the_imbalance_of_several_ranks_has_two_measures() -> None:
    steps = steps_of([[10, 4, 1], [7, 7, 7]])
    assert steps.spread.tolist() == [9, 0]
    assert steps.imbalance.tolist() == [3 * 10 - 15, 0]


def test_a_scheduler_writes_its_steps_and_an_incomplete_line_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = iter([{"a": 1, "b": 1}, {}, {"b": 1}])
    monkeypatch.setattr(
        recording.EldrAsyncScheduler,
        "schedule",
        lambda self: SimpleNamespace(num_scheduled_tokens=next(scheduled)),
    )
    forwards = itertools.count(6)
    monkeypatch.setattr(recording, "rank_batches", lambda: SimpleNamespace(forwards=next(forwards)))
    scheduler: Any = object.__new__(recording.RecordingScheduler)
    scheduler.requests = {"a": SimpleNamespace(num_computed_tokens=5)}
    scheduler.requests["b"] = SimpleNamespace(num_computed_tokens=8)
    with steps_file(tmp_path, 0).open("w") as scheduler._steps:
        for _ in range(3):
            scheduler.schedule()
    steps_file(tmp_path, 1).write_text("[8, 1, 4, 0.5]\n[9, 1")
    steps = read_steps(tmp_path, 2)
    assert steps.requests.tolist() == [[2, 0], [1, 1]]
    assert steps.kv_tokens.tolist() == [[13, 0], [8, 4]]


def test_lengths_are_scaled_to_their_means_and_limited() -> None:
    trace = [RecordedArrival(0.0, prompt, output) for prompt, output in [(10, 8), (30, 2)]]
    scale = TraceScale(prompt=200, output=10, longest_output=12, context=260)
    assert scale.longest_prompt == 248
    lengths = scale.lengths(trace)
    assert lengths.tolist() == [[97, 12], [225, 4]]  # the trace has [100, 16] and [300, 4]
    assert [order_for_round(lengths, number, 2).tolist() for number in (0, 1)] == [
        lengths.tolist(),
        lengths[::-1].tolist(),
    ]


def test_prompts_are_beginnings_of_texts_of_each_domain(tmp_path: Path) -> None:
    records = [("a", "one two three " * 9), ("b", "uno dos tres " * 9), ("b", "siete " * 9), ("c", "x")]
    lines = [json.dumps({"id": str(n), "domain": d, "prompt": text}) for n, (d, text) in enumerate(records)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    stems = read_stems(tmp_path, 20)
    assert [len(stem) for stem in stems] == [20, 20]  # `c` is too short
    lengths = np.array([[5, 7], [20, 2]])
    first, again = (list(itertools.islice(request_bodies(lengths, stems, seed=3), 9)) for _ in range(2))
    assert first == again
    assert [body["max_tokens"] for body in first[:3]] == [7, 2, 7]
    assert all(body["prompt"] in [stem[: len(body["prompt"])] for stem in stems] for body in first)
    with pytest.raises(UserInputError, match=r"no domain of .* has 999 tokens"):
        read_stems(tmp_path, 999)


def test_a_closed_loop_ends_after_its_time() -> None:
    running = 0

    async def send(_: Any, body: dict[str, Any]) -> Answer:
        nonlocal running
        running += 1
        await asyncio.sleep(30 if body["number"] == 3 else 0.01)
        running -= 1
        return Answer(started_at_s=float(body["number"]))

    bodies = ({"number": number} for number in itertools.count())
    start_s, sent, answers = asyncio.run(timed_loop(send, bodies, in_flight=3, seconds=0.3))
    assert 0.25 < time.perf_counter() - start_s < 10
    assert running == 3
    assert (
        {int(answer.started_at_s) for answer in answers.values()}
        == {*answers}
        == {*range(sent)} - {3} - {*range(sent - 2, sent)}
    )
    assert sent > 8

    async def fail(_: Any, body: dict[str, Any]) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(timed_loop(fail, iter([{}]), in_flight=1, seconds=9.0))


def test_a_trial_has_the_requests_and_steps_of_its_measured_period() -> None:
    def answer(end: float) -> Answer:
        return Answer(end - 2, end, timing=StreamTiming([0.5, 2.0], completion_tokens=4))

    answers = {4: answer(14.9), 1: answer(12.0), 0: answer(11.9), 2: answer(15.0)}
    answers[3] = Answer(started_at_s=9.0, ended_at_s=13.0, error="HTTP 500")
    start_s = np.array([11.9, 12.0, 14.9, 15.0])
    kv = np.array([[1, 2], [3, 5], [8, 9], [0, 0]])
    steps = RankSteps(start_s, np.full(4, 0.1), kv, kv)
    load = ClosedLoop(slots=2, in_flight=4, warm_up_s=2.0, seconds=3.0)
    trial = BarrierTrial.from_answers(load, 10.0, 7, answers, steps)
    assert (trial.sent, trial.number.tolist(), trial.errors) == (7, [1, 4], {"HTTP 500": 1})
    assert trial.tpot_ms.tolist() == trial.ttft_ms.tolist() == [500, 500]
    assert trial.steps.kv_tokens.tolist() == [[3, 5], [8, 9]]
    stored = BarrierTrial.from_json(json.loads(json.dumps(trial.to_json())))
    np.testing.assert_array_equal(stored.number, trial.number)
    np.testing.assert_array_equal(stored.steps.spread, [2, 1])
    with pytest.raises(UserInputError, match=r"no request ended .*HTTP 500"):
        BarrierTrial.from_answers(load, 0.0, 7, answers, steps)


def test_the_cost_of_a_step_is_that_of_the_fullest_rank() -> None:
    rng = np.random.default_rng(0)
    kv = rng.integers(1000, 9000, (200, 2))
    requests = rng.integers(1, 5, (200, 2))
    fullest = kv.argmax(axis=1)
    of_fullest = requests[np.arange(200), fullest]
    seconds = 0.01 + 0.002 * of_fullest + 1e-6 * kv.max(axis=1)
    steps = RankSteps(np.cumsum(seconds), seconds, requests, kv)
    cost = fit_cost([steps, steps])
    assert (cost.fixed_s, cost.per_request_s, cost.per_kv_token_s) == pytest.approx((0.01, 0.002, 1e-6))
    assert cost.per_expert_s == 0
    with pytest.raises(UserInputError, match="0 steps"):
        fit_cost([steps.select_period(-2, -1)])


def test_the_handover_is_the_time_of_an_empty_slot_for_each_request() -> None:
    # Two ranks with 4 slots each; on average 1 of 8 is empty, and 7 requests of 10 tokens end in 1 s.
    steps = RankSteps(np.arange(10) / 10, np.full(10, 0.1), np.array([[4, 3]] * 10), np.ones((10, 2), int))
    assert fit_handover_s([steps, steps], slots=4, mean_output=10.0) == pytest.approx(1 / 7)
    assert fit_handover_s([], slots=4, mean_output=10.0) == 0


def test_the_simulator_predicts_that_balance_route_balances_and_is_faster() -> None:
    rng = np.random.default_rng(1)
    lengths = np.column_stack([rng.integers(10, 4000, 500), rng.integers(20, 200, 500)])
    load = ClosedLoop(slots=8, in_flight=48, warm_up_s=40.0, seconds=100.0)
    cost = StepCost(fixed_s=0.02, per_request_s=0.0, per_kv_token_s=2e-6, per_expert_s=0.0)
    cluster = Cluster(decode=Decode(workers=2, max_batch=8, barrier=True, cost=cost), handover_fixed_s=0.05)

    def predict_policy(text: str) -> BarrierPrediction:
        name, parameters = policy_and_parameters(text, 8)
        make = partial(make_policy, name, **parameters)
        return predict(make, lengths, load, cluster, requests=600, seed=0)

    queue, route = predict_policy("shortest-queue"), predict_policy("balance-route")
    assert min(len(queue.tpot_ms), len(route.tpot_ms)) > 200
    assert np.quantile(route.tpot_ms, 0.99) < np.quantile(queue.tpot_ms, 0.99)
    assert route.spread < queue.spread / 2
    assert route.imbalance == pytest.approx(route.spread)  # two ranks


def test_rows_compare_each_policy_with_the_shortest_queue() -> None:
    kv = {"shortest-queue": [[90, 30, 60]], "balance-route": [[70, 50, 60]]}
    tpot = {"shortest-queue": np.linspace(20, 30, 40), "balance-route": 0.9 * np.linspace(20, 30, 40)}
    trials = {
        policy: [trial_of((scale * tpot[policy]).tolist(), kv[policy] * 40) for scale in (1.0, 1.1)]
        for policy in kv
    }
    trials["balance-route"][0].errors["HTTP 503"] = 2
    predictions = {
        "shortest-queue": [BarrierPrediction(np.array([20.0, 30.0]), 40.0, 60.0)] * 2,
        "balance-route": [BarrierPrediction(np.array([19.0, 24.0]), 10.0, 15.0)] * 2,
    }
    queue, route = policy_rows("conv", trials, predictions, seed=0)
    assert (queue["trace"], queue["policy"], queue["rounds"], queue["requests"]) == (
        "conv",
        "shortest-queue",
        2,
        80,
    )
    assert (queue["failures"], route["failures"], route["steps"]) == (0, 2, 80)
    assert (queue["kv_tokens"], queue["step_ms"], queue["tokens_per_s"]) == pytest.approx((60, 100, 60))
    assert (queue["spread_tokens"], queue["imbalance_tokens"]) == (60, 90)
    assert queue["spread_below"] is queue["tpot_p99_ms_change_pct"] is queue["simulated_spread_below"] is None
    for suffix in ("", "_low", "_high"):
        assert route[f"spread_below{suffix}"] == route[f"imbalance_below{suffix}"] == pytest.approx(3)
        assert route[f"tpot_p50_ms_change_pct{suffix}"] == pytest.approx(-10)
        assert route[f"tpot_p99_ms_change_pct{suffix}"] == pytest.approx(-10)
    assert queue["tpot_p50_ms_low"] < queue["tpot_p50_ms"] < queue["tpot_p50_ms_high"]
    assert (route["simulated_spread_tokens"], route["simulated_spread_below"]) == (10, 4)
    assert route["spread_tokens_error_pct"] == pytest.approx(-50)
    assert queue["tpot_p50_ms_error_pct"] == pytest.approx(100 * (25 / queue["tpot_p50_ms"] - 1))
    assert route["simulated_tpot_p50_ms_change_pct"] == pytest.approx(100 * (21.5 / 25 - 1))
    assert list(queue) == list(route)


def test_a_policy_without_predictions_has_the_same_columns() -> None:
    trials = {policy: [trial_of([20.0] * 9, [[90, 30]] * 40)] for policy in ("shortest-queue", "vllm")}
    predictions = {"shortest-queue": [BarrierPrediction(np.array([20.0, 30.0]), 40.0, 60.0)]}
    queue, vllm = policy_rows("conv", trials, predictions, seed=0)
    assert list(queue) == list(vllm)
    assert (vllm["spread_tokens"], vllm["spread_below"]) == (60, 1)
    predicted = [name for name in vllm if name.startswith("simulated") or name.endswith("error_pct")]
    assert len(predicted) == 12
    assert {vllm[name] for name in predicted} == {None}


def test_the_simulator_neither_predicts_vllm_nor_learns_from_it() -> None:
    rng = np.random.default_rng(2)

    def trial(ms: float) -> BarrierTrial:
        return trial_of([ms] * 9, rng.integers(100, 200, (50, 2)).tolist())

    trials = {"shortest-queue": [trial(20.0)], "random": [trial(20.0)]}
    lengths = np.array([[33, 12], [65, 8]])
    load = ClosedLoop(slots=4, in_flight=12, warm_up_s=1.0, seconds=2.0)
    expected = predictions_of(trials, lengths, load, seed=0)
    predictions = predictions_of(trials | {"vllm": [trial(90.0)]}, lengths, load, seed=0)
    assert list(predictions) == ["shortest-queue", "random"]
    for policy, (prediction,) in predictions.items():
        assert prediction.spread == expected[policy][0].spread
        np.testing.assert_array_equal(prediction.tpot_ms, expected[policy][0].tpot_ms)


def test_rounds_are_resampled_if_there_are_four() -> None:
    trials = {"shortest-queue": [trial_of([20.0] * 9, [[10 * n, 0]] * 40) for n in range(1, 5)]}
    predictions = {"shortest-queue": [BarrierPrediction(np.array([20.0]), 25.0, 25.0)]}
    (row,) = policy_rows("code", trials, predictions, seed=0)
    assert row["spread_tokens_low"] < row["spread_tokens"] == 25 < row["spread_tokens_high"]


def test_each_round_has_each_trial_once() -> None:
    trials = schedule(["conv", "code"], ["a", "b", "c"], rounds=3, seed=0)
    assert [trial[:2] for trial in trials[::3]] == [(t, n) for n in range(3) for t in ("conv", "code")]
    assert set(Counter(trials).values()) == {1}
    orders = {tuple(policy for *_, policy in trials[first : first + 3]) for first in range(0, 18, 3)}
    assert len(orders) > 1


def test_only_decode_engines_write_steps_and_cache_no_prefixes(tmp_path: Path) -> None:
    deployment = ROOT / "deployments/cpu_demo_wide_ep.yaml"
    sizes = {"ranks": 4, "slots": 8, "context": 1024, "stream_interval": 2}
    arguments = barrier_arguments(deployment, tmp_path, **sizes, folder=tmp_path)
    prefill, decode = (arguments[f"{role}_config"] for role in ("prefill", "decode"))
    assert decode["engine_kwargs"]["data_parallel_size"] == 4
    assert (prefill["engine_kwargs"]["max_num_seqs"], decode["engine_kwargs"]["max_num_seqs"]) == (64, 8)
    assert prefill["engine_kwargs"]["max_model_len"] == decode["engine_kwargs"]["max_model_len"] == 1024
    assert decode["engine_kwargs"]["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in prefill["engine_kwargs"]
    module, _, name = decode["engine_kwargs"]["scheduler_cls"].rpartition(".")
    assert (module, name) == (recording.__name__, recording.RecordingScheduler.__name__)
    assert decode["runtime_env"]["env_vars"]["ELDR_RANK_STEPS"] == str(tmp_path)
    assert "ELDR_RANK_STEPS" not in prefill["runtime_env"]["env_vars"]
    backend = decode["runtime_env"]["env_vars"]["ELDR_ENGINE_BACKEND"]
    assert backend == f"{any_rank.__name__}:{any_rank.AnyRankBackend.__name__}"
    assert "ELDR_ENGINE_BACKEND" not in prefill["runtime_env"]["env_vars"]


async def test_an_engine_ignores_the_rank_of_requests_with_the_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generated: list[EngineRequest] = []

    async def start(cls: type[VllmEngine], config: Any) -> VllmEngine:
        return cls(None, config)

    async def generate(self: VllmEngine, request: EngineRequest, send: Any) -> Any:
        generated.append(request)

    monkeypatch.setattr(VllmEngine, "start", classmethod(start))
    monkeypatch.setattr(VllmEngine, "generate", generate)
    engine: Any = await any_rank.AnyRankBackend().start("m")
    for headers in ({}, {any_rank.HEADER: "1"}):
        await engine.generate(EngineRequest("completions", b"{}", "a", headers=headers, rank=1), None)
    assert [(request.id, request.rank) for request in generated] == [("a", 1), ("a", None)]
    assert any_rank.HEADER not in _NOT_FOR_ENGINES


@pytest.mark.parametrize(
    ("policy", "placed_by", "headers"),
    [
        ("vllm", ("shortest-queue", {}), {any_rank.HEADER: "1"}),
        ("shortest-queue", ("shortest-queue", {}), None),
        ("balance-route", ("balance-route", {"slots": 4}), None),
    ],
)
def test_only_the_requests_of_vllms_trials_have_the_header(
    policy: str, placed_by: Any, headers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def loop(send: Any, *_: Any, **__: Any) -> tuple[float, int, dict[int, Answer]]:
        sent.append(send)
        return 0.0, 1, {0: Answer(1.0, 2.0, timing=StreamTiming([0.5, 1.0], completion_tokens=2))}

    module = "benchmarks.serving.barrier"
    monkeypatch.setattr(f"{module}.completion_sender", lambda url, headers: (url, headers))
    monkeypatch.setattr(f"{module}.timed_loop", loop)
    monkeypatch.setattr(f"{module}.read_steps", lambda *_: steps_of([[3, 5]] * 40))
    policies: list[Any] = []
    service: Any = SimpleNamespace(
        url="http://here", wait_idle=lambda: None, set_policy=lambda *policy: policies.append(policy)
    )
    load = ClosedLoop(slots=4, in_flight=12, warm_up_s=1.0, seconds=2.0)
    settings: dict[str, Any] = {"lengths": {"conv": np.array([[33, 12]])}, "stems": [[1] * 40], "load": load}
    settings |= {"folder": tmp_path, "ranks": 2, "rounds": 1, "seed": 0}
    _measure(service, ("conv", 0, policy), **settings)
    assert policies == [placed_by]
    assert sent == [("http://here", headers)]


def test_policies_know_the_ranks_slots() -> None:
    assert policy_and_parameters("shortest-queue", 16) == ("shortest-queue", {})
    assert policy_and_parameters("balance-route-horizon:alpha=4", 16) == (
        "balance-route-horizon",
        {"slots": 16, "alpha": 4},
    )
    assert policy_and_parameters("vllm", 16) == ("shortest-queue", {})


@pytest.mark.parametrize(
    ("policies", "reason"),
    [
        ("balance-route", "shortest-queue among them"),
        ("shortest-queue,shortest-queue", "each must be named once"),
        ("shortest-queue,nobody", "nobody"),
        ("shortest-queue,balance-route:alpha=4", "alpha"),
        ("shortest-queue,vllm:alpha=4", "vllm"),
        ("vllm", "shortest-queue among them"),
    ],
)
def test_unusable_policies_are_refused(policies: str, reason: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp_s,prompt_tokens,output_tokens\n0.0,10,20\n")
    assert reason in sentence(command(barrier, trace=trace, policies=policies, work=tmp_path))


def test_a_stopped_run_resumes_and_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is replaced. The second run has all trials but one."""
    trace = tmp_path / "conv.csv"
    trace.write_text("timestamp_s,prompt_tokens,output_tokens\n" + "0.0,40,20\n" * 9)
    out = tmp_path / "result.json"
    measured: list[Any] = []

    def measure(service: None, key: tuple[str, int, str], **_: Any) -> dict[str, Any]:
        if len(measured) == 3:
            measured.append("stopped")
            raise UserInputError("stopped")
        measured.append(key)
        wide = 60 if key[2] == "shortest-queue" else 20
        return trial_of([20.0] * 8, [[200 + wide, 200]] * 40).to_json()

    monkeypatch.setattr("benchmarks.serving.barrier._measure", measure)
    monkeypatch.setattr("benchmarks.serving.barrier._service", lambda *_: nullcontext())
    load = {"policies": "shortest-queue,balance-route", "rounds": 2, "slots": 4, "in_flight": 12}
    load |= {"warm_up_seconds": 1, "trial_seconds": 2, "context": 64, "longest_output": 24}
    load |= {"prompt_tokens": 30, "output_tokens": 12}
    first = command(barrier, trace=trace, work=tmp_path, out=out, **load)
    assert sentence(first).endswith("stopped")
    done = command(barrier, trace=trace, work=tmp_path, out=out, **load)
    assert done.exit_code == 0, done.output
    measured.remove("stopped")
    assert set(measured) == set(schedule(["conv"], ["shortest-queue", "balance-route"], 2, seed=0))
    result = json.loads(out.read_text())
    assert [row["policy"] for row in result["rows"]] == ["shortest-queue", "balance-route"]
    assert result["rows"][1]["spread_below"] == pytest.approx(3)
    assert result["inputs"]["trace"] == ["conv.csv"]
    assert not (tmp_path / "barrier.jsonl").exists()


def test_vllms_balancer_is_added_to_kept_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is replaced. The second run has only the trials of vLLM's balancer."""
    trace = tmp_path / "conv.csv"
    trace.write_text("timestamp_s,prompt_tokens,output_tokens\n" + "0.0,40,20\n" * 9)
    out = tmp_path / "result.json"
    measured: list[Any] = []

    def measure(service: None, key: tuple[str, int, str], **_: Any) -> dict[str, Any]:
        measured.append(key)
        return trial_of([20.0] * 8, [[260, 200]] * 40).to_json()

    monkeypatch.setattr("benchmarks.serving.barrier._measure", measure)
    monkeypatch.setattr("benchmarks.serving.barrier._service", lambda *_: nullcontext())
    load = {"rounds": 2, "slots": 4, "in_flight": 12, "warm_up_seconds": 1, "trial_seconds": 2}
    load |= {"context": 64, "longest_output": 24, "prompt_tokens": 30, "output_tokens": 12}
    for policies, options in (("shortest-queue", ["--keep"]), ("shortest-queue,vllm", [])):
        measured.clear()
        done = command(barrier, *options, trace=trace, work=tmp_path, out=out, policies=policies, **load)
        assert done.exit_code == 0, done.output
    assert set(measured) == {("conv", 0, "vllm"), ("conv", 1, "vllm")}
    result = json.loads(out.read_text())
    assert [row["policy"] for row in result["rows"]] == ["shortest-queue", "vllm"]
    assert result["inputs"]["policies"] == "shortest-queue,vllm"
    assert [row["simulated_spread_tokens"] is None for row in result["rows"]] == [False, True]
    assert not (tmp_path / "barrier.jsonl").exists()
