"""Calibration without an engine: traces from records, and settings from a deployment."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr_serve.engine.fake import FakeCalibrationEngine, FakeConfig
from eldr_serve.engine.protocol import Sampling
from eldr_serve.engine.routes import pack_routes, unpack_routes
from eldr_serve.errors import UserInputError
from eldr_serve.experts.signature import pack_counts
from eldr_serve.experts.signature_predictor import tokenizer_fingerprint
from loadgen.workload import WorkloadPrompt
from offline.calibrate import build_trace, cut_text, decode_settings, trace_texts
from tests.support.shipped import ROOT


def record(name: str, prompt: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Return the record of an engine of 3 layers, 5 experts, top-1."""
    rng = np.random.default_rng(seed)
    prefill, decode = (rng.integers(0, 5, (tokens, 3)) for tokens in (prompt, steps))
    counts = [(part[..., None] == np.arange(5)).sum(axis=0).astype(np.uint32) for part in (prefill, decode)]
    return {
        "id": name,
        "domain": "code",
        "eldr_decode_steps": steps,
        "token_ids": rng.integers(9, size=prompt).tolist(),
        "eldr_prefill": pack_counts(counts[0]),
        "eldr_decode": pack_counts(counts[1]),
        "eldr_routes": pack_routes(decode[..., None]),
    }


def test_records_become_a_consistent_trace() -> None:
    records = [record("a", 7, 4), record("b", 3, 9, seed=1)]
    vocabulary = {f"token {n}": n for n in range(9)}
    build = partial(build_trace, "m", top_k=1, vocabulary=vocabulary)
    assert build(records, routes=False).routes is None
    trace = build(records, routes=True)
    assert trace.ids == ["a", "b"]
    assert trace.decode_steps.tolist() == [4, 9]
    second = trace.routes[trace.route_offsets[1] : trace.route_offsets[2]]
    np.testing.assert_array_equal((second == np.arange(5)).sum(axis=0), trace.decode_counts[1])
    with pytest.raises(UserInputError, match="b"):
        build([records[0], records[1] | {"eldr_prefill": None}], routes=False)
    assert [prompt.tolist() for prompt in trace.prompts] == [r["token_ids"] for r in records]
    assert (trace.vocabulary, trace.tokenizer) == (9, tokenizer_fingerprint(vocabulary))


def test_routes_belong_to_their_requests_if_the_clock_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((9.0, 5.0))
    monkeypatch.setattr("eldr_serve.signatures.window.time.time", lambda: next(clock))
    records = [record("a", 7, 4), record("b", 3, 9, seed=1)]
    trace = build_trace("m", records, top_k=1, routes=True, vocabulary={"x": 8})
    assert trace.ids == ["a", "b"]
    for request, (begin, end) in enumerate(pairwise(trace.route_offsets)):
        counts = (trace.routes[begin:end] == np.arange(5)).sum(axis=0)
        np.testing.assert_array_equal(counts, trace.decode_counts[request])


@pytest.mark.parametrize("max_tokens", [10, 11])
def test_an_answer_as_long_as_the_context_is_refused(max_tokens: int) -> None:
    engine = FakeCalibrationEngine(FakeConfig(np.ones((1, 3, 5), np.uint32), top_k=1), max_model_len=10)
    with pytest.raises(
        UserInputError, match=f"max_tokens is {max_tokens}.*10 tokens.*set --max-tokens below"
    ):
        trace_texts(
            engine, [WorkloadPrompt("a", "code", "123")], Sampling(max_tokens, 0.5, routes=False), True
        )


def test_a_prompt_that_leaves_no_room_for_its_answer_is_truncated() -> None:
    engine = FakeCalibrationEngine(FakeConfig(np.ones((1, 3, 5), np.uint32), top_k=1), max_model_len=10)
    sampling = Sampling(4, 0.5, routes=True)
    traced = trace_texts(
        engine, [WorkloadPrompt("a", "code", "123"), WorkloadPrompt("b", "law", "12345678")], sampling, True
    )
    assert [(r["id"], r["domain"]) for r in traced] == [("a", "code"), ("b", "law")]
    assert [bytes(r["token_ids"]) for r in traced] == [b"123", b"123456"]
    assert [len(unpack_routes(r["eldr_routes"])) for r in traced] == [3, 3]  # steps of the sampling


@pytest.mark.parametrize(("longest", "kept"), [(9, "<hello>!!"), (8, "<hell>!!"), (4, "<>!!"), (2, "!!")])
def test_a_chat_is_cut_in_its_text(longest: int, kept: str) -> None:
    assert bytes(cut_text([*b"<hello>!!"], [*b"<>!!"], longest)) == kept.encode()


def test_engines_are_configured_like_the_deployments_decode_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    model, kwargs, environment, resources = decode_settings(Path("deployments/cpu_demo.yaml"))
    assert model == "eldr-demo"
    assert Path(kwargs["model"]).is_absolute()
    assert kwargs["kv_transfer_config"]["kv_role"] == "kv_both"
    assert kwargs["max_num_seqs"] == 64
    assert environment["OMP_NUM_THREADS"] == "1"
    assert resources["num_gpus"] == 0
    gpu = decode_settings(Path("deployments/qwen3_235b_2p8d.yaml"))
    assert gpu[3]["num_gpus"] == 4
    assert gpu[1]["enable_expert_parallel"]
    ranks = tmp_path / "ranks.yaml"
    demo = Path("deployments/cpu_demo.yaml").read_text()
    ranks.write_text(demo.replace("max_num_seqs: 64", "data_parallel_size: 2"))
    assert "data_parallel_size" not in decode_settings(ranks)[1]
