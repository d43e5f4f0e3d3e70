"""Speculative decoding on real engines: a step's record counts all verified tokens, including drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib import families, tiny_model
from eldr_serve.experts.signature import unpack_counts
from tests.engine.drafters import eagle, glm_with_mtp
from tests.engine.scripts import run_script
from tests.engine.speculative_script import PROMPTS, TOKENS

RUNS = {  # name -> role, method, scheduler, port of NIXL
    "ngram": ("decode", "ngram", "sync", "21881"),
    "draft model": ("decode", "draft_model", "sync", "21882"),
    "asynchronous": ("decode", "draft_model", "async", "21883"),
    "prefill": ("prefill", "draft_model", "sync", "21884"),
    "EAGLE": ("decode", "eagle", "sync", "21885"),
    "MTP": ("decode", "mtp", "sync", "21886"),
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with an MTP layer."""
    return glm_with_mtp(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def chosen_by(
    choices: Callable[[list[int]], np.ndarray], glm: Path
) -> Callable[[str], Callable[[list[int]], np.ndarray]]:
    """Return a function: name of a run -> tokens -> int[T,L,k], by Hugging Face's model."""
    of_glm = cache(lambda: families.choices(glm))
    return lambda name: of_glm() if name == "MTP" else choices


@pytest.fixture(scope="module")
def run(model: Path, glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function from the name of a run to its report."""
    drafters = {
        "draft_model": tiny_model.make(tmp_path_factory.mktemp("drafter"), seed=1),
        "eagle": eagle(tmp_path_factory.mktemp("eagle"), hidden=64, vocabulary=257),
        "mtp": glm,
        "ngram": "",
    }

    @cache
    def report(name: str) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("engine") / "report.json"
        role, method, mode, port = RUNS[name]
        target = glm if method == "mtp" else model
        run_script(
            "speculative_script.py",
            target,
            drafters[method],
            out,
            role,
            method,
            mode,
            VLLM_NIXL_SIDE_CHANNEL_PORT=port,
        )
        results: dict[str, Any] = json.loads(out.read_text())
        return results

    return report


def decode_steps(report: dict[str, Any]) -> list[dict[int, tuple[int, list[int]]]]:
    """Return each pure decode step: prompt number -> (position of its first token, its drafts)."""
    steps = [{int(number): fed for number, fed in step.items()} for step in report["steps"]]
    return [s for s in steps if s and all(at >= len(PROMPTS[number]) for number, (at, _) in s.items())]


@pytest.mark.parametrize(
    "name", ["ngram", "draft model", "asynchronous", "EAGLE", pytest.param("MTP", marks=pytest.mark.long)]
)
def test_a_record_counts_the_experts_of_all_tokens_that_a_step_verifies(
    run: Callable[[str], dict[str, Any]],
    chosen_by: Callable[[str], Callable[[list[int]], np.ndarray]],
    name: str,
) -> None:
    report, choices = run(name), chosen_by(name)
    steps = decode_steps(report)
    assert len(report["records"]) == len(steps)
    rejected = accepted = 0
    for step, record in zip(steps, report["records"], strict=True):
        verified, kv_tokens = [], 0
        for number, (at, drafts) in step.items():
            text = PROMPTS[number] + report["outputs"][number]
            verified.append(choices(text[: at + 1] + drafts)[at:])
            kv_tokens += at + 1 + len(drafts)
            rejected += drafts != text[at + 1 : at + 1 + len(drafts)]
            accepted += drafts[:1] == text[at + 1 : at + 2] != []
        experts = np.concatenate(verified)  # [tokens, L, k]
        active = [len(np.unique(experts[:, layer])) for layer in range(experts.shape[1])]
        assert record["active_by_layer"] == active
        assert record["requests"] == len(step)
        assert record["kv_tokens"] == kv_tokens
        assert record["seconds"] > 0
    assert rejected, "no draft was rejected, so this test proves nothing"
    assert accepted
    assert len(steps) < len(PROMPTS) * TOKENS


def test_drafts_do_not_change_the_text(run: Callable[[str], dict[str, Any]]) -> None:
    texts = [run(name)["outputs"] for name in ("ngram", "draft model", "asynchronous", "EAGLE")]
    assert texts == [texts[0]] * len(texts)


def test_a_prefill_engine_with_a_drafter_counts_only_its_prompts(
    run: Callable[[str], dict[str, Any]], choices: Callable[[list[int]], np.ndarray]
) -> None:
    report = run("prefill")
    assert report["drafting"]
    assert [len(output) for output in report["outputs"]] == [1] * len(PROMPTS)  # more were requested
    for prompt, packed in zip(PROMPTS, report["prompt_counts"], strict=True):
        expected = np.zeros((tiny_model.LAYERS, tiny_model.EXPERTS), int)
        for token in choices(prompt):
            for layer, experts in enumerate(token):
                expected[layer, experts] += 1
        np.testing.assert_array_equal(unpack_counts(packed), expected)
