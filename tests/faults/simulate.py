"""Seeded runs of the serving code on virtual time, and the properties that must hold in all of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eldr_serve.replicas.outliers import FAILURES
from eldr_serve.scheduling import State
from tests.faults.clients import Outcome, Plan, ask
from tests.faults.fake_engines import BLOCK_TOKENS, DecodeEngine, PrefillEngine
from tests.faults.schedule import DRAIN, DURATION_S, Fault, arm, faults, plans
from tests.faults.virtual_network import Network
from tests.faults.virtual_time import Livelock, Process, VirtualLoop
from tests.faults.world import (
    CALL_S,
    CLIENT_TIMEOUT_S,
    LEASE_S,
    LIMIT,
    LIMITED,
    QUEUE_S,
    ROLES,
    TENANTS,
    WAIT_S,
    World,
    virtual,
)

ALLOWED = ("ok", "left", "http 503", "http 429")  # outcomes that a client may always see
LOST_AFTER = 2  # faults; with fewer no stream may be lost, since an answer is resumed once
_LONG, _LONG_S = 100, 2.0  # tokens and seconds a token of the streams that run while leases are compared
_STOP_S = 2.0  # duration of the router's stop
_WAITED_S = 1.6  # time after the stop at which clients no longer wait for it
_LEFT_S = 2.0  # longer than a client needs to connect again
_ANSWER_S = 1.1  # maximum time for which a request waits for an answer of the router
_RESTORE_S = 0.5  # time for which clients have sent their leases but get no reply
_SICK_REQUESTS = 12  # requests while an engine is sick
_LOW_LIMIT = 6  # in-flight limit of an ingress, so low that the crowd reaches it
_EXCHANGE_S = 3.0  # until ingresses have exchanged the tenants' use
_SETTLE_S = LEASE_S + CLIENT_TIMEOUT_S + 12.0


@dataclass
class Run:
    """The results of a seed."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    trace: int = 0

    @property
    def kinds(self) -> Counter[str]:
        """Return the number of requests by outcome."""
        return Counter(outcome.kind for outcome in self.outcomes)


def run_seed(seed: int, *, asked: list[Plan] | None = None, wrong: list[Fault] | None = None) -> Run:
    """Run one seed; the same seed gives the same run.

    Args:
        asked: requests to send instead of those that the seed draws.
        wrong: faults to inject instead of those that the seed draws.
    """
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.disable()  # so that objects are finalized at the same moments in each run
    try:
        rng = random.Random(seed)
        loop = VirtualLoop(random.Random(rng.random()))  # type: ignore[abstract]
        loop.network = Network(loop, random.Random(rng.random()))
        run = Run(seed, faults=faults(rng) if wrong is None else wrong)
        asked = plans(rng) if asked is None else asked
        holder: list[World] = []

        async def main() -> None:
            await _Simulation(run, holder[0], asked, rng).go()

        world = World(loop, random.Random(rng.random()))
        holder.append(world)
        with virtual(loop, world, random.Random(rng.random())):
            try:
                loop.run(main())
            except Livelock as error:
                run.violations.append(f"the run does not end: {error}")
        run.violations += loop.errors
        run.virtual_s, run.trace = loop.time(), loop.trace
        return run
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(logging.NOTSET)


