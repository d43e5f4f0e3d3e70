"""Runs of the serving code on virtual time: one seed is one run, from its start to the last check.

The seed decides the settings of the world, the requests, the faults, all delays, and which process runs
next. So a failing seed fails again, in any process and on any machine, unless it fails only because a
callback used too much CPU time (see `virtual_time`). The docstring of `world` lists what is real and what is
fake.

A run has these phases (`_Simulation.run_phases`):

1. Clients send the requests of the seed while its faults happen. Each answer must be complete and equal to
   the reference, or end with an error that `checks` allows.
2. When all processes are back, long streams run, and the router must have exactly its ingresses' leases,
   also after the router has stopped for a while and after connections have been replaced.
3. When the streams have ended, no process may hold leases, requests, KV blocks or anything else of them.
4. The run provokes cases that chance seldom produces (`provoked_cases`).
5. The application must be as idle as before, no engine may have cached a wrong block, and ingresses that stop
   leave no task.

Each check that fails adds a sentence to `SimulatedRun.violations`. A run without violations passes.
"""

import asyncio
import gc
import logging
import random

from tests.faults.checks import Checks, SimulatedRun
from tests.faults.clients import ClientScript, RequestOutcome, ask
from tests.faults.invariants import (
    count_tasks,
    engine_violations,
    find_added_tasks,
    find_leftovers,
    has_router_channel,
    has_subscribed,
    leases_of_ingresses,
    leases_of_router,
    longest_wait_for_router_s,
    router_state,
    unready_processes,
)
from tests.faults.provoked_cases import ProvokedCases
from tests.faults.schedule import DRAIN, DURATION_S, Fault, draw_faults, draw_scripts, schedule_fault
from tests.faults.virtual_network import Network
from tests.faults.virtual_time import LivelockError, VirtualLoop
from tests.faults.world import INGRESS_TIMEOUT_S, LEASE_S, World, patch_serving_code

_LONG, _LONG_S = 100, 2.0  # tokens and seconds per token of the streams that run while leases are compared
_STOP_S = 2.0  # duration of the router's stop
_WAITED_S = 1.6  # time after the stop at which ingresses no longer wait for the router
_RECONNECT_S = 2.0  # longer than an ingress needs to connect again
_ANSWER_S = 1.1  # maximum time for which a request waits for an answer of the router
_RESTORE_S = 0.5  # time for which ingresses have sent their leases but get no reply
_AGREE_S = INGRESS_TIMEOUT_S + 8.0  # within this time router and ingresses agree on all leases
_SETTLE_S = LEASE_S + INGRESS_TIMEOUT_S + 12.0  # within this time an idle application holds nothing


def run_seed(
    seed: int, *, requests: list[ClientScript] | None = None, injected: list[Fault] | None = None
) -> SimulatedRun:
    """Run one seed. The same seed gives the same run.

    Args:
        requests: requests to send instead of those that the seed draws.
        injected: faults to inject instead of those that the seed draws. The run then ends before the cases
            that it would provoke.
    """
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.disable()  # then objects are finalized at the same moments in each run
    try:
        rng = random.Random(seed)
        loop = VirtualLoop(random.Random(rng.random()))  # type: ignore[abstract]
        loop.network = Network(loop, random.Random(rng.random()))
        run = SimulatedRun(seed, faults=draw_faults(rng) if injected is None else injected)
        requests = draw_scripts(rng) if requests is None else requests
        world = World(loop, random.Random(rng.random()))
        with patch_serving_code(loop, world, random.Random(rng.random())):
            try:
                loop.run(_Simulation(run, world, requests, rng).run_phases(provokes=injected is None))
            except LivelockError as error:
                run.violations.append(f"the run does not end: {error}")
        run.violations += loop.errors
        run.virtual_s, run.trace = loop.time(), loop.trace
        return run
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(logging.NOTSET)


