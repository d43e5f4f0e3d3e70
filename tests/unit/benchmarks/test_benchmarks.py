"""Help of all benchmarks, runs of those without engines, and rows of the others."""

import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import MODULES, NAMES, WHEN, read_benchmarks
from benchmarks.engine.cache_memory import CacheShape, compare, shape_of, smallest_block_size
from benchmarks.engine.signature_bytes import tile_counts
from benchmarks.lib import tables
from benchmarks.lib.client import Answer, max_open_answers, summarise_answers
from benchmarks.lib.engines import our_arguments, plain_engine_kwargs, ray_pd_arguments
from benchmarks.lib.rounds import medians
from benchmarks.serving.handover import _row
from benchmarks.serving.peers import _measure_round, _rows, _sender_without_router
from benchmarks.serving.ray_idle import summarise
from eldr_serve.errors import UserInputError
from loadgen.sse import StreamTiming
from tests.support.in_process import command, sentence
from tests.support.processes import output
from tests.support.shipped import ROOT


def test_every_module_declares_when_its_benchmarks_run() -> None:
    paths = [p for part in ("engine", "serving") for p in (ROOT / "benchmarks" / part).glob("[!_]*.py")]
    assert not [path.name for path in paths if not read_benchmarks(path)]
    assert set(WHEN.values()) == {"default", "all", "named"}
    assert WHEN["gpu"] == "named"
    assert WHEN["live"] == "all"
    assert MODULES["tail_replay"] == "engine.replays"
    assert MODULES["fit_time"] == "papers.fit_time"


