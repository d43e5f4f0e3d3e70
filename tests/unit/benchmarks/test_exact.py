"""Comparison of engine reports with the choices of tokens."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine import exact_counts
from benchmarks.lib import tiny_model
from benchmarks.lib.exact import ComparedCells, compare_with_reference, compare_with_report
from eldr_serve.engine.routes import pack_routes
from eldr_serve.experts.signature import pack_counts
from tests.support.in_process import command

LAYERS, EXPERTS, TOP_K, PROMPT, TOKENS = 2, 8, 2, 5, 4


def choices(tokens: list[int]) -> np.ndarray:
    """Return int[T,L,k], which depends on the tokens alone."""
    rng = np.random.default_rng(tokens[0])
    layers = [rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(len(tokens) * LAYERS)]
    return np.stack(layers).reshape(len(tokens), LAYERS, TOP_K)


def histogram(chosen: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(chosen[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])


@pytest.fixture
def report() -> dict[str, Any]:
    """Return the report of an engine that counts correctly, with two batches of one request."""
    records, steps = [], []
    for number in range(2):
        prompt, output = [number + 1, *range(PROMPT - 1)], list(range(TOKENS))
        chosen = choices(prompt + output)
        decoded = chosen[PROMPT:-1]
        records.append(
            {
                "request": f"{number}-0",
                "prompt": prompt,
                "output": output,
                "eldr_prefill": pack_counts(histogram(chosen[:PROMPT]).astype(np.uint32)),
                "eldr_decode": pack_counts(histogram(decoded).astype(np.uint32)),
                "eldr_decode_steps": len(decoded),
                "eldr_routes": pack_routes(decoded[..., ::-1]),  # experts of a token have no order
            }
        )
        for position in range(PROMPT, PROMPT + TOKENS - 1):
            step = {"requests": 1, "kv_tokens": position + 1, "active_by_layer": [TOP_K] * LAYERS}
            steps.append(step | {"fed": [[f"{number}-0", position]]})
    return {"batches": [[0, 1, TOKENS]] * 2, "records": records, "steps": steps}


def differ(found: list[ComparedCells]) -> list[dict[str, int]]:
    return [{kind: n for kind, n in cells.differ.items() if n} for cells in found]


def test_equal_counts_differ_nowhere(report: dict[str, Any]) -> None:
    cells = compare_with_reference(report, choices)
    assert differ(cells) == differ(compare_with_report(report, deepcopy(report))) == [{}, {}]
    row = cells[0].row()
    assert row["signature_cells"] == LAYERS * EXPERTS
    assert row["route_cells"] == (TOKENS - 1) * LAYERS * TOP_K
    assert row["step_cells"] == (TOKENS - 1) * (2 + LAYERS)


def test_each_change_is_found_in_its_batch(report: dict[str, Any]) -> None:
    right = deepcopy(report)
    record = report["records"][1]
    counts = histogram(choices(record["prompt"])[:PROMPT]).astype(np.uint32)
    counts[0, 0] += 1
    record["eldr_prefill"] = pack_counts(counts)
    record["eldr_routes"] = pack_routes(np.zeros((TOKENS, LAYERS, TOP_K), int))  # one token too many
    report["steps"][-1]["kv_tokens"] += 1
    routes = TOKENS * LAYERS * TOP_K
    cells = compare_with_reference(report, choices)
    assert differ(cells) == [{}, {"signature": 1, "route": routes, "step": 1}]
    record["output"][0] += 1
    assert differ(compare_with_report(report, right))[1]["token"] == 1


def test_steps_that_only_one_engine_has_differ(report: dict[str, Any]) -> None:
    shorter = deepcopy(report)
    missing = shorter["steps"].pop()
    assert differ(compare_with_report(report, shorter)) == differ(compare_with_report(shorter, report))
    assert differ(compare_with_report(report, shorter)) == [{}, {"step": 2 + len(missing["active_by_layer"])}]


@pytest.mark.parametrize("compare", [lambda report: compare_with_reference(report, choices), None])
def test_a_batch_without_all_its_records_is_not_compared(report: dict[str, Any], compare: Any) -> None:
    whole = deepcopy(report)
    del report["records"][1]
    comparisons = (
        [compare]
        if compare
        else [partial(compare_with_report, whole), partial(compare_with_report, other=whole)]
    )
    for comparison in comparisons:
        with pytest.raises(ValueError, match="batch 1 has 0 records of 1 requests"):
            comparison(report)


def test_a_kind_without_integers_has_no_cells(report: dict[str, Any]) -> None:
    report["steps"] = report["steps"][: TOKENS - 1]
    assert [cells.row()["step_cells"] > 0 for cells in compare_with_reference(report, choices)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("cells", "tokens", "error"),
    [(9, 0, ""), (9, 3, "token_differ must be 0"), (0, 0, "a batch has no token cells")],
)
def test_the_command_publishes_and_then_fails_if_anything_differs(
    cells: int, tokens: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report: dict[str, Any] = dict.fromkeys(
        ("runner", "graphs", "cached_tokens", "preemptions", "decode_steps")
    )
    equal, other = ComparedCells(["step"]), ComparedCells(["token"])
    equal.add("step", [4], [4])
    other.add("token", [0] * cells, [1] * tokens + [0] * (cells - tokens))
    results = {
        "_serve": report | {"records": []},
        "reference": None,
        "compare_with_reference": [equal],
        "compare_with_report": [equal, other],
    }
    for name, result in results.items():
        monkeypatch.setattr(exact_counts, name, lambda *_, result=result: result)
    monkeypatch.setattr(tiny_model, "make", lambda *_: None)
    done = command("benchmarks.engine.exact_counts", out=tmp_path / "exact.json")
    assert done.exit_code == (1 if error else 0)
    assert done.stderr.startswith(error)
    assert json.loads((tmp_path / "exact.json").read_text())["rows"][-1]["token_differ"] == tokens
