"""Runs of the serving code on virtual time: one seed is one run, from its start to the last check.

The seed decides the settings of the world, the requests, the faults, all delays, and which process runs
next. So a failing seed fails again, in any process and on any machine. `world` says what is real and what is
fake.

A run has these phases (`_Simulation.run_phases`):

1. Clients send the requests of the seed while its faults happen. Each answer must be complete and equal to
   the reference, or end with an error that is allowed (`ALLOWED`, `LOST_AFTER`, `REFUSED_AFTER`).
2. When all processes are back, long streams run, and the router must have exactly the leases of its clients,
   also after the router has stopped for a while and after connections have been replaced.
3. When the streams have ended, no process may hold leases, requests, KV blocks or anything else of them.
4. The run provokes cases that chance seldom produces, such as a decode engine that fails every call.
5. The application must be as idle as before, no engine may have cached a wrong block, and ingresses that stop
   leave no task.

Whatever does not hold is a sentence in `Run.violations`; a run without violations passes.
"""

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from eldr_serve.fleet.outliers import FAILURES
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.scheduling import State
from tests.faults.clients import Outcome, Plan, ask
from tests.faults.fake_ray import LIMIT, LIMITED, TENANTS
from tests.faults.greedy_model import BLOCK_TOKENS
from tests.faults.invariants import (
    client_of,
    count_tasks,
    engine_violations,
    find_added_tasks,
    find_leftovers,
    leases_of_clients,
    leases_of_router,
    router_state,
    unready_processes,
)
from tests.faults.schedule import DRAIN, DURATION_S, Fault, draw_faults, draw_plans, schedule_fault
from tests.faults.virtual_network import Network
from tests.faults.virtual_time import LivelockError, Process, VirtualLoop
from tests.faults.world import (
    CALL_S,
    INGRESS_TIMEOUT_S,
    LEASE_S,
    QUEUE_S,
    WAIT_S,
    World,
    patch_serving_code,
)

ALLOWED = ("ok", "left", "http 503", "http 429")  # outcomes that a client may always see
# A request is refused because it may have killed engines only after this number of faults.
REFUSED_AFTER = PathOptions().max_lost_engines
# A stream may be lost only after this number of faults, since the service resumes an answer once.
LOST_AFTER = 2
_LONG, _LONG_S = 100, 2.0  # tokens and seconds per token of the streams that run while leases are compared
_STOP_S = 2.0  # duration of the router's stop
_WAITED_S = 1.6  # time after the stop at which clients no longer wait for the router
_RECONNECT_S = 2.0  # longer than a client needs to connect again
_ANSWER_S = 1.1  # maximum time for which a request waits for an answer of the router
_RESTORE_S = 0.5  # time for which clients have sent their leases but get no reply
_SICK_REQUESTS = 12  # requests while an engine is sick
_LOW_LIMIT = 6  # in-flight limit of an ingress, so low that the crowd reaches it
_AGREE_S = INGRESS_TIMEOUT_S + 8.0  # within this time router and clients agree on all leases
_EXCHANGE_S = 3.0  # within this time ingresses exchange what tenants have used
_SETTLE_S = LEASE_S + INGRESS_TIMEOUT_S + 12.0  # within this time an idle application holds nothing


@dataclass
class Run:
    """The results of a seed.

    Attributes:
        outcomes: what the client of each request saw.
        faults: the faults of the seed.
        happened: a line for each fault that was injected; some find no process to act on.
        violations: a sentence for each property that did not hold.
        virtual_s: length of the run in virtual time.
        trace: a hash of all steps; equal for equal runs.
    """

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