def test_no_two_modules_have_a_benchmark_of_the_same_name() -> None:
    names = [name for path in (ROOT / "benchmarks").rglob("*.py") for name in read_benchmarks(path)]
    assert sorted(names) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_units_and_defaults(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{MODULES[name]}")
    done = command(getattr(module, name), "--help")
    assert done.exit_code == 0
    assert "--out" in done.stdout
    assert "default" in done.stdout
    assert f"python -m benchmarks.{MODULES[name]}" in (module.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cache_memory", ""),
        pytest.param(
            "capture_overhead",
            "--requests 0 --wide-requests 0 --calls 3 --tokens 64",
            marks=pytest.mark.benchmarks,
        ),
        ("signature_bytes", "--prompts 1"),
    ],
)
def test_a_benchmark_without_engines_writes_its_table(name: str, options: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = *options.split(), "--out", out
    if name == "capture_overhead":  # this one changes torch's threads and a signal's handler
        output(sys.executable, "-m", f"benchmarks.engine.{name}", *words)
    else:
        done = command(f"benchmarks.engine.{name}", *words)
        assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert result["name"] == name
    assert {"commit", "machine", "versions", "seed", "inputs", "rows", "notes"} <= set(result)
    assert len({tuple(row) for row in result["rows"]}) == 1  # one table
    assert any(re.search(r"_(ms|pct|mib|bytes)$", column) for column in result["rows"][0])


def test_prompts_of_gpt_oss_are_put_side_by_side_in_whole_groups() -> None:
    rng, counts = np.random.default_rng(0), np.arange(19 * 24 * 32).reshape(19, 24, 32)
    prompts = tile_counts(Path("records"), counts, 5, rng)
    assert [prompt.shape for prompt in prompts] == [(48, 128)] * 2
    tiles = {
        tile.tobytes()
        for prompt in prompts
        for rows in np.split(prompt, 2)
        for tile in np.split(rows, 4, axis=1)
    }
    assert len(tiles) == 16
    assert tiles <= {tile.tobytes() for tile in counts}
    assert len(tile_counts(Path("records"), counts, 1, rng)) == 1
    with pytest.raises(UserInputError, match=r"--gptoss records has 7 records .* at least 8"):
        tile_counts(Path("records"), counts[:7], 5, rng)


def peers(**options: object) -> str:
    return sentence(command("benchmarks.serving.peers", **options))


def test_bad_input_is_reported_in_one_sentence() -> None:
    assert "nobody" in peers(systems="nobody")
    assert "can be up at a time" in peers(systems="eldr,eldr-proxy", turns=2)
    assert "leave out no-router" in peers(systems="eldr,no-router", turns=2)
    latency = partial(command, "benchmarks.engine.moe_layer_latency")
    assert "--batches must be comma-separated positive numbers, got 'x'" in sentence(latency(batches="x"))
    assert "--active must be" in sentence(latency(active="0"))


def test_the_count_caches_share_falls_with_the_block_size() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    small, large = (
        compare(shape, block_size=size, dtype_bytes=2, ranks=1, kv_gib=0.1)["share_of_kv_pct"]
        for size in (16, 32)
    )
    assert small == pytest.approx(2 * large)
    assert small == pytest.approx(100 * 48 * 128 / (16 * 2 * 48 * 2 * 4 * 128))
    assert smallest_block_size(shape, 2, 1) == 13
    # With two bytes of KV per token, blocks are so large that one byte cannot count their tokens.
    assert smallest_block_size(CacheShape(1, 1024, ((1, 1, 1),)), 1, 1) == 4 * 102_400
    assert smallest_block_size(CacheShape(1, 2, ((1, 1, 1),)), 1, 1) == 200
    assert smallest_block_size(CacheShape(1, 3, ((1, 1, 1),)), 1, 1) == 2 * 300
    with pytest.raises(UserInputError):
        shape_of("nobody/nothing")


def test_a_summary_counts_failures_but_excludes_their_times() -> None:
    good = Answer(started_at_s=0.0, ended_at_s=2.0, timing=StreamTiming([0.5, 1.0, 1.5, 2.0]))
    bad = Answer(started_at_s=1.0, ended_at_s=1.5, error="HTTP 500")
    row = summarise_answers([good, bad])
    assert (row["requests"], row["failures"]) == (2, 1)
    assert [row[k] for k in ("ttft_p50_ms", "tpot_p50_ms", "tokens_per_s")] == pytest.approx([500, 500, 2])
    assert row["latency_p50_ms"] == 2000.0
    assert summarise_answers([good, bad], since_s=-2.0)["tokens_per_s"] == pytest.approx(1)
    assert max_open_answers([good, bad, Answer(started_at_s=2.5, ended_at_s=3.0)]) == 2
    # Several trials give medians.
    load = {"requests": 4, "failures": 1, "ttft_p99_ms": 9.0, "tpot_p50_ms": 1.0, "tpot_p99_ms": 2.0}
    load |= {"latency_p50_ms": 8.0, "cpu_ms": {"ray": 6.0}}
    loads = [load | {"ttft_p50_ms": ttft, "requests_per_s": 3.0} for ttft in (1.0, 5.0, 2.0)]
    (row,) = _rows([{"system": "eldr", "loads": {"1": load}} for load in loads])
    assert (row["trials"], row["requests"], row["failures"]) == (3, 12, 3)
    assert row["ttft_p50_ms_low"] <= row["ttft_p50_ms"] == 2.0 <= row["ttft_p50_ms_high"]
    assert row["ray_cpu_ms"] == 6.0


def test_peers_are_compared_by_round_and_turn() -> None:
    """A slow round affects all systems equally, so it changes no ratio, even if a system lacks a trial."""
    zeros = dict.fromkeys(("requests", "failures", "ttft_p99_ms", "tpot_p99_ms", "latency_p50_ms"), 1.0)

    def trial(slow: int, system: str, speed: float, ttft: float) -> dict[str, Any]:
        load = zeros | {"requests_per_s": speed, "tpot_p50_ms": 1 / speed, "ttft_p50_ms": ttft, "cpu_ms": {}}
        return {"system": system, "round": slow // 2, "turn": slow % 2, "loads": {"8": load}}

    trials = [
        one
        for slow in (1, 2, 4)
        for one in (
            trial(slow, "eldr", 12 / slow, 30.0 * slow + 5),
            trial(slow, "vllm-router", 10 / slow, 40.0),
            trial(slow, "no-router", 20 / slow, 30.0 * slow),
        )
    ]
    trials[1] = trial(8, "no-router-polled", 1.0, 1.0)  # vllm-router lacks the trial of the first round
    row = next(row for row in _rows(trials) if row["system"] == "eldr")
    assert "ttft_beyond_no_router_polled_ms" not in row  # no trial of the same round and turn
    for suffix in ("", "_low", "_high"):
        assert row[f"requests_per_s_over_vllm_router_pct{suffix}"] == pytest.approx(20)
        assert row[f"tpot_over_vllm_router_pct{suffix}"] == pytest.approx(100 / 1.2 - 100)
        assert row[f"ttft_beyond_no_router_ms{suffix}"] == pytest.approx(5)


def test_a_trial_of_peers_is_kept_with_its_turn() -> None:
    kept: list[tuple[int, str, int]] = []
    sent = itertools.count()

    async def trial(send: Any) -> Any:
        return next(sent)

    def start(groups: list[list[str]]) -> Any:
        return nullcontext({group[0]: None for group in groups})

    def keep(turn: int, system: str, number: Any) -> None:
        kept.append((turn, system, number))

    groups, order = [["a"], ["b"]], random.Random(0)
    _measure_round(groups, 2, order, start, trial, keep)
    assert [turn for turn, _, _ in kept] == [1, 1, 2, 2]
    assert [number for *_, number in kept] == [2, 3, 4, 5]  # the first trial of each warms up
    kept.clear()
    _measure_round(groups, 1, order, start, trial, keep)
    assert sorted((turn, system) for turn, system, _ in kept) == [(0, "a"), (0, "b")]


async def test_a_client_without_a_router_uses_all_engines_in_turn() -> None:
    called: list[str] = []

    async def params() -> dict[str, Any]:
        return {"kv_transfer_params": {}}

    async def text() -> str:
        return "no decode engine"

    @asynccontextmanager
    async def post(url: str, **_: Any) -> AsyncIterator[Any]:
        called.append(url.removesuffix("/v1/completions"))
        yield SimpleNamespace(status=200 if url.startswith("p") else 500, json=params, text=text)

    http: Any = SimpleNamespace(post=post)
    send = _sender_without_router({"prefill": ["p0"], "decode": ["d0", "d1"]})
    for _ in range(3):
        assert (await send(http, {})).error == "HTTP 500: no decode engine"
    assert called == ["p0", "d0", "p0", "d1", "p0", "d0"]


def test_peers_engines_differ_from_ours_in_the_connector_alone() -> None:
    arguments = our_arguments(ROOT / "deployments/cpu_demo.yaml", ROOT / "examples/demo_model/weights", 1)
    theirs = ray_pd_arguments(arguments)["decode_config"]
    engine_kwargs = arguments["decode_config"]["engine_kwargs"]
    assert engine_kwargs.items() <= theirs["engine_kwargs"].items()
    assert theirs["engine_kwargs"]["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    assert theirs["experimental_configs"]["stream_batching_interval_ms"] == 0
    assert "scheduler_cls" not in theirs["engine_kwargs"]
    polled = plain_engine_kwargs("decode", engine_kwargs, our_connector=True)["kv_transfer_config"]
    assert polled["kv_connector"] == "EldrConnector"


def test_the_rest_of_a_handover_excludes_the_pull_and_the_step() -> None:
    names = ("prefill", "handover", "place", "first_token", "engine", "admit", "wait", "pull", "step")
    means = dict(zip(names, (20.0, 18.0, 2.0, 15.0, 14.0, 2.0, 4.0, 1.5, 7.0), strict=True))
    stages = {name: {"mean_ms": mean, "p50_ms": mean, "p99_ms": mean} for name, mean in means.items()}
    answers = [Answer(0.0, 1.0, StreamTiming([0.038, 0.05]))] * 2 + [Answer(0, 1, error="x")]
    row = _row(1, stages, answers)
    assert row["before_step_mean_ms"] == pytest.approx(9.5)
    assert row["before_step_share_of_ttft_pct"] == pytest.approx(25.0)
    assert row["transport_mean_ms"] == pytest.approx(1.0)
    assert row["failures"] == 1


def test_rounds_become_one_row_with_their_median_and_its_interval() -> None:
    rows = [
        {"way": way, "took_ms": base + step, "failures": step, "errors": {}}
        for step in (0, 1, 5)
        for way, base in (("b", 10.0), ("a", 20.0))
    ]
    summaries = medians(rows, keys=("way",), with_interval=("took_ms",), summed=("failures",))
    assert [(row["way"], row["rounds"], row["took_ms"], row["failures"]) for row in summaries] == [
        ("b", 3, 11.0, 6),
        ("a", 3, 21.0, 6),
    ]
    assert all(row["took_ms_low"] < row["took_ms"] < row["took_ms_high"] for row in summaries)
    assert all("errors" not in row for row in summaries)


def test_a_settings_saving_is_relative_to_the_plain_start_of_its_round() -> None:
    drift = (0.0, 4.0, 10.0)  # drift of the machine from round to round
    starts = [
        {"setting": name, "parts": {"ray": base + more, "ingress": 1.0}}
        for more in drift
        for name, base in (("none", 20.0), ("shipped", 17.0))
    ]
    none, shipped = summarise(starts)
    shares = [none[f"{name}_pct"] for name in ("idle", "ray", "ingress", "saved")]
    assert shares == [25.0, 24.0, 1.0, 0.0]
    assert (shipped["saved_pct"], shipped["saved_pct_low"], shipped["saved_pct_high"]) == (3.0, 3.0, 3.0)


def test_the_tables_in_the_pages_equal_the_results() -> None:
    for page in tables.PAGES:
        text = page.read_text()
        assert "<!-- end -->" in text
        assert tables.fill_blocks(text) == text, f"run python -m benchmarks.lib.tables: {page.name} is older"


@pytest.mark.parametrize(
    ("key", "heading"),
    [
        ("active_experts_change_pct", "active experts change, %"),
        ("active_experts_all_layers", "active experts, all layers"),
        ("tpot_p50_ms_change_pct", "TPOT p50 change, %"),
        ("tpot_p50_ms_pooled_change_pct", "TPOT p50 change against all balancers together, %"),
        ("ours_engine_ms_per_token_pct", "ours engine time per token, %"),
        ("engine_ms_per_token", "engine time per token, ms"),
        ("requests_per_s_over_peer_pct", "requests/s over peer, %"),
        ("rate_per_s", "arrivals/s"),
        ("silent_over_15_s", "silent over 15 s"),
        ("other_ranks_per_token", "other ranks per token"),
        ("moved_vs_base_pct", "other ranks change, %"),
    ],
)
def test_a_heading_has_the_unit_of_its_column(key: str, heading: str) -> None:
    assert tables.heading(key) == heading


def test_a_column_shows_a_value_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    a = {"a_pct": -17.24, "a_pct_low": -20.5, "a_pct_high": -13.8}
    rows = [a | {"b_ms": 5.0, "low_ms": 4.0, "high_ms": 6.0}, dict.fromkeys(a) | {"b_ms": 7.0}]
    monkeypatch.setattr(tables, "read_rows", lambda name: rows)
    page = "<!-- table x a_pct [_low _high], b_ms [low_ms high_ms], b_ms -->\n<!-- end -->"
    assert tables.fill_blocks(page).splitlines()[1:-1] == [
        "| a, % | b, ms | b, ms |",
        "| --- | --- | --- |",
        "| -17.2 [-20.5, -13.8] | 5 [4, 6] | 5 |",
        "| - | 7 | 7 |",
    ]
    with pytest.raises(KeyError, match="no row of x has b_ms_low"):
        tables.fill_blocks(page.replace("low_ms", "_low"))


def test_a_table_says_whether_its_times_are_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "read_rows", lambda name: [{"clock": "wall"}, {"clock": "normalised"}])
    page = tables.fill_blocks("<!-- table x clock -->\n<!-- end -->")
    assert page.splitlines()[1:-1] == ["| times |", "| --- |", "| as measured |", "| normalised |"]


def test_a_value_that_is_rounded_to_zero_has_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "read_rows", lambda name: [{"a": -0.4, "b": 0.3, "c": -0.0004}])
    line = {"result": "x", "where": {}, "cells": ["{a:+.0f} to {b:+.0f}, {a:+.1f}, {c:+.2f} %"]}
    monkeypatch.setattr(tables, "CLAIMS", {"x": {"columns": ["change"], "lines": [line]}})
    assert "| 0 to 0, -0.4, 0.00 % |" in tables.fill_blocks("<!-- claims x -->\n<!-- end -->")


def test_a_claim_repeats_for_each_combination_of_values_in_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"size": size, "way": way, "a": 10 * size} for size in (2, 1) for way in ("x", "y", "z")]
    monkeypatch.setattr(tables, "read_rows", lambda name: rows)
    line = {"result": "r", "where": {"way": ["x", "y"]}, "each": ["size"]}
    line["cells"] = ["{way} {a}", {"where": {"way": "y"}, "text": "{size}"}]
    monkeypatch.setattr(tables, "CLAIMS", {"r": {"columns": ["a", "size"], "lines": [line]}})
    lines = tables.fill_blocks("<!-- claims r -->\n<!-- end -->").splitlines()[3:-1]
    assert lines == ["| x 20; y 20 | 2 |", "| x 10; y 10 | 1 |"]