class _Simulation:
    """One run. Its methods add to the violations of `run`."""

    def __init__(
        self, run: SimulatedRun, world: World, requests: list[ClientScript], rng: random.Random
    ) -> None:
        self.run, self.world, self.requests, self.rng = run, world, requests, rng
        self.checks = Checks(run, world)
        self._long_streams: list[asyncio.Task[RequestOutcome]] = []  # streams that run during comparisons

    async def run_phases(self, provokes: bool) -> None:
        """Run the phases of the module's docstring.

        Args:
            provokes: whether to provoke the cases that chance seldom produces.
        """
        world, loop, wait_until_none = self.world, self.world.loop, self.checks.wait_until_none
        await world.start(prefills=self.rng.choice([1, 2]), decodes=self.rng.choice([2, 3]), ingresses=2)
        for fault in self.run.faults:
            schedule_fault(world, fault, self.run.events.append)
        clients = [loop.create_task(self._send_when_due(script)) for script in self.requests]
        self._begin_streams(2)
        self.run.outcomes = list(await asyncio.gather(*clients))
        for outcome in self.run.outcomes:
            self.checks.check_outcome(outcome)
        await asyncio.sleep(max(DURATION_S - loop.time(), 0) + 0.01)
        what = "processes that were restarted are not back"
        await wait_until_none(lambda: unready_processes(world), 30, what)
        await wait_until_none(self._find_disagreements, _AGREE_S, "leases, before ingresses restore them")
        if provokes:
            await self._ingresses_place_without_router()
            # Compare now: ingresses restore all leases after they have left their channels.
            await wait_until_none(self._find_disagreements, _AGREE_S, "leases, after local fallback")
            await self._ingresses_leave_their_channels()
        await self._compare_leases()
        await wait_until_none(lambda: find_leftovers(world), _SETTLE_S, "left behind")
        tasks_before = count_tasks(world)
        self._check_drains()
        await self._check_answered()
        if provokes:
            await ProvokedCases(self.checks).provoke_all()
        what = "left behind by requests after the faults"
        await wait_until_none(
            lambda: find_leftovers(world) + find_added_tasks(world, tasks_before), _SETTLE_S, what
        )
        self.run.violations += engine_violations(world, no_engine_faults=self.checks.has_only_router_faults)
        await self._stop_ingresses()

    async def _send_when_due(self, script: ClientScript) -> RequestOutcome:
        """Send the request at its time to a random ingress. Wait while there is none."""
        await asyncio.sleep(script.at_s)
        while not (ingresses := self.world.live["ingress"]):
            await asyncio.sleep(0.1)
        return await ask(self.world, script, ingresses[int(self.rng.random() * len(ingresses))])

    async def _ingresses_place_without_router(self) -> None:
        """Stop the router, so that ingresses place requests by local fallback.

        Ingresses place more requests while they restore their leases. The streams of all these requests
        still run when leases are compared.
        """
        world, loop = self.world, self.world.loop
        router = world.router()
        assert router is not None
        world.stop(router, _STOP_S)
        self._begin_stream_at_each(0)
        await asyncio.sleep(_WAITED_S)
        for process in world.live["ingress"]:
            if longest_wait_for_router_s(process, loop.time()) > _ANSWER_S:
                self.run.violations.append(f"requests at {process} wait for a router that is stopped")
        unconnected = list(world.live["ingress"])
        until = loop.time() + _STOP_S
        while unconnected and loop.time() < until:
            await asyncio.sleep(0.0002)
            for process in [ingress for ingress in unconnected if has_router_channel(ingress)]:
                unconnected.remove(process)
                if not has_subscribed(process):
                    for end in world.network.ends_of(router):
                        if end.peer.process is process:
                            end.stall(_RESTORE_S)
        self._begin_stream_at_each(1)
        await asyncio.sleep(_RESTORE_S)

    async def _ingresses_leave_their_channels(self) -> None:
        """Delay messages to the router until ingresses have left their channel and restored their leases."""
        router = self.world.router()
        for process in self.world.live["ingress"]:
            for end in self.world.network.ends_of(process):
                if end.peer.process is router:
                    end.stall(_RECONNECT_S)
        self._begin_stream_at_each(2)
        await asyncio.sleep(_RECONNECT_S + 0.5)

    def _begin_stream_at_each(self, number: int) -> None:
        """Begin a long stream at each ingress. `number` distinguishes the prompts."""
        for process in self.world.live["ingress"]:
            script = ClientScript(
                0.0, "completions", f"{number} 3", _LONG, True, token_s=_LONG_S, leaves_s=500.0
            )
            self._long_streams.append(self.world.loop.create_task(ask(self.world, script, process)))

    async def _compare_leases(self) -> None:
        """Check that router and ingresses agree on all leases while long streams run."""
        self._begin_streams(0)
        await asyncio.sleep(0.7)
        await self.checks.wait_until_none(self._find_disagreements, _AGREE_S, "leases")
        for task in self._long_streams:
            task.cancel()

    def _begin_streams(self, during: int) -> None:
        """Begin long streams, which run until they are cancelled.

        Args:
            during: number of streams that begin at random times among the faults; 0: one begins now.
        """
        for number in range(during or 1):
            at_s = self.rng.uniform(0.8, DURATION_S) if during else 0.0
            script = ClientScript(
                at_s, "completions", f"{number} 1", _LONG, stream=True, token_s=_LONG_S, leaves_s=500.0
            )
            self._long_streams.append(self.world.loop.create_task(self._send_when_due(script)))

    def _find_disagreements(self) -> list[str]:
        """Return a sentence if the router's leases are not those of its ingresses, or there are none.

        If all long streams have ended, begin another one, so that there are leases to compare.
        """
        of_router, of_ingresses = leases_of_router(self.world), leases_of_ingresses(self.world)
        if of_router == of_ingresses and of_ingresses:
            return []
        if all(task.done() for task in self._long_streams):  # lost requests still fill prefill engines
            self._begin_streams(0)
        return [f"the router has {of_router}, its ingresses have {of_ingresses}"]

    def _check_drains(self) -> None:
        """Check that draining engines complete their streams."""
        counters = router_state(self.world).counters
        only_drains = self.run.faults and all(fault.kind == DRAIN for fault in self.run.faults)
        if only_drains and (counters["resumed"] or counters["streams_lost"]):
            self.run.violations.append(f"draining engines have lost streams: {dict(counters)}")

    async def _check_answered(self) -> None:
        """Check that a request after all faults is answered."""
        for process in self.world.live["ingress"]:
            script = ClientScript(0.0, "completions", "1 2 3 4 5 6", 3, stream=False)
            await self.checks.require_answer(script, process, "a request after the faults")

    async def _stop_ingresses(self) -> None:
        """Check that no task is left in an ingress that has stopped."""
        ingresses = list(self.world.live["ingress"])
        for process in ingresses:
            process.run(self.world.loop.create_task, process.servable_object.stop())
        await asyncio.sleep(1.0)
        for process in ingresses:
            if process.pending:
                self.run.violations.append(
                    f"tasks left in {process}: {[str(t.get_coro()) for t in process.pending]}"
                )
