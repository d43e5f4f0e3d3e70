"""Counts of a real engine under pressure equal the choices of Hugging Face's model, integer by integer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.exact import compare_with_reference
from benchmarks.lib.exact_engine import BATCHES, CHUNK, SHORT
from tests.engine.operators import WAITING
from tests.engine.scripts import run_script

# By name: scheduler, batches, device of counting, NIXL port. v2 is Model Runner V2. avx2 uses the kernels of
# a CPU without AVX-512.
RUNS = {
    "async": ("async", "all", "host", "21871"),
    "sync": ("sync", "all", "device", "21872"),
    "v2": ("async", "short", "device", "21873"),
    "avx2": ("async", "short", "host", "21874"),
}
RUNNERS = dict.fromkeys(RUNS, "cpu_model_runner") | {"v2": "cpu.model_runner"}


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function from the name of a run to its report."""

    @cache
    def report(name: str) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("engine") / "report.json"
        scheduler, batches, where, port = RUNS[name]
        run_script(
            "engine_script.py",
            model,
            out,
            scheduler,
            batches,
            where,
            v2=name == "v2",
            cpu="avx2" if name == "avx2" else "",
            VLLM_NIXL_SIDE_CHANNEL_PORT=port,
        )
        results: dict[str, Any] = json.loads(out.read_text())
        return results

    return report


def cases(names: Iterable[str]) -> list[Any]:
    """Return the parameters for runs of these names. Only `make test-long` has other kernels."""
    return [pytest.param(name, marks=pytest.mark.long) if name == "avx2" else name for name in names]


@pytest.fixture(scope="module", params=cases(RUNS))
def name(request: pytest.FixtureRequest) -> str:
    case: str = request.param
    return case


@pytest.fixture(scope="module")
def report(run: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    return run(name)


def test_the_engine_runs_the_intended_model_runner(report: dict[str, Any], name: str) -> None:
    assert report["runner"] == f"vllm.v1.worker.{RUNNERS[name]}"


@pytest.mark.long
def test_vllm_loads_the_kernels_for_the_visible_cpu_features(run: Callable[[str], dict[str, Any]]) -> None:
    assert run("avx2")["kernels"] == ["_C_AVX2.abi3.so"]
    assert len(run("async")["kernels"]) == 1


def test_prompts_were_cached_preempted_and_split(report: dict[str, Any], name: str) -> None:
    assert report["cached_tokens"] > (500 if "short" in RUNS[name] else 1000)
    assert report["preemptions"] > 0
    assert any(len(r["prompt"]) > 2 * CHUNK for r in report["records"])


def test_all_counts_equal_an_uncached_recomputation(
    report: dict[str, Any], name: str, choices: Callable[[list[int]], np.ndarray]
) -> None:
    """Prompt counts, decode counts, routes and step records, integer by integer."""
    batches = BATCHES[:SHORT] if "short" in RUNS[name] else BATCHES
    assert len(report["records"]) == sum(prompts for _, prompts, _ in batches)
    assert len(report["steps"]) > 40
    found = compare_with_reference(report, choices)
    assert len(found) == len(batches)
    for cells in found:
        assert set(cells.compared) == {"signature", "decode", "route", "step"}
        assert not any(cells.differ.values()), cells.differ


def test_a_whole_replica_sends_the_same_counts(report: dict[str, Any]) -> None:
    assert report["prompt_counts"] == {
        r["request"]: [len(r["prompt"]), r["eldr_prefill"]] for r in report["records"]
    }


def test_every_decode_step_has_a_record(report: dict[str, Any]) -> None:
    assert len(report["steps"]) == report["decode_steps"]
    for step in report["steps"]:
        assert step["active_experts"] == pytest.approx(np.mean(step["active_by_layer"]))
        assert step["seconds"] > 0


@pytest.mark.parametrize("other", cases(name for name, run in RUNS.items() if "short" in run))
def test_answers_and_counts_equal_those_of_the_default(
    run: Callable[[str], dict[str, Any]], other: str
) -> None:
    """Answers and counts are equal for Model Runners V1 and V2, and for AVX2 and the default kernels."""
    default, short = run("async"), run(other)
    assert short["records"] == default["records"][: len(short["records"])]
    timeless = [
        [{k: v for k, v in step.items() if k != "seconds"} for step in r["steps"]] for r in (default, short)
    ]
    assert timeless[1] == timeless[0][: len(short["steps"])]


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if "device" in run])
def test_no_step_waits_for_the_device(run: Callable[[str], dict[str, Any]], name: str) -> None:
    report = run(name)
    operators = set(report["operators"])
    assert {"copy_", "index_put_", "scatter_add_", "searchsorted"} <= operators  # calls were recorded
    assert not operators & WAITING


def test_the_scheduler_keeps_no_state(report: dict[str, Any]) -> None:
    assert report["left_behind"] == [0, 0, 0]


def test_the_engine_may_use_all_cores(report: dict[str, Any]) -> None:
    before, after = report["cores"]
    assert before == after


def test_decode_steps_and_capture_are_measured(report: dict[str, Any]) -> None:
    assert report["counted_steps"] == len(report["steps"])
    seconds, steps = report["capture"]
    assert steps >= len(report["steps"])
    assert 0 < seconds / steps < 1
