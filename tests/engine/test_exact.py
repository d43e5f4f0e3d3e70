"""Counts of a real engine under pressure equal what Hugging Face's model chooses, integer by integer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
import torch
from scripts import run_script

from eldr_serve.engine.routes import unpack_routes
from eldr_serve.signature import unpack_counts


@pytest.fixture(scope="module", params=["async", "sync"])
def report(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("engine") / "report.json"
    port = {"async": "21871", "sync": "21872"}[request.param]
    run_script("engine_script.py", model, out, request.param, VLLM_NIXL_SIDE_CHANNEL_PORT=port)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def choices(model: Path) -> Any:
    """tokens -> int[T,L,k], by another implementation, cold, with no cache of any kind."""
    from transformers import Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def route(tokens: list[int]) -> np.ndarray:
        logits = reference(torch.tensor([tokens]), output_router_logits=True, use_cache=False).router_logits
        return torch.stack(
            [x.reshape(len(tokens), -1).topk(tiny_model.TOP_K).indices for x in logits], 1
        ).numpy()

    return route


def histogram(chosen: np.ndarray) -> np.ndarray:
    counts = np.zeros((tiny_model.LAYERS, tiny_model.EXPERTS), np.uint32)
    for token in chosen:
        for layer, experts in enumerate(token):
            counts[layer, experts] += 1
    return counts


def test_the_pressure_was_real(report: dict[str, Any]) -> None:
    assert report["cached_tokens"] > 1000
    assert report["preemptions"] > 0
    assert any(len(r["prompt"]) > 2 * 48 for r in report["records"])


def test_every_count_equals_the_cold_recomputation(report: dict[str, Any], choices: Any) -> None:
    assert len(report["records"]) == 3 * 29
    for record in report["records"]:
        prompt, output = record["prompt"], record["output"]
        chosen = choices(prompt + output)
        np.testing.assert_array_equal(unpack_counts(record["eldr_prefill"]), histogram(chosen[: len(prompt)]))
        decoded = chosen[len(prompt) : -1]  # the last token never passes the gates
        assert record["eldr_decode_steps"] == len(decoded) == 39
        np.testing.assert_array_equal(unpack_counts(record["eldr_decode"]), histogram(decoded))
        routes = unpack_routes(record["eldr_routes"])
        np.testing.assert_array_equal(np.sort(routes, axis=-1), np.sort(decoded, axis=-1))


def test_nothing_is_left_behind_in_the_scheduler(report: dict[str, Any]) -> None:
    assert report["left_behind"] == [0, 0]


def test_the_engine_may_use_all_cores(report: dict[str, Any]) -> None:
    before, after = report["cores"]
    assert before == after


def test_decode_steps_and_capture_are_measured(report: dict[str, Any]) -> None:
    assert report["steps"] > 100
    assert 0 < report["capture_s"] < 1