class _Simulation:
    def __init__(self, run: Run, world: World, asked: list[Plan], rng: random.Random) -> None:
        self.run, self.world, self.asked, self.rng = run, world, asked, rng
        self._long: list[asyncio.Task[Outcome]] = []

    async def go(self) -> None:
        world, loop = self.world, self.world.loop
        await world.start(prefills=self.rng.choice([1, 2]), decodes=self.rng.choice([2, 3]), ingresses=2)
        for fault in self.run.faults:
            arm(world, fault, self.run.happened.append)
        clients = [loop.create_task(self._client(plan)) for plan in self.asked]
        self._begin_long(2)
        self.run.outcomes = list(await asyncio.gather(*clients))
        for outcome in self.run.outcomes:
            self._check_outcome(outcome)
        await asyncio.sleep(max(DURATION_S - loop.time(), 0) + 0.01)
        await self._until(self._all_back, 30, "processes that were restarted are not back")
        await self._until(self._disagreements, CLIENT_TIMEOUT_S + 8.0, "leases, before clients restore them")
        await self._clients_place()
        await self._clients_leave_their_channels()
        await self._compare_leases()
        await self._until(self._nothing_left, _SETTLE_S, "left behind")
        before = self._tasks()
        self._check_drains()
        await self._check_answered()
        await self._prefill_is_sick()
        await self._an_engine_reads_late()
        await self._one_engine_is_sick()
        if world.keyed:
            await self._shares_are_fair()
            await self._limits_are_shared()
        what = "left behind by requests after the faults"
        await self._until(lambda: self._nothing_left() + self._more_tasks(before), _SETTLE_S, what)
        self._check_engines()
        await self._stop_ingresses()

    async def _client(self, plan: Plan) -> Outcome:
        await asyncio.sleep(plan.at_s)
        while not (there := self.world.live["ingress"]):
            await asyncio.sleep(0.1)
        return await ask(self.world, plan, there[int(self.rng.random() * len(there))])

    async def _until(self, wrong: Callable[[], list[str]], seconds: float, what: str) -> None:
        """Wait until `wrong` returns nothing; record a violation if that takes too long."""
        until = self.world.loop.time() + seconds
        while found := wrong():
            if self.world.loop.time() > until:
                self.run.violations.append(f"{what}: {'; '.join(found)}")
                return
            await asyncio.sleep(0.25)

    # -- what must be so ---------------------------------------------------------------------------

    def _check_outcome(self, outcome: Outcome) -> None:
        plan, say = outcome.plan, self.run.violations.append
        what = f"{'stream' if plan.stream else 'answer'} of {plan.prompt!r}"
        allowed = outcome.kind in ALLOWED
        if outcome.kind == "engine lost":
            allowed = plan.n > 1 or len(self.run.happened) >= LOST_AFTER
        if outcome.kind == "connection lost":
            allowed = outcome.ingress in self.world.killed or bool(plan.reads_s)
        if not allowed:
            say(f"{what}: {outcome.kind} after {outcome.seconds:.1f} s {outcome.detail}")
        late_s = 1.5 * plan.max_tokens * plan.token_s + QUEUE_S + WAIT_S + 4.0
        if self._engines_are_well and not plan.reads_s and outcome.seconds > late_s:
            say(f"{what}: it took {outcome.seconds:.1f} s, though only the router was away")
        if outcome.starts > 1 or outcome.ends > 1:
            say(f"{what}: {outcome.starts} starts, {outcome.ends} ends")
        if outcome.kind == "ok" and outcome.text != plan.reference:
            say(f"{what}: {outcome.text!r} in place of {plan.reference!r}")
        elif not plan.reference.startswith(outcome.text):
            say(f"{what}: {outcome.text!r} is no prefix of {plan.reference!r}")

    @property
    def _engines_are_well(self) -> bool:
        return all(fault.role == "router" for fault in self.run.faults)

    def _all_back(self) -> list[str]:
        world, found = self.world, []
        for role, number in world.wanted.items():
            there = len(world.known[role] if role in world.known else world.live[role])
            if there < number:
                found.append(f"{there} of {number} {role}")
        for process in world.live["ingress"]:
            if process.stopped:
                found.append(f"{process} is stopped")
                continue
            one = process.servable_object
            if one._client.router_away:
                found.append(f"{process} places by own load")
            if set(one._prefill.live) != set(world.known["prefill"]):
                found.append(f"{process} does not know all prefill replicas")
            if set(one._decode.live) != set(world.known["decode"]):
                found.append(f"{process} does not know all decode replicas")
        return found

    def _state(self) -> Any:
        router = self.world.router()
        assert router is not None
        return router.servable_object._state

    async def _clients_place(self) -> None:
        """Stop the router: clients lease by own load, also while they restore their leases.

        Their streams run while leases are compared.
        """
        world, loop = self.world, self.world.loop
        router = world.router()
        assert router is not None
        world.stop(router, _STOP_S)
        self._begin_long_at_each(0)
        await asyncio.sleep(_WAITED_S)
        for process in world.live["ingress"]:
            waits_s = [
                loop.time() - one.asked_s
                for one in self._client_of(process)._waiting._waiting.values()
                if one.placement.state in (State.SCORED, State.SENT)
            ]
            if max(waits_s, default=0.0) > _ANSWER_S:
                self.run.violations.append(f"requests at {process} wait for a router that is stopped")
        links = {process: self._client_of(process)._link for process in world.live["ingress"]}
        until = loop.time() + _STOP_S
        while links and loop.time() < until:
            await asyncio.sleep(0.0002)
            for process in [p for p, link in links.items() if link._channel is not None]:
                if not links.pop(process).connected:
                    for end in world.network.of(router):
                        if end.peer.process is process:
                            end.stall(_RESTORE_S)
        self._begin_long_at_each(1)
        await asyncio.sleep(_RESTORE_S)

    async def _clients_leave_their_channels(self) -> None:
        """Delay what clients send until they have given the channel up and restored their leases."""
        router = self.world.router()
        for process in self.world.live["ingress"]:
            for end in self.world.network.of(process):
                if end.peer.process is router:
                    end.stall(_LEFT_S)
        self._begin_long_at_each(2)
        await asyncio.sleep(_LEFT_S + 0.5)

    def _begin_long_at_each(self, number: int) -> None:
        for process in self.world.live["ingress"]:
            plan = Plan(0.0, "completions", f"{number} 3", _LONG, True, token_s=_LONG_S, leaves_s=500.0)
            self._long.append(self.world.loop.create_task(ask(self.world, plan, process)))

    @staticmethod
    def _client_of(process: Process) -> Any:
        return process.servable_object._client

    async def _compare_leases(self) -> None:
        """Check that router and clients agree on all leases while long streams run."""
        self._begin_long(0)
        await asyncio.sleep(0.7)
        await self._until(self._disagreements, CLIENT_TIMEOUT_S + 8.0, "leases")
        for task in self._long:
            task.cancel()

    def _begin_long(self, during: int) -> None:
        """Begin streams that run until cancelled: `during` among the faults, or one now if it is 0."""
        for number in range(during or 1):
            at_s = self.rng.uniform(0.8, DURATION_S) if during else 0.0
            plan = Plan(
                at_s, "completions", f"{number} 1", _LONG, stream=True, token_s=_LONG_S, leaves_s=500.0
            )
            self._long.append(self.world.loop.create_task(self._client(plan)))

    def _disagreements(self) -> list[str]:
        in_router = {name: placement.replica for name, placement in self._state().placer.running.items()}
        held: dict[str, str] = {}
        for process in self.world.live["ingress"]:
            placements = process.servable_object._client.leases
            held |= {n: p.replica for n, p in placements.items() if p.state is State.LEASED}
        if in_router == held and held:
            return []
        if all(task.done() for task in self._long):  # lost requests still fill prefill engines
            self._begin_long(0)
        return [f"the router has {in_router}, its clients have {held}"]

    def _nothing_left(self) -> list[str]:
        found = []

        def zero(what: str, number: Any) -> None:
            if number:
                found.append(f"{what}: {number}")

        world = self.world
        for process in world.live["ingress"]:
            one = process.servable_object
            zero(f"{process} in flight", one.gate.in_flight)
            zero(f"{process} waiting", one.gate.limiter.waiting)
            zero(f"{process} places of tenants", dict(one.gate.limiter._held))
            zero(f"{process} retries", world.retries_at_once - one.openai._path._retries._turns._value)
            zero(f"{process} placements", dict(one._client.leases))
            zero(f"{process} requests that wait for the router", list(one._client._waiting))
            zero(f"{process} open calls to the router", one._client._calls)
            zero(f"{process} progress to report", one._client._progress)
            zero(f"{process} ended streams to report", len(one._client._finished))
            zero(f"{process} own load", len(one._client._own._ledger))
            zero(f"{process} background", len(one.openai._path._background))
            zero(f"{process} prompts that wait for prefill", one.openai._path.prefill.queues.outstanding)
            zero(
                f"{process} open calls",
                sum(one._prefill.in_flight.values()) + sum(one._decode.in_flight.values()),
            )
        state = self._state()
        zero("router leases", dict(state.placer.running))
        zero("router queue", dict(state.placer.queue))
        sessions = world.router().servable_object._sessions  # type: ignore[union-attr]
        zero("router calls", dict(sessions.open))
        zero("router progress", sessions.tokens)
        zero("router clients too many", len(sessions.by_client) - world.wanted["ingress"])
        zero("router ledger", len(state.placer._ledger))
        zero("router prompt tokens to compute", int(abs(state.placer._ledger._prefill_tokens).sum()))
        known = state.placer.prefixes._caches.keys() | state.placer.prefixes._room.keys()
        zero("prefixes of workers that have gone", known - set(state.positions))
        for name, engine in world.engines.items():
            if engine.process.alive:
                zero(f"{name} blocks in use", engine.blocks.in_use)
                zero(f"{name} running", engine.running)
                zero(f"{name} calls", world.servers[name]._channel.in_flight)
                if isinstance(engine, PrefillEngine):
                    zero(f"{name} prompts held", engine.held)
        return found

    def _tasks(self) -> dict[Process, int]:
        live = [process for role in ROLES for process in self.world.live[role]]
        return {process: len(process.pending) for process in live}

    def _more_tasks(self, before: dict[Process, int]) -> list[str]:
        """Return the processes that have more tasks than when they were idle before."""
        return [
            f"{process} tasks: {number}, before {before[process]}"
            for process, number in self._tasks().items()
            if process in before and number > before[process]
        ]

    def _check_engines(self) -> None:
        """Check that no engine caches wrong blocks, and no lease expired while all could be reached."""
        say = self.run.violations.append
        for name, engine in self.world.engines.items():
            if isinstance(engine, PrefillEngine):
                if self._engines_are_well and engine.expired:
                    say(f"{name}: {engine.expired} prompts were neither read nor released")
            elif isinstance(engine, DecodeEngine):
                for prefix, block in engine.prefixes.items():
                    if prefix[-len(block) :] != block:
                        say(f"{name} keeps {block} as the end of {prefix}")

    def _check_drains(self) -> None:
        """Check that draining engines complete their streams."""
        counters = self._state().counters
        only_drains = self.run.faults and all(fault.kind == DRAIN for fault in self.run.faults)
        if only_drains and (counters["resumed"] or counters["streams_lost"]):
            self.run.violations.append(f"draining engines have lost streams: {dict(counters)}")

    async def _check_answered(self) -> None:
        """Check that a request after all faults is answered."""
        for process in self.world.live["ingress"]:
            plan = Plan(0.0, "completions", "1 2 3 4 5 6", 3, stream=False)
            await self._answered(plan, process, "a request after the faults")

    async def _answered(self, plan: Plan, process: Process, what: str) -> Outcome:
        outcome = await ask(self.world, plan, process)
        if outcome.kind != "ok" or outcome.text != plan.reference:
            self.run.violations.append(f"{what}: {outcome.kind} {outcome.detail}")
        return outcome

    async def _prefill_is_sick(self) -> None:
        """Check that a stream that loses its decode engine is resumed although all prefill engines fail."""
        world, process = self.world, self.world.live["ingress"][0]
        sick = [world.engines[name] for name in world.known["prefill"]]
        if not sick or len(world.known["decode"]) < 2:
            return
        plan = Plan(0.0, "completions", "3 1 4 1 5", 20, stream=True, token_s=0.1)
        what = "a stream that loses its engine while prefill is sick"
        asked = world.loop.create_task(self._answered(plan, process, what))
        placements = process.servable_object._client.leases

        def on() -> list[str]:
            return [p.replica for p in placements.values() if p.generated_tokens]

        await self._until(lambda: [] if on() or asked.done() else ["no token"], CALL_S, what)
        for engine in sick:
            engine.sick = True
        for end in world.network.of(process):
            if end.peer.process.name in on():
                world.network.cut(end, half=False)
        await asked
        for engine in sick:
            engine.sick = False
        await self._until(self._all_back, CALL_S, "engines whose connections were cut are not back")

    async def _an_engine_reads_late(self) -> None:
        """Disconnect a client whose request waits for decode blocks; the engine gets the cancel late."""
        world, process = self.world, self.world.live["ingress"][0]
        if world.whole:
            return
        memories = [world.engines[name].blocks for name in world.known["decode"]]
        taken = [
            await blocks.take(BLOCK_TOKENS * (len(blocks.content) - blocks.in_use)) for blocks in memories
        ]
        plan = Plan(0.0, "completions", "2 7 1 8 2 8 1 8 2", 4, stream=True, leaves_s=0.5)
        asked = world.loop.create_task(ask(world, plan, process))
        await asyncio.sleep(0.4)
        for end in world.network.of(process):
            if end.peer.process.name in world.known["decode"]:
                end.stall(1.0)
        await asked
        await asyncio.sleep(0.3)
        for blocks, held in zip(memories, taken, strict=True):
            blocks.give_back(held)
        await asyncio.sleep(1.0)

    async def _one_engine_is_sick(self) -> None:
        """Check that a failing engine soon gets no more calls, and that no answer is lost."""
        process, names = self.world.live["ingress"][0], list(self.world.known["decode"])
        one = process.servable_object
        if len(names) < 2 or one.openai._path._health._outliers._records:
            return
        sick = self.world.engines[names[0]]
        sick.sick = True
        for number in range(_SICK_REQUESTS):
            plan = Plan(0.0, "completions", f"{number} 2 3 4 5 6", 2, stream=bool(number % 2), token_s=0.005)
            await self._answered(plan, process, "a request while an engine is sick")
        sick.sick = False
        if sick.failed > FAILURES:
            self.run.violations.append(f"{sick.name} is sick and got {sick.failed} calls")

    async def _shares_are_fair(self) -> None:
        """Check that an idle tenant's request is admitted before those of a tenant that fills the limit."""
        process = self.world.live["ingress"][0]
        places = process.servable_object.gate.options.max_in_flight
        if places > _LOW_LIMIT:
            return
        loop = self.world.loop
        # A policy with a decode queue would let some requests overtake others.
        self._state().set_policy("round-robin", {})

        def plan(number: int, tenant: str) -> Plan:
            return Plan(0.0, "completions", f"{number} 7", 8, stream=True, token_s=0.05, tenant=tenant)

        many, few = TENANTS
        crowd = [loop.create_task(ask(self.world, plan(n, many), process)) for n in range(3 * places)]
        await asyncio.sleep(0.1)
        one = await ask(self.world, plan(3 * places, few), process)
        outcomes = await asyncio.gather(*crowd)
        before = sum(outcome.kind == "ok" and outcome.first_s < one.first_s for outcome in outcomes)
        if one.kind != "ok" or before > 2 * places:
            self.run.violations.append(
                f"an idle tenant: {one.kind} {one.detail} after {before} of another's requests"
            )

    async def _limits_are_shared(self) -> None:
        """Check that ingresses share what a tenant has used of its limit."""
        first, *others = self.world.live["ingress"]
        plan = Plan(0.0, "completions", "1 2", 1, stream=False, tenant=LIMITED)
        kinds = [(await ask(self.world, plan, first)).kind for _ in range(LIMIT + 1)]
        await asyncio.sleep(_EXCHANGE_S)
        kinds += [(await ask(self.world, plan, process)).kind for process in others]
        if kinds != LIMIT * ["ok"] + (1 + len(others)) * ["http 429"]:
            self.run.violations.append(f"a tenant with a limit of {LIMIT}: {kinds}")

    async def _stop_ingresses(self) -> None:
        """Check that no task is left in an ingress that has stopped."""
        there = list(self.world.live["ingress"])
        for process in there:
            process.run(self.world.loop.create_task, process.servable_object.stop())
        await asyncio.sleep(1.0)
        for process in there:
            if process.pending:
                self.run.violations.append(
                    f"tasks left in {process}: {[str(t.get_coro()) for t in process.pending]}"
                )
