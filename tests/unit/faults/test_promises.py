"""Times until resources of a lost client or ingress are free: the serving code on virtual time.

A message takes 1 ms, and work of engines a few ms. tests/unit/replicas/test_real_processes.py measures real
processes, whose times depend on the machine's load.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.faults.clients import ClientScript, ask
from tests.faults.fake_engines import PrefillEngine
from tests.faults.virtual_network import Network
from tests.faults.virtual_time import VirtualLoop
from tests.faults.world import World, patch_serving_code

PROMPT = "1 2 3 4 5 6 7 8 9"
LEFT_S, DEAD_S = 0.2, 2.0
WARM_S = 8.0  # time until all pairs are warm
SEEDS = (0, 1, 2)  # they select the policy, and whether decode engines prefill


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_in_world(seed: int, main: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    rng = random.Random(seed)
    loop = VirtualLoop(random.Random(rng.random()))
    loop.network = Network(loop, random.Random(rng.random()))
    loop.network.latency_s = lambda: 0.001
    world = World(loop, random.Random(rng.random()))

    async def run() -> None:
        await world.start(prefills=1, decodes=2, ingresses=1)
        await asyncio.sleep(WARM_S)
        assert not held_amounts(world)
        await main(world)

    with patch_serving_code(loop, world, random.Random(rng.random())):
        loop.run(run())


def held_amounts(world: World) -> list[str]:
    """Return all slots, leases, requests, blocks and prompts that are held."""
    amounts = [f"{len(p.servable_object._state.placer.running)} leases" for p in world.live["router"]]
    amounts += [f"{p.servable_object.gate.in_flight} slots" for p in world.live["ingress"]]
    amounts += [f"{len(p.servable_object._router.held_leases())} own leases" for p in world.live["ingress"]]
    for engine in world.engines.values():
        amounts += [f"{engine.running} requests", f"{engine.blocks.in_use} blocks"]
        amounts += [f"{len(engine.held_blocks)} prompts"] if isinstance(engine, PrefillEngine) else []
    return [one for one in amounts if not one.startswith("0 ")]


@pytest.mark.parametrize("seed", SEEDS)
def test_resources_are_free_a_fifth_of_a_second_after_a_client_disconnects(seed: int) -> None:
    """Disconnect at several times between prefill and the middle of the answer."""

    async def main(world: World) -> None:
        times_s = (0.005, 0.012, 0.018, 0.022, 0.03, 0.1, 0.5)
        for leaves_s, stream in itertools.product(times_s, (True, False)):
            script = ClientScript(0.0, "completions", PROMPT, 80, stream, leaves_s=leaves_s)
            outcome = await ask(world, script, world.live["ingress"][0])
            assert outcome.kind == "left"
            await asyncio.sleep(LEFT_S)
            assert not held_amounts(world)

    run_in_world(seed, main)


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_end_the_requests_of_a_killed_ingress_within_two_seconds(seed: int) -> None:
    def busy(world: World) -> bool:
        return any(engine.running for engine in world.engines.values())

    async def main(world: World) -> None:
        for after_s in (0.0, 0.01, 0.5):
            loop, ingress = world.loop, world.live["ingress"][0]
            scripts = [
                ClientScript(0.0, "completions", f"{PROMPT} {n}", 200, True, token_s=0.1) for n in range(3)
            ]
            requests = [loop.create_task(ask(world, script, ingress)) for script in scripts]
            while not busy(world):
                await asyncio.sleep(0.001)
            await asyncio.sleep(after_s)
            world.kill(ingress)
            killed_s = loop.time()
            while busy(world):
                await asyncio.sleep(0.01)
            assert loop.time() - killed_s <= DEAD_S
            assert {(await outcome).kind for outcome in requests} == {"connection lost"}
            await asyncio.sleep(WARM_S)  # there is another ingress

    run_in_world(seed, main)
