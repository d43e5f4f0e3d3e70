"""An application with expert-parallel decode gives the answers of one plain engine.

This also holds while an operator or a job moves experts, and when a rank dies. Decode engines hold the
placements of their positions, also an engine that replaces another one.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner, Result

from eldr_serve.cli import app
from eldr_serve.experts.expert_placement import ExpertPlacement
from examples.demo_model import WEIGHTS
from loadgen.processes import is_alive
from loadgen.results import RESULTS
from offline.widen import widen
from tests.e2e.applications import arguments_of, running
from tests.e2e.service import ADMIN_KEY, Background, Service, core_of, until, wait_for
from tests.e2e.streams import Stream, complete
from tests.support.tables import save_placements, unit_table

pytestmark = pytest.mark.long
DEMO: dict[str, Any] = {"model": "eldr-demo", "num_layers": 6, "num_experts": 64}


def random_placement(seed: int) -> ExpertPlacement:
    """Return a placement of the demo model's 64 experts in 80 slots of 2 ranks."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation([*range(64), *rng.choice(64, 16)]) for _ in range(6)])
    return ExpertPlacement(rows, 2, 64, model="eldr-demo", method="drawn")


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder with a table and a placement for each of two positions, and the placements' ids."""
    folder = tmp_path_factory.mktemp("ep")
    placements = save_placements(folder, range(2), **DEMO, redundant=16)
    unit_table(2, **DEMO).save(folder / "table.safetensors")
    return folder, [placement.id for placement in placements]


@pytest.fixture(scope="module")
def expert_parallel(ray_cluster: str, placed: tuple[Path, list[str]]) -> Iterator[Service]:
    """Run deployments/cpu_demo_ep.yaml beside the demo, with a placement for each position."""
    folder, _ = placed
    widen(WEIGHTS, 32, folder / "model", heads=4)
    arguments = arguments_of("cpu_demo_ep.yaml", folder / "model")
    arguments["router"] |= {"table": str(folder / "table.safetensors"), "expert_placements": str(folder)}
    arguments["signatures"] = {"actors": 0}  # the table stays
    # Serve replaces a dead replica at its next health check.
    decode = arguments["decode_config"]
    decode["deployment_config"] |= {"health_check_period_s": 1, "graceful_shutdown_timeout_s": 3}
    with running("ep", arguments) as service:
        service.set_policy("round-robin")  # both engines answer
        yield service


def experts_of(service: Service) -> dict[str, dict[str, Any]]:
    """Return what each decode replica reports of its experts."""
    return service.status()["ingress"]["experts"]


def have_placement(service: Service, placement: str) -> bool:
    """Return whether both decode replicas hold the placement."""
    return [str(experts["placement"]) for experts in experts_of(service).values()] == [placement] * 2


def placements_of(service: Service) -> dict[int, str]:
    """Return the placement that the worker of each position reports."""
    status = service.status()
    experts = status["ingress"]["experts"]
    workers = {worker["position"]: worker["worker"] for worker in status["workers"]}
    return {
        position: experts[worker]["placement"] for position, worker in workers.items() if worker in experts
    }


def command(service: Service, placement: ExpertPlacement, folder: Path, *options: str) -> Result:
    """Run `eldr experts FILE`."""
    placement.save(folder / "placement.json")
    arguments = ["experts", str(folder / "placement.json"), "--url", service.url, *options]
    return CliRunner().invoke(app, arguments, env={"ELDR_ADMIN_KEY": ADMIN_KEY})


def test_greedy_answers_equal_the_single_engine_under_the_placements_of_the_positions(
    expert_parallel: Service,
    placed: tuple[Path, list[str]],
    prompts: list[str],
    single_engine: dict[str, list[str]],
) -> None:
    ids = dict(enumerate(placed[1]))
    assert len(set(ids.values())) == 2
    wait_for(lambda: placements_of(expert_parallel) == ids, "both engines have their placement", 60)
    for experts in experts_of(expert_parallel).values():
        assert (experts["placements_applied"], experts["placements_refused"]) == (1, 0)
    answers = [complete(expert_parallel, prompt) for prompt in prompts]
    assert [text for _, text in answers] == single_engine["completions"]
    assert len({replica for replica, _ in answers}) == 2
    counters = expert_parallel.status()["counters"]
    assert counters["placed"] >= len(prompts)
    assert counters.get("counts_missing", 0) == 0


def test_moving_experts_during_answers_does_not_change_them(
    expert_parallel: Service, prompts: list[str], single_engine: dict[str, list[str]], tmp_path: Path
) -> None:
    def put(placement: ExpertPlacement) -> dict[str, dict[str, Any]]:
        done = command(expert_parallel, placement, tmp_path)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def text(prompt: str) -> str:
        return complete(expert_parallel, prompt)[1]

    wait_for(lambda: len(experts_of(expert_parallel)) == 2, "both engines have reported their experts", 30)
    before = experts_of(expert_parallel)
    for experts in before.values():
        assert experts["replica_bytes"] * 64 == experts["weight_bytes"] * 16  # redundant_experts: 16
        assert experts["slices_left"] == 0
    # Answers run from before the first swap until after the last.
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = [clients.submit(text, prompt) for prompt in prompts * 3]
        swaps = [put(random_placement(seed)) for seed in range(3)]
        assert [answer.result() for answer in answers] == single_engine["completions"] * 3
    for seed, swap in enumerate(swaps):
        assert set(swap) == set(before)
        for cost in swap.values():
            assert cost["placement"] == random_placement(seed).id
            assert cost["slices"] > 1
    newest = random_placement(2)
    wait_for(lambda: have_placement(expert_parallel, newest.id), "the status names the new placement", 30)
    for replica, experts in experts_of(expert_parallel).items():
        moved = sum(swap[replica]["experts"] for swap in swaps)
        assert experts["experts_moved"] - before[replica]["experts_moved"] == moved
    rows = newest.physical_to_logical[1:]
    wrong = ExpertPlacement(rows, 2, 64, model="eldr-demo", method="drawn")
    assert "5 layers of 80 slots, but the model has 6" in command(expert_parallel, wrong, tmp_path).output
    assert have_placement(expert_parallel, newest.id)


