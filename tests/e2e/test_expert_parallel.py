"""Decode by expert parallelism, behind the application: its answers are those of one plain engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from service import ROOT

from benchmarks.harness.engines import our_arguments
from benchmarks.harness.replay_engine import free_port
from demo_model import WEIGHTS
from demo_model.widen import widen

KEY = "ep"
PORTS = {"prefill_config": 24000, "decode_config": 26000}  # NIXL's, beside the demo's


@pytest.fixture
def expert_parallel(ray_cluster: str, tmp_path: Path) -> Any:
    """deployments/cpu_demo_ep.yaml with one decode engine, beside the demo; its URL."""
    from ray import serve

    from eldr_serve.serving.app import build_app

    model, port = tmp_path / "model", free_port()
    widen(WEIGHTS, 32, model, heads=4)
    arguments = our_arguments(ROOT / "deployments/cpu_demo_ep.yaml", model, decode_replicas=1)
    for role, ports in PORTS.items():
        arguments[role]["experimental_configs"] = {"NIXL_SIDE_CHANNEL_PORT_BASE": ports}
    arguments |= {"name": "ep", "ingress": {"port": port}, "admin_key": KEY}
    serve.run(build_app(arguments), name="ep", route_prefix="/ep")
    yield f"http://127.0.0.1:{port}"
    serve.delete("ep")


def test_greedy_answers_equal_the_single_engine(
    expert_parallel: str, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    with httpx.Client(base_url=expert_parallel, timeout=120) as client:
        for prompt, expected in zip(prompts, single_engine["completions"], strict=True):
            body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected
        status = client.get("/eldr/status", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert status["counters"]["placed"] >= len(prompts)
    assert status["counters"].get("signature_missing", 0) == 0