def test_a_claim_may_have_a_line_for_each_row_of_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"way": way, "a": n} for n, way in enumerate("xyz")]
    monkeypatch.setattr(tables, "read_rows", lambda name: rows)
    line = {"result": "r", "where": {"way": ["x", "z"]}, "cells": ["time", "{way}", "{a} s", "`run`"]}
    claims = {"columns": ["what", "case", "measured", "by"], "line_per_row": True, "lines": [line]}
    monkeypatch.setattr(tables, "CLAIMS", {"r": claims})
    lines = tables.fill_blocks("<!-- claims r -->\n<!-- end -->").splitlines()[3:-1]
    assert lines == ["| time | x | 0 s | `run` |", "|  | z | 2 s |  |"]


def test_only_results_of_a_gpu_have_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = {path.stem for path in tables.TABLES.glob("*.md")} & set(tables.GPU_PAGES)
    assert pages == {name for name in tables.GPU_PAGES if tables.has_result(name)}
    block = "<!-- pages gpu -->\n<!-- end -->"
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "No step has a result yet." in tables.fill_blocks(block)
    (tmp_path / "gpu_metro_decide.json").touch()
    title = tables.GPU_PAGES["gpu_metro_decide"]["title"]
    assert tables.fill_blocks(block).splitlines()[1:-1] == [f"- [{title}](tables/gpu_metro_decide.md)"]


