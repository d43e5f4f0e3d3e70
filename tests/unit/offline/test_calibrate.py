"""Calibration without an engine: journal, trace building, reading a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shipped import ROOT

from eldr_serve.engine.routes import pack_routes
from eldr_serve.signature import pack_counts
from offline.calibrate import build_trace, decode_settings
from tools.cli import BadInput


def record(name: str, prompt: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """What an engine of 3 layers, 5 experts, top-1 would report."""
    rng = np.random.default_rng(seed)

    def counts(tokens: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(tokens[:, layer], minlength=5) for layer in range(3)]).astype(np.uint32)

    prefill, decode = rng.integers(0, 5, (prompt, 3)), rng.integers(0, 5, (steps, 3))
    return {
        "id": name,
        "domain": "code",
        "prompt_tokens": prompt,
        "eldr_prefill": pack_counts(counts(prefill)),
        "eldr_decode": pack_counts(counts(decode)),
        "eldr_decode_steps": steps,
        "eldr_routes": pack_routes(decode[..., None]),
    }


@pytest.mark.parametrize("routes", [False, True])
def test_records_become_a_trace_that_adds_up(routes: bool) -> None:
    trace = build_trace("m", [record("a", 7, 4), record("b", 3, 9, seed=1)], top_k=1, routes=routes)
    assert trace.ids == ["a", "b"]
    assert trace.decode_steps.tolist() == [4, 9]
    if routes:
        assert trace.routes is not None
        assert trace.route_offsets is not None
        second = trace.routes[trace.route_offsets[1] : trace.route_offsets[2]]
        recount = np.stack([np.bincount(second[:, layer, 0], minlength=5) for layer in range(3)])
        np.testing.assert_array_equal(recount, trace.decode_counts[1])


def test_an_engine_that_reports_nothing_is_named() -> None:
    silent = record("quiet", 3, 2) | {"eldr_prefill": None}
    with pytest.raises(BadInput, match="quiet"):
        build_trace("m", [record("a", 3, 2), silent], top_k=1, routes=False)


def test_engines_are_set_up_as_the_deployments_decode_workers(monkeypatch: pytest.MonkeyPatch) -> None:
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
