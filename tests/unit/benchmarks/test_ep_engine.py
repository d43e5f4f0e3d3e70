"""Rows of benchmarks of EP engines, which tests/engine runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.engine import ep_engine
from benchmarks.engine.ep_engine import add_empty_slots, ep_choice, ep_shift
from benchmarks.lib.captured_routes import CapturedRoutes
from benchmarks.lib.ep import engine as ep_processes
from benchmarks.lib.ep import planners
from benchmarks.lib.ep.batches import SKIPPED_STEPS, choose_homes, draw_disjoint_batches, summarise_batch
from benchmarks.lib.ep.engine import DecodedBatch, EpEngine
from benchmarks.lib.ep.rows import KEEPS, MIGRATES, PHASES, STARTS, choice_rows, shift_rows, start_rows
from benchmarks.lib.ep.turns import measure_in_turns
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import placement_id
from loadgen.journal import Journal
from offline.expert_placement import director, relaxation
from offline.expert_placement.cost import LayerCost
from tests.support.traces import favourites_trace, synthetic_trace


def measurement(
    step_ms: float, experts: float = 10.0, answers: str = "ab", **others: float
) -> dict[str, Any]:
    figures = {
        "experts_all_ranks": 18.0,
        "worst_rank_pairs": 16.0,
        "pairs_off_home_pct": 50.0,
        "other_ranks_per_token": 0.9,
    }
    return {"step_ms": step_ms, "worst_rank_experts": experts, "answers": list(answers)} | figures | others


class FakeEpEngine:
    started = 0

    def __enter__(self) -> FakeEpEngine:
        self.started += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_arms_take_turns_and_journalled_measurements_are_not_repeated(tmp_path: Path) -> None:
    engine: Any = FakeEpEngine()
    keys = [(turn, name) for turn in range(2) for name in ("a", "b")]
    measured: list[tuple[int, str]] = []

    def measure(running: Any, key: tuple[int, str]) -> str:
        assert running is engine
        measured.append(key)
        if len(measured) == 3:
            raise UserInputError("the engine died")
        return f"{key[1]}{key[0]}"

    def turns(minutes: float | None) -> dict[tuple[int, str], str]:
        return measure_in_turns(
            Journal(tmp_path / "j.jsonl", {"seed": 0}), keys, lambda: engine, measure, minutes
        )

    with pytest.raises(UserInputError, match="died"):
        turns(None)
    assert measured == keys[:3]
    assert list(Journal.read(tmp_path / "j.jsonl")) == ["0/a", "0/b"]
    with pytest.raises(TimeoutError, match="time is up"):
        turns(0.0)
    assert turns(None) == {(0, "a"): "a0", (0, "b"): "b0", (1, "a"): "a1", (1, "b"): "b1"}
    assert measured == [*keys[:3], *keys[2:]]
    assert engine.started == 3
    turns(0.0)  # nothing is left to measure
    assert engine.started == 3


@pytest.mark.parametrize(
    ("benchmark", "options", "words"),
    [
        (
            ep_choice,
            {"ranks": 3},
            "--ranks is 3: set it to a number that divides the model's 4 attention heads",
        ),
        (ep_choice, {"data_parallel": 3}, "--data-parallel is 3: .* the model's 64 experts"),
        (ep_shift, {"ranks": 8}, "--ranks is 8"),
        (ep_shift, {"groups": "task"}, "--groups is 'task': it must be two of"),
        (ep_shift, {"groups": "task,nosuch"}, "--groups is 'task,nosuch'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_captured(
    benchmark: Any, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ep_engine, "load_or_capture", lambda *_, **__: pytest.fail("it was captured"))
    with pytest.raises(UserInputError, match=words):
        benchmark(work=tmp_path, **options)


@pytest.mark.parametrize("benchmark", [ep_choice, ep_shift])
def test_the_journal_has_every_option_on_which_a_result_depends(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journal = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(ep_engine, "Journal", journal)
    with pytest.raises(InterruptedError):
        benchmark(data_parallel=4, work=tmp_path)
    (path, settings), others = journal.call_args
    options = signature(benchmark).parameters.keys() - {"data_parallel", "minutes", "work", "out"}
    assert path.name == f"{benchmark.__name__}_dp.jsonl"
    assert settings.keys() - {"folder", "cost_file"} == options
    assert settings["ranks"] == 4
    assert others == {"varying": ("rounds",)}


def test_only_the_proactive_arm_of_a_shift_solves_the_lp_and_rounds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers, windows, engine = 2, 4, Mock()
    trace = replace(synthetic_trace(num_layers=layers), domains=["code", "en"] * 30)
    solve, rounding = Mock(wraps=relaxation.linprog), Mock(wraps=director.round_in_polytope)
    calls: dict[str, tuple[int, int, int]] = {}  # LPs, roundings and migrations of each arm

    def decode(*_: Any, migrate_to: Any, **__: Any) -> Mock:
        placement = engine.place.call_args.args[0] if migrate_to is None else migrate_to
        return Mock(seconds=[1.0], move_s=0.0, routed=trace.decode_counts[0], placement=placement)

    def measure_all(journal: Any, keys: Any, start_engine: Any, measure: Any, minutes: Any) -> None:
        for key in keys:
            for mock in (solve, rounding, engine):
                mock.reset_mock()
            measure(engine, key)
            migrations = [call.kwargs["migrate_to"] is not None for call in engine.decode.call_args_list]
            calls[key[1]] = solve.call_count, rounding.call_count, sum(migrations)
        raise InterruptedError

    engine.decode.side_effect = decode
    monkeypatch.setattr(relaxation, "linprog", solve)
    monkeypatch.setattr(director, "round_in_polytope", rounding)
    monkeypatch.setattr(ep_engine, "load_or_capture", lambda *_, **__: CapturedRoutes(trace, [[0]] * 60))
    monkeypatch.setattr(ep_engine, "widen_model", lambda *_, **__: tmp_path)
    monkeypatch.setattr(ep_engine, "summarise_batch", lambda _: {"step_ms": 1.0})
    monkeypatch.setattr(ep_engine, "measure_in_turns", measure_all)
    with pytest.raises(InterruptedError):
        ep_shift(batch=2, windows=windows, rounds=1, work=tmp_path)
    solved, rounded, migrated = calls.pop("proactive")
    assert min(solved, rounded) >= layers * windows
    assert migrated == windows
    assert calls == {"offline": (0, 0, 0), "reactive": (0, 0, windows - 1)}


def test_a_batch_is_summarised_by_steps_ranks_and_layers() -> None:
    steps, layers = 4, 3
    # LOG_COLUMNS of two ranks
    log = np.array([[8, 5, 10, 6, 2], [8, 7, 6, 3, 6]])[:, None, None] * np.ones((steps, layers, 1), int)
    log[:, :SKIPPED_STEPS] = 99
    seconds = np.array([9.0, 9.0, 0.010, 0.030])
    answers = np.arange(10).reshape(2, 5)
    figures = summarise_batch(
        DecodedBatch(
            answers,
            seconds,
            move_s=0,
            experts_moved=0,
            received_bytes=0,
            slices=0,
            slices_left=0,
            log=log,
            routed=answers,
            placement=answers,
        )
    )
    hashes = figures.pop("answers")
    assert len(set(hashes)) == 2
    assert figures == pytest.approx(
        {
            "step_ms": 20,
            "worst_rank_experts": 7,
            "experts_all_ranks": 12,
            "worst_rank_pairs": 10,
            "pairs_off_home_pct": 100 * 7 / 16,
            "other_ranks_per_token": 1.0,
        }
    )


def test_batches_share_a_request_only_when_there_are_no_others() -> None:
    among = np.arange(10, 21)
    first, second, third = draw_disjoint_batches(among, 5, 3, np.random.default_rng(0))
    assert set(first) | set(second) < set(among.tolist())
    assert len(set(first) | set(second)) == 10
    assert len(set(third)) == 5


def test_a_placement_in_more_slots_is_the_same_placement() -> None:
    rows = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])
    wider_rows = add_empty_slots(rows, 8, 2)
    assert wider_rows.tolist() == [[0, 1, -1, -1, 2, 0, -1, -1], [2, 1, -1, -1, 0, 1, -1, -1]]
    assert placement_id(wider_rows, 2) == placement_id(rows, 2)
    assert add_empty_slots(rows, 4, 2).tolist() == rows.tolist()


def test_a_choice_is_compared_with_no_replicas_and_even_spread() -> None:
    arms = {
        (1.0, "linear, none"): [measurement(10), measurement(20), measurement(30)],
        (1.5, "eplb, even"): [measurement(12, 13), measurement(24, 13), measurement(36, 13)],
        (1.5, "eplb, metro"): [measurement(9, 9), measurement(18, 9), measurement(27, 9, "ax")],
    }
    base, even, metro = choice_rows(arms, 8, 0)
    assert [row["step_ms"] for row in (base, even, metro)] == [20, 24, 18]
    assert [row["change_pct"] for row in (base, even, metro)] == pytest.approx([0, 20, -10])
    assert metro["change_low_pct"] == pytest.approx(-10)  # each round is compared with its own base
    assert metro["even_pct"] == pytest.approx(-25)
    assert metro["experts_vs_even_pct"] == pytest.approx(100 * (9 / 13 - 1))
    assert even["none_experts_pct"] == pytest.approx(30)
    assert (base["other_ranks_per_token"], metro["moved_vs_base_pct"]) == pytest.approx((0.9, 0))
    assert [row["requests_equal_pct"] for row in (base, even)] == [100, 100]
    assert metro["requests_equal_pct"] == pytest.approx(500 / 6)
    assert "even_pct" not in base


def test_prompts_by_experts_are_compared_with_the_same_arm_in_equal_blocks() -> None:
    arms = {
        (1.0, "linear, none"): [measurement(10), measurement(20)],
        (1.0, "grace, none"): [measurement(n, other_ranks_per_token=0.6) for n in (8, 16)],
        (1.0, "grace, none, by experts"): [measurement(n, other_ranks_per_token=0.3) for n in (4, 8)],
    }
    *in_blocks, by_experts = choice_rows(arms, 8, 0, "data-parallel")
    assert [row["homes"] for row in in_blocks] == ["equal blocks"] * 2
    assert "blocks_pct" not in in_blocks[1]
    assert [by_experts[key] for key in ("attention", "placement", "choice", "homes")] == [
        "data-parallel",
        "grace",
        "none",
        "by experts",
    ]
    assert by_experts["blocks_pct"] == pytest.approx(-50)
    assert by_experts["moved_vs_blocks_pct"] == pytest.approx(-50)
    assert by_experts["moved_vs_base_pct"] == pytest.approx(100 * (0.3 / 0.9 - 1))


def test_prompts_go_to_the_rank_of_their_experts_as_many_to_each() -> None:
    placement = np.array([[0, 1, 2, -1, 3, 2]])  # expert 2 is on both ranks
    counts = np.array([[0, 0, 5, 5], [50, 0, 0, 1], [0, 1, 9, 0], [1, 0, 1, 0]])[:, None]
    assert choose_homes(counts, placement, 2).tolist() == [1, 0, 1, 0]
    assert choose_homes(counts[[1, 1, 1, 1]], placement, 2).tolist().count(0) == 2
    assert sorted(choose_homes(counts[:3], placement, 2).tolist()) == [0, 0, 1]


def test_a_shift_is_summarised_by_phase_including_moves() -> None:
    moves = {"plan_ms": 5.0, "migration_ms": 40.0, "experts_moved": 8, "slices": 4, "slices_left": 1}

    def windows(step: float, moved: float) -> list[dict[str, Any]]:
        return [measurement(step + n, **moves, with_moves_ms=step + n + moved) for n in range(4)]

    rows = list(shift_rows({"offline": [windows(10, 0)] * 2, "proactive": [windows(8, 4), windows(8, 4)]}, 0))
    assert [(row["placement"], row["phase"], row["windows"]) for row in rows] == [
        (name, phase, number)
        for name in ("offline", "proactive")
        for phase, number in zip(PHASES, (4, 2, 2), strict=True)
    ]
    last = rows[-1]
    assert last["step_pct"] == pytest.approx(100 * (11 / 13 - 1))
    assert last["with_moves_pct"] == pytest.approx(100 * (15 / 13 - 1))
    assert (last["slices"], last["slices_left"], last["plan_ms"]) == (4, 1, 5)
    assert last["other_ranks_per_token"] == pytest.approx(0.9)


def test_the_ways_to_a_placement_are_compared_in_the_steps_during_and_after_the_migration() -> None:
    def batch(during: float, after: float, slices: int = 0, **moved: float) -> dict[str, Any]:
        steps = [99.0] * SKIPPED_STEPS + [during] * 3 + [after] * 6  # a migration of 5 slices
        still = {"experts_moved": 0, "received_mib": 0.0, "migration_ms": 0.0, "slices": slices}
        return measurement(0) | still | moved | {"steps_ms": steps}

    moved = {"experts_moved": 40, "received_mib": 20.0, "migration_ms": 50.0}
    rows = start_rows(
        {
            STARTS: [batch(10, 10), batch(20, 20)],
            MIGRATES: [batch(12, 10, 5, **moved), batch(24, 20, 5, **moved)],
            KEEPS: [batch(11, 11), batch(22, 22)],
        },
        "task",
        0,
    )
    starts, migrates, keeps = rows
    assert [row["engine"] for row in (starts, migrates, keeps)] == [STARTS, MIGRATES, KEEPS]
    assert [row["during_pct"] for row in (starts, migrates, keeps)] == pytest.approx([0, 20, 10])
    assert [row["after_pct"] for row in (starts, migrates, keeps)] == pytest.approx([0, 0, 10])
    assert migrates["with_moves_ms"] == 18 + 50 / 5
    assert migrates["holds_after_ms"] == pytest.approx(50 + 99 + 3 * (12 + 24) / 2)
    assert [row["holds_after_ms"] for row in (starts, keeps)] == [0, 0]
    assert (migrates["slices"], migrates["experts_moved"], starts["experts_moved"]) == (5, 40, 0)


def test_only_data_parallel_ranks_have_prices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[tuple[tuple[int, ...], float]] = []

    def place(workload: Any, start: Any, *, token_bytes: float, **_: Any) -> tuple[Any, float]:
        passed.append((workload.shape, token_bytes))
        return start, 0.0

    monkeypatch.setattr(planners, "renewed_placement", place)
    data = CapturedRoutes(synthetic_trace(n=8, num_layers=2), [])
    cost = LayerCost(fixed_s=0, per_expert_s=1, per_token_s=1, near_byte_s=1)
    start, window = np.zeros((2, 16), int), np.arange(4)
    tensor_parallel = planners.migration_planners(data, 16, 2, cost, 0, None)
    assert list(tensor_parallel) == ["offline", "reactive", "proactive"]
    data_parallel = planners.migration_planners(data, 16, 2, cost, 0, 640)
    assert list(data_parallel) == [*tensor_parallel, planners.BY_RANK]
    for name in ("proactive", planners.BY_RANK):
        migration = data_parallel[name](window, start, None)
        assert migration is not None
        assert migration[1].shape == (2, 16)
    assert passed == [((2, 2, 16), 0.0), ((2, 2, 16), 640)]


def test_a_placement_by_rank_sends_fewer_tokens() -> None:
    """The first rank's requests use experts 0 to 3 and the second rank's 4 to 7."""
    trace = favourites_trace(("a", "b"), each=4, num_layers=1, num_experts=8, steps=16, others=1e-9)
    data, cost = CapturedRoutes(trace, []), LayerCost(fixed_s=0, per_expert_s=0, per_token_s=1, near_byte_s=1)
    start = np.array([[0, 4, 1, 5, 2, 6, 3, 7]])
    by_rank = planners.migration_planners(data, 8, 2, cost, 0, 10)[planners.BY_RANK]
    migration = by_rank(np.arange(8), start, None)
    assert migration is not None
    assert set(migration[0][0, :4]) == set(range(4))


def test_a_hidden_state_has_32_bits_a_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 160}')
    assert planners.state_bytes(tmp_path) == 640


class FakeRankEngine:
    """An engine of one data-parallel rank, which computes all its prompts in each step."""

    def __init__(self, steps: int) -> None:
        self.left, self.steps, self.added = 0, steps, list[str]()

    def add_request(self, number: str, prompt: Any, params: Any) -> None:
        self.added.append(number)

    def has_unfinished_requests(self) -> bool:  # of any rank, as vLLM says
        return self.left < self.steps

    def step(self) -> list[Any]:
        self.left += 1
        tokens = [SimpleNamespace(token_ids=list(range(self.left)))]
        done = self.left == self.steps
        return [SimpleNamespace(request_id=n, outputs=tokens, finished=done) for n in self.added]

    def collective_rpc(self, _: str, args: tuple[str, Any]) -> list[Any]:
        rows = [[[1, 0, 0, 0, 0]]] * self.left
        status = {"bytes_received": 0, "experts_moved": 0, "placement": [[0]]}
        return [{"batches": (self.left, rows[: self.left]), "routed": [[0]], "status": status}[args[0]]]


def test_a_rank_without_prompts_has_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, engine = 3, object.__new__(EpEngine)
    engine._num_processes = 2
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=Mock()))

    def call(function: Any, *arguments: Any) -> list[Any]:
        results = []
        for rank in range(2):
            for name, value in (("_engine", FakeRankEngine(tokens)), ("_data_rank", rank)):
                monkeypatch.setattr(ep_processes, name, value, raising=False)
            monkeypatch.setattr(ep_processes, "_num_requests", 0)
            monkeypatch.setattr(ep_processes, "_cached_names", {"all on one rank on [1]"})
            results.append(function(*arguments))
        return results

    monkeypatch.setattr(engine, "_call", call)
    decoded = engine.decode([[5]], tokens, name="all on one rank", homes=np.array([1]))
    assert decoded.answers.tolist() == [[0, 1, 2]]
    assert decoded.log.shape[0] == 2
    assert len(decoded.seconds) == tokens
