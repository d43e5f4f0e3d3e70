"""Decode engines hold the expert placements of their positions, also an engine that replaces another one."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from examples.demo_model import WEIGHTS
from offline.widen import widen
from tests.e2e.applications import arguments_of, running
from tests.e2e.service import Service, core_of, wait_for
from tests.e2e.streams import complete
from tests.support.tables import save_placements, unit_table

DEMO: dict[str, Any] = {"model": "eldr-demo", "num_layers": 6, "num_experts": 64}


@pytest.fixture(scope="module")
def positioned(
    ray_cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, list[str]]]:
    """Run deployments/cpu_demo_ep.yaml with a placement for each position; also yield the placements' ids."""
    folder = tmp_path_factory.mktemp("positions")
    widen(WEIGHTS, 32, folder / "model", heads=4)
    placements = save_placements(folder, range(2), **DEMO, redundant=16)
    unit_table(2, **DEMO).save(folder / "table.safetensors")
    arguments = arguments_of("cpu_demo_ep.yaml", folder / "model")
    arguments["router"] |= {"table": str(folder / "table.safetensors"), "expert_placements": str(folder)}
    arguments["signatures"] = {"actors": 0}  # the table stays
    # Serve replaces a dead replica at its next health check.
    arguments["decode_config"]["deployment_config"] |= {
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 3,
    }
    with running("positions", arguments) as service:
        service.set_policy("round-robin")  # both engines answer
        yield service, [placement.id for placement in placements]


def placements_of(service: Service) -> dict[int, str]:
    """Return the placement that the worker of each position reports."""
    status = service.status()
    experts = status["ingress"]["experts"]
    workers = {worker["position"]: worker["worker"] for worker in status["workers"]}
    return {
        position: experts[worker]["placement"] for position, worker in workers.items() if worker in experts
    }


def test_each_engine_starts_with_the_placement_of_its_position(
    positioned: tuple[Service, list[str]], prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    service, ids = positioned
    assert len(set(ids)) == 2
    wait_for(lambda: placements_of(service) == dict(enumerate(ids)), "both have their placement", 60)
    answers = [complete(service, prompt) for prompt in prompts]
    assert [text for _, text in answers] == single_engine["completions"]
    assert len({replica for replica, _ in answers}) == 2
    for experts in service.status()["ingress"]["experts"].values():
        assert (experts["placements_applied"], experts["placements_refused"]) == (1, 0)


def test_an_engine_that_replaces_another_one_takes_its_placement(
    positioned: tuple[Service, list[str]], prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    service, ids = positioned
    wait_for(lambda: placements_of(service) == dict(enumerate(ids)), "both have their placement", 60)
    victim = next(worker["worker"] for worker in service.status()["workers"] if worker["position"] == 0)
    os.kill(core_of(victim), signal.SIGKILL)
    wait_for(lambda: victim not in service.decodes(), "the engine is lost", 60)
    wait_for(lambda: len(service.decodes()) == 2, "Serve has replaced the engine", 240)
    wait_for(service.whole, "the new engine is warm", 120)
    wait_for(lambda: placements_of(service) == dict(enumerate(ids)), "the new engine is placed", 60)
    assert [complete(service, prompt)[1] for prompt in prompts] == single_engine["completions"]