def test_a_page_of_a_gpus_result_is_written_with_its_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    columns = tables.GPU_PAGES["gpu_metro_decide"]["columns"].split(", ")
    monkeypatch.setattr(tables, "read_rows", lambda name: [dict.fromkeys(columns, 1)])
    monkeypatch.setattr(tables, "has_result", lambda name: name == "gpu_metro_decide")
    monkeypatch.setattr(tables, "TABLES", tmp_path)
    monkeypatch.setattr(tables, "PAGES", ())
    tables.main()
    (page,) = tmp_path.iterdir()
    assert page.read_text().splitlines()[-2] == "|" + " 1 |" * len(columns)


def _in(claim: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether the row is in one of the claim's cells."""
    cells = [cell for cell in claim["cells"] if isinstance(cell, dict)]
    return tables.matches_claim(row, claim) and (
        not cells or any(tables.matches_claim(row, cell) for cell in cells)
    )


def test_a_claim_shows_every_policy_that_beats_a_shown_one() -> None:
    claims = [claim for claim in tables.CLAIMS["summary"]["lines"] if claim["result"] == "together_policies"]
    rows = tables.read_rows("together_policies")
    shown_rows = [row for row in rows if any(_in(claim, row) for claim in claims)]
    assert shown_rows
    beaten = [
        (worse["policy"], better["policy"])
        for worse, better in itertools.product(shown_rows, (row for row in rows if row not in shown_rows))
        if worse["workload"] == better["workload"]
        and worse["policy"] != "shortest-queue"  # the baseline
        and better["tpot_p50_ms"] < worse["tpot_p50_ms"]
        and better["output_tokens_per_s"] > worse["output_tokens_per_s"]
    ]
    assert not beaten
