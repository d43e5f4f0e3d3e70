"""Automatic moves of a service's experts: when they happen, and that they pay off."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from eldr_serve.commands.client import ServiceError
from eldr_serve.experts.expert_placement import ExpertPlacement, hosts_of
from offline import live_placement
from offline.expert_placement import director, relaxation
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.forecast import decode_correction
from offline.live_placement import Planner, learn_correction, update_placement
from tests.support.traces import synthetic_trace

LAYERS, EXPERTS, RANKS, SLOTS = 2, 8, 2, 8
COST = LayerCost(fixed_s=0, per_expert_s=1e-4, per_token_s=1e-4)


def traffic(*hot: int, prompts: int = 40) -> list[NDArray[np.uint32]]:
    """Return counts of prompts of 10 tokens, top-2. Most tokens choose these experts."""
    counts = np.ones((LAYERS, EXPERTS), np.uint32)
    counts[:, list(hot)] += np.uint32(12 // len(hot))
    return [counts] * prompts


class Service:
    def __init__(self, *names: str) -> None:
        self.held: dict[str, dict[str, Any]] = {
            name: {"placement": "at the start", "ranks": RANKS, "slots": SLOTS} for name in names
        }
        self.put: list[ExpertPlacement] = []

    def status(self) -> dict[str, Any]:
        return {"model": "m", "ingress": {"experts": self.held}}

    def place_experts(self, placement: bytes, described: bytes, replicas: list[str]) -> dict[str, Any]:
        assert replicas == sorted(self.held)
        self.put.append(ExpertPlacement.parse(placement, described, ("map", "meta")))
        for found in self.held.values():
            found["placement"] = self.put[-1].id
        return {name: {"experts": 3} for name in replicas}


def planner(min_gain: float = 0.05) -> Planner:
    return Planner(COST, 2, 32, min_gain, 0)


def on_different_ranks(placement: ExpertPlacement, *experts: int) -> bool:
    hosts = hosts_of(placement.physical_to_logical, EXPERTS, RANKS)
    return bool((hosts[:, list(experts)].sum(axis=1) <= 1).all())


def test_experts_follow_the_newest_prompts_unless_nothing_is_saved() -> None:
    service: Any = Service("r0", "r1")
    plans = planner()
    assert update_placement(plans, service, []) is None
    assert "experts moved" in str(update_placement(plans, service, traffic(0, 1)))
    assert on_different_ranks(service.put[-1], 0, 1)
    assert update_placement(plans, service, traffic(0, 1)) is None
    together = service.put[-1].physical_to_logical.reshape(LAYERS, RANKS, -1)[0, 0]
    pair = [int(expert) for expert in together if expert > 1][:2]
    assert not on_different_ranks(service.put[-1], *pair)
    message = update_placement(plans, service, [*traffic(0, 1), *traffic(*pair)])  # only the newest 32 count
    assert message is not None
    assert f"placement {service.put[-1].id}" in message
    assert on_different_ranks(service.put[-1], *pair)
    assert len(service.put) == 2
    assert service.put[-1].report["gain"] >= 0.05
    expected = service.put[-1].expected_tokens  # these reach the engines with the placement
    assert expected.shape == (LAYERS, EXPERTS)
    assert set(expected[0].argsort()[-2:].tolist()) == set(pair)


def test_a_check_solves_the_lp_and_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            called.append(name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    watch(relaxation, "linprog")
    watch(director, "round_in_polytope")
    service: Any = Service("r0")
    plans = planner()
    for hot in ((0, 1), (2, 3)):
        called.clear()
        update_placement(plans, service, traffic(*hot))
        assert called.count("linprog") >= LAYERS
        assert called.count("round_in_polytope") >= LAYERS


def test_a_correction_turns_prefill_counts_into_those_of_decode() -> None:
    service: Any = Service("r0")
    plans = planner()
    plans.correction = np.ones((LAYERS, EXPERTS))
    plans.correction[:, [0, 1]], plans.correction[:, [2, 3]] = 1 / 7, 7
    update_placement(plans, service, traffic(0, 1))
    assert on_different_ranks(service.put[-1], 2, 3)
    assert service.put[-1].report["corrected"]
    plans.correction = np.ones((LAYERS, EXPERTS + 1))  # correction of another model
    service.held["r0"]["placement"] = "another"
    update_placement(plans, service, traffic(0, 1))
    assert on_different_ranks(service.put[-1], 0, 1)
    assert not service.put[-1].report["corrected"]


def test_the_correction_is_learnt_from_sampled_traffic() -> None:
    trace = synthetic_trace()

    class Sampled:
        def trace(self) -> bytes:
            return trace.to_bytes()

    class Unsampled:
        def trace(self) -> bytes:
            raise ServiceError("no signature pool")

    sampled: Any = Sampled()
    unsampled: Any = Unsampled()
    columns = trace.prefill_counts, trace.prompt_tokens, trace.decode_counts, trace.decode_steps
    assert np.array_equal(learn_correction(sampled), decode_correction(*columns))
    assert learn_correction(unsampled) is None


@pytest.mark.parametrize("pending", [traffic(0, 1), []], ids=["pending", "none pending"])
def test_the_job_plans_for_pending_prompts_and_learns_the_correction(
    pending: list[NDArray[np.uint32]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without pending prompts it plans for the newest ones."""
    recent, router, update = traffic(2, 3), Mock(), Mock(return_value=None)
    router.pending_counts.remote.return_value = pending
    router.recent_counts.remote.return_value = recent
    client = Mock(trace=Mock(return_value=synthetic_trace().to_bytes()))
    eleven_checks = Mock(sleep=Mock(side_effect=[None] * 10 + [InterruptedError]))
    monkeypatch.setattr(live_placement, "ray", Mock(get=lambda answers: answers))
    monkeypatch.setattr(live_placement, "find_actor", lambda _: router)
    monkeypatch.setattr(live_placement, "OperatorClient", lambda *_: client)
    monkeypatch.setattr(live_placement, "update_placement", update)
    monkeypatch.setattr(live_placement, "time", eleven_checks)
    COST.save(tmp_path / "cost.json")
    with pytest.raises(InterruptedError):
        live_placement.live_placement(cost=tmp_path / "cost.json", top_k=2)
    assert client.trace.call_count == 2  # in the first check and in the eleventh
    assert update.call_count == 11
    plans, _, counts = update.call_args.args
    assert counts is (pending or recent)
    assert np.array_equal(plans.correction, learn_correction(client))


def test_a_gain_below_the_minimum_moves_nothing() -> None:
    service: Any = Service("r0")
    plans = planner(min_gain=0.99)
    update_placement(plans, service, traffic(0, 1))
    assert update_placement(plans, service, traffic(2, 3)) is None
    assert update_placement(plans, service, traffic(4, 5)) is None
    assert len(service.put) == 1


def test_experts_that_another_client_moved_are_placed_again() -> None:
    service: Any = Service("r0", "r1")
    plans = planner()
    update_placement(plans, service, traffic(0, 1))
    service.held["r1"]["placement"] = "that of a new replica"
    assert update_placement(plans, service, traffic(0, 1)) is not None
    assert len(service.put) == 2


def test_replicas_of_two_shapes_are_refused_and_no_replicas_are_accepted() -> None:
    service: Any = Service("r0", "r1")
    service.held["r1"]["slots"] = 10
    with pytest.raises(ValueError, match="differ in ranks or slots"):
        update_placement(planner(), service, traffic(0))
    assert update_placement(planner(), Service(), traffic(0)) is None