def test_a_job_places_the_experts_for_the_newest_prompts(
    expert_parallel: Service, prompts: list[str], single_engine: dict[str, list[str]], tmp_path: Path
) -> None:
    texts = [complete(expert_parallel, prompt)[1] for prompt in prompts]
    before, log = experts_of(expert_parallel), tmp_path / "job.txt"
    options = {
        "cost": RESULTS / "layer_cost_cpu.json",
        "top-k": 4,
        "every": 600,
        "url": expert_parallel.url,
        "application": "ep",
    }
    job = [sys.executable, "-m", "offline.live_placement", *(f"--{k}={v}" for k, v in options.items())]
    with Background(job, log, {"RAY_ADDRESS": "auto", "ELDR_ADMIN_KEY": ADMIN_KEY}):
        wait_for(lambda: "experts moved, placement" in log.read_text(), "the job has moved experts", 60)
    placement = re.search(r"placement (\w+)", log.read_text())
    assert placement is not None
    assert placement[1] not in {experts["placement"] for experts in before.values()}
    wait_for(lambda: have_placement(expert_parallel, placement[1]), "both hold the job's placement", 30)
    assert texts == [complete(expert_parallel, p)[1] for p in prompts] == single_engine["completions"]


async def test_a_dead_rank_ends_its_engine_but_loses_no_answer(
    expert_parallel: Service,
    placed: tuple[Path, list[str]],
    prompts: list[str],
    single_engine: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    """The rank dies during streams and a swap. The new engine takes the placement of the position."""
    bodies: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts[:5]]
    bodies.append({"prompt": prompts[5], "presence_penalty": 0.5})  # no other engine can resume this request
    whole = [Stream(body) for body in bodies]
    await asyncio.gather(*(stream.read(expert_parallel) for stream in whole))
    for stream, completion in zip(whole[:5], single_engine["completions"], strict=False):
        assert stream.text.startswith(completion)
    assert (await asyncio.to_thread(command, expert_parallel, random_placement(7), tmp_path)).exit_code == 0
    before = (await asyncio.to_thread(expert_parallel.status))["counters"]
    engines = {replica: psutil.Process(core_of(replica)) for replica in experts_of(expert_parallel)}

    streams = [Stream(body) for body in bodies]
    reading = [asyncio.create_task(stream.read(expert_parallel)) for stream in streams]
    while min(stream.events for stream in streams) < 20:
        await asyncio.sleep(0.02)
    assert not any(task.done() for task in reading)
    victim = streams[-1].worker
    workers = (await asyncio.to_thread(expert_parallel.status))["workers"]
    position = next(worker["position"] for worker in workers if worker["worker"] == victim)
    assert victim in {stream.worker for stream in streams[:-1]}
    core = engines[victim]
    ranks = [child for child in core.children() if "Worker" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    os.kill(ranks[-1].pid, signal.SIGSTOP)  # then running requests stay in flight
    swap = asyncio.create_task(
        asyncio.to_thread(command, expert_parallel, random_placement(8), tmp_path, "--replica", victim)
    )
    await asyncio.sleep(0.5)
    os.kill(ranks[-1].pid, signal.SIGKILL)

    await asyncio.gather(*reading)
    assert [stream.text for stream in streams[:-1]] == [stream.text for stream in whole[:-1]]
    assert not any(stream.error for stream in streams[:-1])
    assert streams[-1].error == "engine_lost"
    assert whole[-1].text.startswith(streams[-1].text)
    refused = await swap
    assert refused.exit_code != 0
    assert victim in refused.output

    def since(name: str) -> int:
        return expert_parallel.counter(name) - before.get(name, 0)

    wait_for(lambda: since("streams_lost") == 1 and since("resumed") > 0, "the lost streams are counted", 10)
    wait_for(lambda: not any(map(is_alive, (core, *ranks))), "no process of the engine is left", 30)

    def is_replaced() -> bool:
        workers = expert_parallel.decodes()
        return len(workers) == 2 and victim not in workers and experts_of(expert_parallel).keys() == workers

    await until(is_replaced, "Serve has replaced the engine", 240)
    wait_for(expert_parallel.whole, "the new engine is warm", 120)
    (new,) = experts_of(expert_parallel).keys() - {stream.worker for stream in streams}
    expected = {position: placed[1][position], 1 - position: random_placement(7).id}
    await until(lambda: placements_of(expert_parallel) == expected, "the new engine is placed", 60)
    answers = [complete(expert_parallel, prompt) for prompt in prompts]
    assert [text for _, text in answers] == single_engine["completions"]
    assert new in {replica for replica, _ in answers}
