"""The study of whole replicas at small size: its workloads and expected results."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.figures import whole
from benchmarks.papers.prefix_policies import LongestPrefix, SessionHash
from benchmarks.papers.reproduce import reproduce
from eldr_serve.scheduling import Loads, StepCost, check_policy
from eldr_serve.scheduling.cost_file import FittedCost
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from loadgen.traces import read_arrival_trace
from offline.predictor import fit_signature_predictor
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode, Whole
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate
from tests.support.in_process import command, sentence
from tests.support.tables import request
from tests.support.traces import observed_experts, random_routes

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide 100 sessions of 12 turns, each turn two blocks longer. All share the first block."""
    rng, lines = np.random.default_rng(1), []
    for turn in range(12):
        for session in rng.permutation(100).tolist():
            blocks = [0, *range(1000 * (session + 1), 1000 * (session + 1) + 8 + 2 * turn)]
            lines.append({"prompt_tokens": 512 * len(blocks) - 9, "output_tokens": 120, "hash_ids": blocks})
    path = tmp_path_factory.mktemp("conversations") / "mooncake.jsonl"
    path.write_text("".join(json.dumps(r | {"timestamp_ms": 50 * n}) + "\n" for n, r in enumerate(lines)))
    return path


def test_a_session_has_one_kind_and_its_turns_share_blocks(observed: Path, conversations: Path) -> None:
    records = read_arrival_trace(conversations)
    requests = whole._sessions(
        read_calibration_trace(observed), np.arange(360), records, 1200, np.random.default_rng(0)
    )
    kinds: dict[str, set[int]] = {}
    for key, kind, blocks in zip(requests.keys, requests.kind.tolist(), requests.blocks, strict=True):
        kinds.setdefault(key, set()).add(kind)
        assert key == str(blocks[:2])
    assert len(kinds) == 100
    assert {len(kinds_of_session) for kinds_of_session in kinds.values()} == {1}
    tokens = np.array([len(blocks) for blocks in requests.blocks]) * whole.BLOCK
    assert (requests.prompt_tokens <= tokens).all()
    assert (requests.prompt_tokens > tokens - whole.BLOCK).all()


