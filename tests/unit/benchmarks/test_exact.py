"""Comparison of engine reports with the choices of tokens."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.exact import ComparedCells, compare_with_reference, compare_with_report
from eldr_serve.engine.routes import pack_routes
from eldr_serve.experts.signature import pack_counts

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
