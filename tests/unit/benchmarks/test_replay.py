"""Parts of replays by step, without an engine."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.moe_layer_latency import draw_experts
from benchmarks.lib.captured_routes import CapturedRoutes
from benchmarks.lib.engine_pool import EnginePool, EngineProcesses, ReplayTimes
from benchmarks.lib.engines import device_kwargs
from benchmarks.lib.replay import schedule as replay
from benchmarks.lib.replay.command import select_arms
from benchmarks.lib.replay.engine import BLOCK, ReplayArrival, StepRecords, pad_to_blocks
from benchmarks.lib.replay.rows import LAYERS
from benchmarks.lib.replay.schedule import (
    FIT_REQUESTS,
    Arm,
    ReplayCase,
    ReplayExperiment,
    ReplayLoad,
    fit_batches,
    parse_loads,
)
from eldr_serve.engine.vllm.config import engine_kwargs
from eldr_serve.errors import ServiceFailedError, UserInputError
from loadgen.journal import Journal
from tests.support.traces import synthetic_trace


@given(st.lists(st.integers(0, 99), min_size=1, max_size=200))
def test_aligned_prompts_keep_their_end_and_fill_blocks_plus_one_token(tokens: list[int]) -> None:
    filled = pad_to_blocks(tokens)
    assert len(filled) % BLOCK == 1
    assert len(filled) >= min(len(tokens), BLOCK + 1)
    assert filled[-len(tokens) :] == tokens
    assert len(filled) < len(tokens) + BLOCK + 1


@given(seed=st.integers(0, 999), batch=st.integers(1, 40), top_k=st.integers(1, 8), more=st.integers(0, 56))
def test_routes_activate_the_exact_number_of_experts(seed: int, batch: int, top_k: int, more: int) -> None:
    active = min(top_k + more, batch * top_k)
    ids = draw_experts(batch, active, 64, top_k, np.random.default_rng(seed))
    assert ids.shape == (batch, top_k)
    assert len(np.unique(ids)) == active
    assert all(len(set(token)) == top_k for token in ids.tolist())


def test_workloads_are_split_without_overlap() -> None:
    data = CapturedRoutes(synthetic_trace(), [])
    data.trace.domains[:3] = ["code", "math", "legal"]
    domains = np.array(data.trace.domains)
    task, language = data.group("task"), data.group("language")
    assert set(domains[task]) <= {"code", "math", "medical", "legal"}
    assert sorted([*task, *language]) == sorted(data.group("all")) == list(range(len(domains)))
    fit, rest = data.split("all", 0.4, 1)
    assert not set(fit) & set(rest)
    assert len(fit) == round(0.4 * len(domains))
    assert data.trace.subset_without_routes(fit).ids == [data.trace.ids[i] for i in fit]
    assert parse_loads("task", "4,8", "16", 5) == [ReplayLoad("task", 4, 16, 5), ReplayLoad("task", 8, 16, 5)]
    for groups, workers, batch in (("tasks", "4", "8"), ("task", "four", "8"), ("task", "4", "0")):
        with pytest.raises(UserInputError):
            parse_loads(groups, workers, batch, 5)
    with pytest.raises(UserInputError, match="cores"):
        EnginePool(Path("model"), 100_000)
    with pytest.raises(UserInputError, match="leave it at 1"):
        EnginePool(Path("model"), 2, "cuda")


def test_a_dead_engine_is_no_fault_of_the_user() -> None:
    with pytest.raises(ServiceFailedError, match="engine died"), EngineProcesses(1, print):
        raise BrokenProcessPool


@pytest.mark.parametrize(
    ("requests", "batches"),
    [(FIT_REQUESTS, [2, 10, 24, 40]), (100, [1, 3, 8, 13]), (24, [1, 2, 3]), (12, [1, 2])],
)
def test_the_batches_of_a_fit_sum_to_a_quarter_of_its_requests(requests: int, batches: list[int]) -> None:
    assert fit_batches(requests) == batches
    assert sum(batches) == requests // 4


def test_a_replay_can_be_limited_to_some_arms() -> None:
    arms = [Arm(name, name) for name in ("round-robin", "shortest-queue", "marginal-cost")]
    assert select_arms("all", arms) == arms
    assert select_arms("marginal-cost,round-robin", arms) == [arms[2], arms[0]]
    with pytest.raises(
        UserInputError, match="'nearest'; there are round-robin, shortest-queue, marginal-cost"
    ):
        select_arms("round-robin,nearest", arms)


def test_a_gpu_engine_captures_graphs_of_the_given_batch_sizes() -> None:
    assert device_kwargs("cpu", [1, 2]) == {"device": "cpu"}
    on_gpu = device_kwargs("cuda", [1, 2])
    assert on_gpu["compilation_config"]["cudagraph_capture_sizes"] == [1, 2]
    assert engine_kwargs("decode", **on_gpu)["kv_transfer_config"]["kv_buffer_device"] == "cuda"
    eager = device_kwargs("cuda")
    assert device_kwargs("cuda-eager", [1, 2]) == eager
    assert eager["enforce_eager"]
    assert "compilation_config" not in eager


class _EnginePool:
    """A fake pool whose steps cost a random number of experts. It is interrupted after some runs."""

    def __init__(self, runs: int) -> None:
        self.runs = 0
        self._most = runs
        self._rng = np.random.default_rng(0)

    def probe_s(self) -> float:
        return 1e-3

    def replay(self, arrivals: list[ReplayArrival], probe_s: float) -> Future[ReplayTimes]:
        assert probe_s == 1e-3
        answer: Future[ReplayTimes] = Future()
        if self.runs == self._most:
            answer.set_exception(KeyboardInterrupt())
            return answer
        self.runs += 1
        experts = self._rng.integers(10, 60, 8).tolist()
        steps = StepRecords([1e-3 + 1e-4 * n for n in experts], [1] * 8, [100] * 8, experts, [1.0] * 8)
        times = {a.request_id: a.arrival_s + np.cumsum(self._rng.random(3)) for a in arrivals}
        answer.set_result((times, steps))
        return answer


def test_a_stopped_run_resumes_and_repeats_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = synthetic_trace(num_layers=LAYERS)
    data = CapturedRoutes(trace, [[1, 2, 3]] * len(trace.ids))
    monkeypatch.setattr(replay, "load_or_capture", lambda *_, **__: data)
    arms = [Arm("round-robin", "round-robin"), Arm("locality-band", "locality-band")]
    pools: list[_EnginePool] = []

    def compare(runs: int, fit_requests: int = FIT_REQUESTS) -> list[ReplayCase]:
        pools.append(_EnginePool(runs))
        experiment = ReplayExperiment(
            tmp_path,
            engine_pool=pools[-1],
            requests=60,
            output_tokens=4,
            intermediate=32,
            work=tmp_path,
            seed=0,
            journal=Journal(tmp_path / f"fit_{fit_requests}.jsonl", {"seed": 0}),
            fit_requests=fit_requests,
        )
        return experiment.compare([ReplayLoad("all", 3, 2, 4)], arms, repeats=2)

    needed = 16 + 3 * 2 * 2  # batches of the fit, and workers x arms x repeats
    for runs in (7, 20):
        with pytest.raises(KeyboardInterrupt):
            compare(runs)
    # The interrupted fit begins again; later measurements are kept.
    (done,) = compare(100)
    assert [pool.runs for pool in pools] == [7, 20, needed - 20]
    assert all((times > 0).all() for times in done.replayed_tpot_s.values())
    (read,) = compare(0)
    for label in done.steps:
        assert np.array_equal(done.replayed_tpot_s[label], read.replayed_tpot_s[label])
        assert done.steps[label] == read.steps[label]
    compare(100, fit_requests=24)
    assert pools[-1].runs == needed - 4