def run_seed(seed: int, *, requests: list[Plan] | None = None, injected: list[Fault] | None = None) -> Run:
    """Run one seed; the same seed gives the same run.

    Args:
        requests: requests to send instead of those that the seed draws.
        injected: faults to inject instead of those that the seed draws. The run then ends before the cases
            that it would provoke.
    """
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.disable()  # so that objects are finalized at the same moments in each run
    try:
        rng = random.Random(seed)
        loop = VirtualLoop(random.Random(rng.random()))  # type: ignore[abstract]
        loop.network = Network(loop, random.Random(rng.random()))
        run = Run(seed, faults=draw_faults(rng) if injected is None else injected)
        requests = draw_plans(rng) if requests is None else requests
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
    """One run; its methods add to the violations of `run`."""

    def __init__(self, run: Run, world: World, requests: list[Plan], rng: random.Random) -> None:
        self.run, self.world, self.requests, self.rng = run, world, requests, rng
        self._long: list[asyncio.Task[Outcome]] = []  # streams that run while leases are compared

    async def run_phases(self, provokes: bool) -> None:
        """Run the phases of the module's docstring.

        Args:
            provokes: whether to provoke the cases that chance seldom produces.
        """
        world, loop = self.world, self.world.loop
        await world.start(prefills=self.rng.choice([1, 2]), decodes=self.rng.choice([2, 3]), ingresses=2)
        for fault in self.run.faults:
            schedule_fault(world, fault, self.run.happened.append)
        clients = [loop.create_task(self._send_when_due(plan)) for plan in self.requests]
        self._begin_long(2)
        self.run.outcomes = list(await asyncio.gather(*clients))
        for outcome in self.run.outcomes:
            self._check_outcome(outcome)
        await asyncio.sleep(max(DURATION_S - loop.time(), 0) + 0.01)
        what = "processes that were restarted are not back"
        await self._wait_until_none(lambda: unready_processes(world), 30, what)
        await self._wait_until_none(self._disagreements, _AGREE_S, "leases, before clients restore them")
        if provokes:
            await self._clients_place_without_router()
            # Compare now: clients restore all leases after they have left their channels.
            await self._wait_until_none(self._disagreements, _AGREE_S, "leases, after local fallback")
            await self._clients_leave_their_channels()
        await self._compare_leases()
        await self._wait_until_none(lambda: find_leftovers(world), _SETTLE_S, "left behind")
        tasks_before = count_tasks(world)
        self._check_drains()
        await self._check_answered()
        if provokes:
            await self._provoke_cases()
        what = "left behind by requests after the faults"
        await self._wait_until_none(
            lambda: find_leftovers(world) + find_added_tasks(world, tasks_before), _SETTLE_S, what
        )
        self.run.violations += engine_violations(world, engines_well=self._only_router_faults)
        await self._stop_ingresses()

    async def _provoke_cases(self) -> None:
        """Check cases that chance seldom produces."""
        await self._resume_while_prefill_fails()
        await self._cancel_arrives_late()
        await self._call_a_failing_engine()
        if self.world.has_keys:
            await self._check_fair_shares()
            await self._check_shared_limits()

    async def _send_when_due(self, plan: Plan) -> Outcome:
        """Send the request at its time to a random ingress; wait while there is none."""
        await asyncio.sleep(plan.at_s)
        while not (ingresses := self.world.live["ingress"]):
            await asyncio.sleep(0.1)
        return await ask(self.world, plan, ingresses[int(self.rng.random() * len(ingresses))])

    async def _wait_until_none(
        self, find_problems: Callable[[], list[str]], seconds: float, what: str
    ) -> None:
        """Wait until `find_problems` returns none; record a violation if that takes too long."""
        until = self.world.loop.time() + seconds
        while problems := find_problems():
            if self.world.loop.time() > until:
                self.run.violations.append(f"{what}: {'; '.join(problems)}")
                return
            await asyncio.sleep(0.25)

    def _check_outcome(self, outcome: Outcome) -> None:
        """Check that a client saw one whole and right answer, or an error that the faults explain."""
        plan, say = outcome.plan, self.run.violations.append
        what = f"{'stream' if plan.stream else 'answer'} of {plan.prompt!r}"
        allowed = outcome.kind in ALLOWED
        if outcome.kind == "engine lost":
            allowed = plan.n > 1 or len(self.run.happened) >= LOST_AFTER
        if outcome.kind == "http 500":
            allowed = "engines were lost" in outcome.detail and len(self.run.happened) >= REFUSED_AFTER
        if outcome.kind == "connection lost":
            allowed = outcome.ingress in self.world.killed or bool(plan.reads_s)
        if not allowed:
            say(f"{what}: {outcome.kind} after {outcome.seconds:.1f} s {outcome.detail}")
        late_s = 1.5 * plan.max_tokens * plan.token_s + QUEUE_S + WAIT_S + 4.0
        if self._only_router_faults and not plan.reads_s and outcome.seconds > late_s:
            say(f"{what}: it took {outcome.seconds:.1f} s, though only the router had faults")
        if outcome.starts > 1 or outcome.ends > 1:
            say(f"{what}: {outcome.starts} starts, {outcome.ends} ends")
        if outcome.kind == "ok" and outcome.text != plan.reference:
            say(f"{what}: {outcome.text!r} in place of {plan.reference!r}")
        elif not plan.reference.startswith(outcome.text):
            say(f"{what}: {outcome.text!r} is no prefix of {plan.reference!r}")

    @property
    def _only_router_faults(self) -> bool:
        """Return whether this run injects faults into the router alone."""
        return all(fault.role == "router" for fault in self.run.faults)

    async def _clients_place_without_router(self) -> None:
        """Stop the router, so that ingresses place requests by local fallback.

        Ingresses place more requests while they restore their leases. The streams of all these requests
        still run when leases are compared.
        """
        world, loop = self.world, self.world.loop
        router = world.router()
        assert router is not None
        world.stop(router, _STOP_S)
        self._begin_long_at_each(0)
        await asyncio.sleep(_WAITED_S)
        for process in world.live["ingress"]:
            waits_s = [
                loop.time() - one.unanswered_since_s
                for one in client_of(process)._waiting._waiting.values()
                if one.lease.state in (State.UNSENT, State.SENT)
            ]
            if max(waits_s, default=0.0) > _ANSWER_S:
                self.run.violations.append(f"requests at {process} wait for a router that is stopped")
        links = {process: client_of(process)._link for process in world.live["ingress"]}
        until = loop.time() + _STOP_S
        while links and loop.time() < until:
            await asyncio.sleep(0.0002)
            for process in [p for p, link in links.items() if link._channel is not None]:
                if not links.pop(process).connected:
                    for end in world.network.ends_of(router):
                        if end.peer.process is process:
                            end.stall(_RESTORE_S)
        self._begin_long_at_each(1)
        await asyncio.sleep(_RESTORE_S)

    async def _clients_leave_their_channels(self) -> None:
        """Delay messages to the router until ingresses have left their channel and restored their leases."""
        router = self.world.router()
        for process in self.world.live["ingress"]:
            for end in self.world.network.ends_of(process):
                if end.peer.process is router:
                    end.stall(_RECONNECT_S)
        self._begin_long_at_each(2)
        await asyncio.sleep(_RECONNECT_S + 0.5)

    def _begin_long_at_each(self, number: int) -> None:
        """Begin a long stream at each ingress; `number` distinguishes the prompts."""
        for process in self.world.live["ingress"]:
            plan = Plan(0.0, "completions", f"{number} 3", _LONG, True, token_s=_LONG_S, leaves_s=500.0)
            self._long.append(self.world.loop.create_task(ask(self.world, plan, process)))

    async def _compare_leases(self) -> None:
        """Check that router and clients agree on all leases while long streams run."""
        self._begin_long(0)
        await asyncio.sleep(0.7)
        await self._wait_until_none(self._disagreements, _AGREE_S, "leases")
        for task in self._long:
            task.cancel()

    def _begin_long(self, during: int) -> None:
        """Begin long streams, which run until they are cancelled.

        Args:
            during: number of streams that begin at random times among the faults; 0: one begins now.
        """
        for number in range(during or 1):
            at_s = self.rng.uniform(0.8, DURATION_S) if during else 0.0
            plan = Plan(
                at_s, "completions", f"{number} 1", _LONG, stream=True, token_s=_LONG_S, leaves_s=500.0
            )
            self._long.append(self.world.loop.create_task(self._send_when_due(plan)))

    def _disagreements(self) -> list[str]:
        """Return a sentence if the router's leases are not those of its clients, or there are none.

        If all long streams have ended, begin another one, so that there are leases to compare.
        """
        of_router, of_clients = leases_of_router(self.world), leases_of_clients(self.world)
        if of_router == of_clients and of_clients:
            return []
        if all(task.done() for task in self._long):  # lost requests still fill prefill engines
            self._begin_long(0)
        return [f"the router has {of_router}, its clients have {of_clients}"]

    def _check_drains(self) -> None:
        """Check that draining engines complete their streams."""
        counters = router_state(self.world).counters
        only_drains = self.run.faults and all(fault.kind == DRAIN for fault in self.run.faults)
        if only_drains and (counters["resumed"] or counters["streams_lost"]):
            self.run.violations.append(f"draining engines have lost streams: {dict(counters)}")

    async def _check_answered(self) -> None:
        """Check that a request after all faults is answered."""
        for process in self.world.live["ingress"]:
            plan = Plan(0.0, "completions", "1 2 3 4 5 6", 3, stream=False)
            await self._require_answer(plan, process, "a request after the faults")

    async def _require_answer(self, plan: Plan, process: Process, what: str) -> Outcome:
        """Send a request, which must get the right answer."""
        outcome = await ask(self.world, plan, process)
        if outcome.kind != "ok" or outcome.text != plan.reference:
            self.run.violations.append(f"{what}: {outcome.kind} {outcome.detail}")
        return outcome

    async def _resume_while_prefill_fails(self) -> None:
        """Check that a stream that loses its decode engine is resumed although all prefill engines fail."""
        world, process = self.world, self.world.live["ingress"][0]
        sick = [world.engines[name] for name in world.replicas["prefill"]]
        if not sick or len(world.replicas["decode"]) < 2:
            return
        plan = Plan(0.0, "completions", "3 1 4 1 5", 20, stream=True, token_s=0.1)
        what = "a stream that loses its engine while prefill is sick"
        request = world.loop.create_task(self._require_answer(plan, process, what))
        leases = client_of(process).leases

        def decoding_workers() -> list[str]:
            return [lease.worker for lease in leases.values() if lease.generated_tokens]

        await self._wait_until_none(
            lambda: [] if decoding_workers() or request.done() else ["no token"], CALL_S, what
        )
        for engine in sick:
            engine.sick = True
        for end in world.network.ends_of(process):
            if end.peer.process.name in decoding_workers():
                world.network.cut(end, half=False)
        await request
        for engine in sick:
            engine.sick = False
        what = "engines whose connections were cut are not back"
        await self._wait_until_none(lambda: unready_processes(world), CALL_S, what)

    async def _cancel_arrives_late(self) -> None:
        """Disconnect a client whose request waits for decode blocks; the engine gets the cancel late."""
        world, process = self.world, self.world.live["ingress"][0]
        if world.has_whole_engines:
            return
        memories = [world.engines[name].blocks for name in world.replicas["decode"]]
        all_free_blocks = [
            await blocks.take(BLOCK_TOKENS * (len(blocks.content) - blocks.in_use)) for blocks in memories
        ]
        plan = Plan(0.0, "completions", "2 7 1 8 2 8 1 8 2", 4, stream=True, leaves_s=0.5)
        request = world.loop.create_task(ask(world, plan, process))
        await asyncio.sleep(0.4)
        for end in world.network.ends_of(process):
            if end.peer.process.name in world.replicas["decode"]:
                end.stall(1.0)
        await request
        await asyncio.sleep(0.3)
        for blocks, taken_blocks in zip(memories, all_free_blocks, strict=True):
            blocks.give_back(taken_blocks)
        await asyncio.sleep(1.0)

    async def _call_a_failing_engine(self) -> None:
        """Check that a failing engine soon gets no more calls, and that no answer is lost."""
        process, names = self.world.live["ingress"][0], list(self.world.replicas["decode"])
        failed_before = process.servable_object.openai._path._services.outliers._records.keys()
        if len(names) < 2 or not failed_before.isdisjoint(names):
            return
        failing = self.world.engines[names[0]]
        failing.sick = True
        for number in range(_SICK_REQUESTS):
            plan = Plan(0.0, "completions", f"{number} 2 3 4 5 6", 2, stream=bool(number % 2), token_s=0.005)
            await self._require_answer(plan, process, "a request while an engine is sick")
        failing.sick = False
        if failing.failed > FAILURES:
            self.run.violations.append(f"{failing.name} is sick and got {failing.failed} calls")

    async def _check_fair_shares(self) -> None:
        """Check that an idle tenant's request is admitted before those of a tenant that fills the limit."""
        process = self.world.live["ingress"][0]
        places = process.servable_object.gate.options.max_in_flight
        if places > _LOW_LIMIT:
            return
        loop = self.world.loop
        # A policy with a decode queue would let some requests overtake others.
        router_state(self.world).live_settings.set_policy("round-robin", {})

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

    async def _check_shared_limits(self) -> None:
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
        ingresses = list(self.world.live["ingress"])
        for process in ingresses:
            process.run(self.world.loop.create_task, process.servable_object.stop())
        await asyncio.sleep(1.0)
        for process in ingresses:
            if process.pending:
                self.run.violations.append(
                    f"tasks left in {process}: {[str(t.get_coro()) for t in process.pending]}"
                )