def test_an_applications_requests_share_only_its_system_prompt(observed: Path) -> None:
    trace = read_calibration_trace(observed)
    requests = whole._system_prompts(trace, np.arange(360), 400, np.random.default_rng(0))
    system = {
        key: blocks[: whole.SYSTEM_BLOCKS] for key, blocks in zip(requests.keys, requests.blocks, strict=True)
    }
    assert len(set(system.values())) == len(system) > 20
    own_blocks = [block for blocks in requests.blocks for block in blocks[whole.SYSTEM_BLOCKS :]]
    assert len(set(own_blocks)) == len(own_blocks)
    assert not set(own_blocks) & {block for blocks in system.values() for block in blocks}
    full = (requests.prompt_tokens // whole.BLOCK).tolist()
    assert [len(blocks) for blocks in requests.blocks] == full
    domain = {key: trace.domains[kind] for key, kind in zip(requests.keys, requests.kind, strict=True)}
    assert all(trace.domains[k] == domain[key] for key, k in zip(requests.keys, requests.kind, strict=True))


def test_a_long_prompt_begins_like_its_session_and_all_its_tokens_predict(observed: Path) -> None:
    trace = read_calibration_trace(observed)  # prompts of 20 tokens
    members, kind = np.arange(360), np.array([3, 3, 70])
    lengths = np.array([20, 47, 47])
    requests = Requests(np.arange(3.0), lengths, np.full(3, 5), kind, keys=("a", "a", "b"))
    predictor, _ = fit_signature_predictor(trace)
    own_experts = whole._own_experts(trace, Experts.from_trace(trace), requests, members, predictor, 0)
    np.testing.assert_allclose(own_experts.counts.sum(axis=(1, 2)), 2 * 3 * lengths)
    np.testing.assert_array_equal(own_experts.counts[0], trace.prefill_counts[3])
    np.testing.assert_array_equal(own_experts.predicted[0], predictor.predict(trace.prompts[3]))
    assert own_experts.predicted[1].sum() == pytest.approx(2 * 3 * 47, rel=1e-3)
    assert own_experts.domains == ["code", "code", "math"]
    assert whole._parts(np.full(9, 20), 3, [5, 6], 47) == [(5, 20), (6, 7), (3, 20)]
    assert whole._parts(np.full(9, 20), 3, [5, 6], 12) == [(3, 12)]


def test_policies_of_whole_replicas_get_predicted_then_measured_counts() -> None:
    assigned: list[tuple[str, bool, float]] = []

    class Listening(MarginalCost):
        def on_assigned(self, request: Any, position: int, decision: Any = None) -> None:
            assigned.append((request.request_id, request.predicted, float(request.expert_counts[0, 0])))
            super().on_assigned(request, position, decision)

    experts = observed_experts(
        np.full((1, 1, 4), 10),
        np.array([20]),
        random_routes(RNG, 1, (3, 4), layers=1, experts=4, top_k=2),
        ["d"],
    )
    experts = replace(experts, predicted=np.full((1, 1, 4), 5.0))
    requests = Requests(np.zeros(1), np.array([20]), np.array([3]), np.zeros(1, np.int64))
    cluster = Cluster(decode=Decode(workers=2, cost=StepCost(), whole=Whole()))
    simulate(requests, Listening(), cluster, experts=experts)
    assert assigned == [("0", True, 5.0), ("0", False, 10.0)]


def test_marginal_cost_weighs_prefixes_experts_and_load_together(
    observed: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORKERS": (4,), "APPLICATIONS": 24, "CACHE_BLOCKS": 500, "CALIBRATION": 60}.items():
        monkeypatch.setattr(whole, name, value)
    out = tmp_path / "policies.json"
    assert command(reproduce, "whole", "policies", trace=observed, requests=10).exit_code == 2
    reproduce("whole", "policies", trace=[observed, conversations], requests=800, seeds=2, out=out)
    assert out.with_suffix(".png").exists()
    rows = {(r["workload"], r["policy"]): r for r in json.loads(out.read_text())["rows"]}
    assert len(rows) == 3 * 10
    for workload in whole.WORKLOADS:
        ours, alone = rows[workload, whole.OURS], rows[workload, whole.DECODE_ALONE]
        assert ours["active_experts"] < rows[workload, "shortest-queue"]["active_experts"]
        for row in (ours, alone):
            low, mean, high = (row[f"tpot_p50_change_pct{end}"] for end in ("_lowest", "", "_highest"))
            assert low <= mean <= high
        if workload == "many domains":
            assert {row["cached_pct"] for row in (ours, alone)} == {0}
        else:
            assert ours["cached_pct"] > alone["cached_pct"] + 2
            longest, turns = (rows[workload, name] for name in ("longest-prefix", "round-robin"))
            assert longest["cached_pct"] > turns["cached_pct"]


def test_unusable_input_is_refused_in_one_sentence(
    observed: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_options = [f"--trace={trace}" for trace in (observed, conversations)]
    few = command(reproduce, "whole", "policies", *trace_options, out=tmp_path / "x.json")
    assert "more than 600" in sentence(few)
    monkeypatch.setattr(whole, "CALIBRATION", 60)
    azure, cost = tmp_path / "trace.csv", tmp_path / "cost.json"
    azure.write_text("timestamp_s,prompt_tokens,output_tokens\n0,5,5\n")
    fitted = FittedCost(
        cost=StepCost(), steps=99, rms_relative_error=0.0, median_relative_error=None, source="decode"
    )
    fitted.save(cost)
    for traces, options, word in (
        ((observed,), {}, "two --trace"),
        ((observed, azure), {}, "no prefix blocks"),
        ((observed, conversations), {"cost": cost}, "prompt tokens"),
        ((observed, conversations), {"requests": 5000}, "1200 requests"),
    ):
        words = [f"--trace={trace}" for trace in traces]
        done = command(reproduce, "whole", "policies", *words, out=tmp_path / "x.json", **options)
        assert word in sentence(done)


@pytest.mark.parametrize("policy", [SessionHash, LongestPrefix])
def test_the_studys_balancers_pass_check_policy(policy: type) -> None:
    assert check_policy(policy) == []


def test_a_session_stays_until_its_worker_is_overloaded() -> None:
    policy, idle = SessionHash(), Loads.from_counts([1, 1, 1, 1])
    own_worker = policy.select(request(prompt_key="s"), idle, RNG).position
    others = {policy.select(request(str(n), prompt_key="s"), idle, RNG).position for n in range(9)}
    assert others == {own_worker}
    assert len({policy.select(request(prompt_key=str(n)), idle, RNG).position for n in range(40)}) == 4
    full = Loads.from_counts([9 if worker == own_worker else 1 + worker for worker in range(4)])
    least = min(worker for worker in range(4) if worker != own_worker)
    assert policy.select(request(prompt_key="s"), full, RNG).position == least
    assert policy.select(request(), Loads.from_counts([2, 1]), RNG).position == 1


def test_the_longest_prefix_wins_among_workers_without_overload() -> None:
    def choose(in_flight: list[int], cached: list[int]) -> int:
        loads = Loads.from_counts(in_flight)
        prefix_loads = Loads(
            loads.in_flight, loads.kv_tokens, loads.available, cached_tokens=np.array(cached)
        )
        return LongestPrefix().select(request(), prefix_loads, RNG).position

    assert choose([4, 4, 4], [0, 32, 64]) == 2
    assert choose([1, 4, 9], [0, 32, 64]) == 1
    assert choose([1, 9, 9], [0, 32, 64]) == 0
    assert choose([2, 1, 1], [32, 32, 0]) == 1
    assert LongestPrefix().select(request(), Loads.from_counts([2, 1]), RNG).position == 1
