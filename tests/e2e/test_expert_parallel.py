"""Decode by expert parallelism, behind the application: its answers are those of one plain engine.

Also while an operator moves the experts.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from service import ROOT, wait_for
from typer.testing import CliRunner

from benchmarks.harness.engines import our_arguments
from benchmarks.harness.replay_engine import free_port
from demo_model import WEIGHTS
from demo_model.widen import widen
from eldr_serve.artifacts import ExpertPlacement
from eldr_serve.client import Client
from eldr_serve.command import app
from eldr_serve.serving.decode_router import actor_name, find
from offline.live_placement import Planner, look
from offline.placement.cost import LayerCost

KEY = "ep"
PORTS = {"prefill_config": 24000, "decode_config": 26000}  # NIXL's, beside the demo's


@pytest.fixture(scope="module")
def expert_parallel(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """deployments/cpu_demo_ep.yaml with one decode engine, beside the demo; its URL."""
    from ray import serve

    from eldr_serve.serving.app import build_app

    model, port = tmp_path_factory.mktemp("ep") / "model", free_port()
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


def placed(seed: int) -> ExpertPlacement:
    """The demo model's 64 experts in 80 slots of 2 ranks."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation([*range(64), *rng.choice(64, 16)]) for _ in range(6)])
    return ExpertPlacement(rows, 2, 64, model="eldr-demo", method="drawn")


def test_experts_move_while_answers_run_and_change_none(
    expert_parallel: str, prompts: list[str], single_engine: dict[str, list[str]], tmp_path: Path
) -> None:
    operator = Client(expert_parallel, KEY)

    def command(placement: ExpertPlacement) -> Any:
        placement.save(tmp_path / "placement.json")
        arguments = ["experts", str(tmp_path / "placement.json"), "--url", expert_parallel]
        return CliRunner().invoke(app, arguments, env={"ELDR_ADMIN_KEY": KEY})

    def put(placement: ExpertPlacement) -> dict[str, Any]:
        done = command(placement)
        assert done.exit_code == 0, done.output
        (took,) = json.loads(done.stdout).values()
        return dict(took)

    def held() -> dict[str, Any]:
        (found,) = operator.status()["ingress"]["experts"].values()
        return dict(found)

    def completed(prompt: str) -> str:
        body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{expert_parallel}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    wait_for(lambda: operator.status()["ingress"]["experts"], "what the engine holds is known", 30)
    before = held()
    assert before["replica_bytes"] * 64 == before["weight_bytes"] * 16  # redundant_experts: 16
    assert before["slices_left"] == 0
    # Answers run from before the first swap to after the last.
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = [clients.submit(completed, prompt) for prompt in prompts * 3]
        swaps = [put(placed(seed)) for seed in range(3)]
        assert [answer.result() for answer in answers] == single_engine["completions"] * 3
    for seed, swap in enumerate(swaps):
        assert swap["placement"] == placed(seed).id
        assert swap["slices"] > 1
    wait_for(lambda: held()["placement"] == placed(2).id, "the status names the new placement", 30)
    assert held()["experts_moved"] == sum(swap["experts"] for swap in swaps)
    wrong = ExpertPlacement(placed(0).physical_to_logical[1:], 2, 64, model="eldr-demo", method="drawn")
    assert "5 layers of 80 slots, the model 6 of 80" in command(wrong).output
    assert held()["placement"] == placed(2).id
    # By itself, for the prompts that were prefilled last.
    recent = ray.get(find(actor_name("ep")).recent_signatures.remote())
    cost = LayerCost(fixed_s=0, per_expert_s=1e-5, per_token_s=1e-5)
    assert "experts moved" in str(look(Planner(cost, 4, 64, 0.05, 0), operator, recent))
    assert (completed(prompts[0]), completed(prompts[1])) == tuple(single_engine["completions"][:2])
    wait_for(lambda: held()["placement"] != placed(2).id, "the status names the newest placement", 30)
