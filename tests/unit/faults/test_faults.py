"""Seeded runs of the serving code lose nothing under faults, and detect faults in the code."""

import asyncio
import importlib.util
import random
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from eldr_serve.limits.tenants import SharedLimits, Tenants
from eldr_serve.pipeline.prefill.split_prefill import SplitPrefill
from eldr_serve.router.leases import Leases
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling.placer import Placer
from tests.faults import virtual_time
from tests.faults.__main__ import mutate, simulate
from tests.faults.clients import ClientScript
from tests.faults.greedy_model import Blocks, continuation
from tests.faults.mutations import MUTATIONS, Mutation
from tests.faults.schedule import Fault
from tests.faults.simulate import run_seed
from tests.faults.virtual_network import Network
from tests.faults.virtual_time import LivelockError, Process, VirtualLoop
from tests.support.in_process import command, sentence
from tests.support.processes import python

SEEDS = 60  # `make test-faults` runs more
STEPS, STRIDE = 48, 4  # an engine needs fewer for these requests


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the ids of requests that end while they wait in the decode queue."""
    finish, request_ids = Placer.finish, []

    def finished(placer: Placer, request_id: str, *, is_complete: bool = True) -> None:
        request_ids.extend({request_id} & placer.queue.leases.keys())
        finish(placer, request_id, is_complete=is_complete)

    monkeypatch.setattr(Placer, "finish", finished)
    return request_ids


@pytest.mark.parametrize(
    ("first", "last"), [(0, SEEDS), pytest.param(SEEDS, 10 * SEEDS, marks=pytest.mark.faults)]
)
def test_nothing_is_lost_whatever_fails(first: int, last: int, abandoned: list[str]) -> None:
    for seed in range(first, last):
        run = run_seed(seed)
        assert not run.violations, f"python -m tests.faults simulate --seed {seed}"
    assert abandoned, "no request of these runs was abandoned in the decode queue"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "role"), [("kill", "decode"), ("kill", "prefill"), ("cut a connection of", "decode")]
)
def test_no_answer_is_lost_by_a_fault_at_any_step_of_an_engine(kind: str, role: str, stream: bool) -> None:
    scripts = [ClientScript(1.0, "completions", f"1 2 3 4 5 6 7 8 {n}", 4, stream=stream) for n in range(2)]
    for steps in range(1, STEPS, STRIDE):
        run = run_seed(0, requests=scripts, injected=[Fault(kind, role, 0.99, steps, 0.0, 0.0)])
        assert not run.violations, steps
        assert run.kinds == {"ok": 2}, steps


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    in_this_process, in_another = (
        done.stdout.rpartition(", trace")[0]
        for done in (command(simulate, seed=3), python("-m", "tests.faults", "simulate", "--seed", 3))
    )
    assert in_this_process == in_another
    assert in_this_process.endswith(f"seed 3: {run_seed(3).virtual_s:.1f} s of virtual time")


def test_tenants_limits_do_not_depend_on_the_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = count(0.0, 60.0)
    for init in (Tenants.__init__, SharedLimits.__init__):
        monkeypatch.setattr(init, "__defaults__", (lambda: next(minutes),))
    assert not run_seed(5).violations  # its clients send keys


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutation_of_the_code_is_found() -> None:
    done = python("-m", "tests.faults", "mutate", timeout_s=1790)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "seeds"),
    [
        (SplitPrefill, "prepare", lambda step, *arguments: step._prefill(*arguments), 5),
        (Leases, "adopt_lease", lambda leases, lease: None, 5),
        (Placer, "finish", lambda placer, request_id: placer._stop(request_id), 40),
        (RouterClient, "send_leases", lambda client, leases: None, 20),
        (
            RouterClient,
            "_lease_by_local_fallback",
            lambda client, lease, reason: client._fallback.lease(lease, reason),
            5,
        ),
    ],
    ids=[
        "prefill is repeated",
        "own leases are ignored",
        "the queue keeps it",
        "no lease is restored",
        "own leases are sent late",
    ],
)
def test_each_run_provokes_cases_that_chance_seldom_produces(
    owner: type, method: str, wrong: Any, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    assert any(run_seed(seed).violations for seed in range(seeds))


# -- the harness's own parts -----------------------------------------------------------------------------


def on_virtual_time(main) -> VirtualLoop:
    loop = VirtualLoop(random.Random(0))
    loop.network = Network(loop, random.Random(0))
    loop.run(main(loop))
    return loop


def test_virtual_time_passes_without_waiting_and_in_order() -> None:
    wake_times = []

    async def main(loop: VirtualLoop) -> None:
        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            wake_times.append((seconds, loop.time()))

        await asyncio.gather(*map(sleeper, (3600.0, 1.0, 60.0)))

    on_virtual_time(main)
    assert wake_times == [(1.0, 1.0), (60.0, 60.0), (3600.0, 3600.0)]


def test_a_killed_process_runs_nothing_and_a_stopped_one_waits() -> None:
    events = []

    async def main(loop: VirtualLoop) -> None:
        async def speak(process: Process) -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    events.append((process.name, loop.time()))
            finally:
                events.append((process.name, "ended"))

        killed, stopped = loop.process("killed"), loop.process("stopped")
        for process in (killed, stopped):
            process.run(loop.create_task, speak(process))
        await asyncio.sleep(1.5)
        loop.kill(killed)
        loop.stop_process(stopped)
        await asyncio.sleep(2)
        loop.go_on(stopped)
        await asyncio.sleep(1)

    on_virtual_time(main)
    assert sorted(events[:2]) == [("killed", 1.0), ("stopped", 1.0)]
    assert events[2] == ("stopped", 3.5)
    assert ("killed", "ended") not in events[:3]


def test_all_that_is_due_after_the_same_step_of_a_process_is_called_in_order() -> None:
    events: list[tuple[str, int]] = []

    async def main(loop: VirtualLoop) -> None:
        process = loop.process("busy")
        process.trap(2, lambda: events.append(("first", process.steps)))
        process.trap(2, lambda: events.append(("second", process.steps)))
        process.trap(3, lambda: events.append(("last", process.steps)))
        for _ in range(4):
            process.soon(lambda: None)
        await asyncio.sleep(1)

    on_virtual_time(main)
    assert events == [("first", 2), ("second", 2), ("last", 3)]


def test_a_deadlock_is_reported() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(LivelockError, match="all processes wait"):
        on_virtual_time(main)


def test_a_blocked_event_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STALL_S", 0.05)

    async def main(loop: VirtualLoop) -> None:
        busy = loop.process("busy")
        busy.soon(compute)
        await asyncio.sleep(1)

    def compute() -> None:
        until = time.thread_time() + 0.06
        while time.thread_time() < until:
            pass

    (error,) = on_virtual_time(main).errors
    assert "busy was blocked" in error


class Echo(asyncio.Protocol):
    def __init__(self, heard: list) -> None:
        self.heard = heard

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, error) -> None:
        self.heard.append("lost")


@pytest.mark.parametrize("half", [False, True])
def test_a_connection_keeps_order_and_can_be_lost_on_one_side_or_both(half: bool) -> None:
    at_client: list = []
    at_server: list = []

    async def main(loop: VirtualLoop) -> None:
        server = await loop.create_server(lambda: Echo(at_server), "server")
        end, _ = await loop.create_connection(lambda: Echo(at_client), *server.sockets[0].getsockname())
        for number in range(50):
            end.write(b"%d" % number)
        await asyncio.sleep(1)
        end.stall(5)
        end.write(b"late")
        await asyncio.sleep(4)
        assert len(at_server) == 50
        await asyncio.sleep(2)
        assert at_server[50:] == [b"late"]
        loop.network.cut(end, half=half)
        end.write(b"lost")
        await asyncio.sleep(1)

    on_virtual_time(main)
    assert [int(data) for data in at_server[:50]] == list(range(50))
    assert at_client == ["lost"]
    assert at_server[51:] == ([] if half else ["lost"])


async def test_a_freed_block_holds_another_prompt() -> None:
    blocks = Blocks(2)
    own_blocks = await blocks.take(8)
    blocks.content[own_blocks[0]] = (1, 2, 3, 4)
    waiting = asyncio.create_task(blocks.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    blocks.give_back(own_blocks)
    assert blocks.content[own_blocks[0]] != (1, 2, 3, 4)
    assert len(await waiting) == 1
    assert blocks.in_use == 1


def test_one_wrong_token_changes_the_continuation() -> None:
    right = list(islice(continuation([1, 2, 3]), 5))
    assert list(islice(continuation([1, 2, 3, *right[:2]]), 3)) == right[2:]
    assert list(islice(continuation([1, -1, 3]), 5)) != right


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_text_of_a_mutation_occurs_once_in_its_module(mutation: Mutation) -> None:
    spec = importlib.util.find_spec(mutation.module)
    assert Path(spec.origin or "").read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new


def test_a_mutation_is_found_and_the_unchanged_code_passes() -> None:
    done = python("-m", "tests.faults", "mutate", "--only", "a lease is not released", "--seeds", 3)
    assert done.returncode == 0, done.stdout
    assert "1 mutations of the serving code, 0 not found" in done.stdout


def test_mutations_have_unique_names() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 10


def test_an_unknown_mutation_is_refused() -> None:
    assert "no mutation's name contains 'no such'" in sentence(command(mutate, only="no such"))
