"""Cases that chance seldom produces: a simulated run provokes them after its faults."""

import asyncio

from eldr_serve.fleet.outliers import FAILURES
from tests.faults.checks import Checks
from tests.faults.clients import ClientScript, ask
from tests.faults.fake_ray import LIMIT, LIMITED, TENANTS
from tests.faults.greedy_model import BLOCK_TOKENS
from tests.faults.invariants import failed_replicas, router_client_of, router_state, unready_processes
from tests.faults.world import CALL_S

_SICK_REQUESTS = 12  # requests while an engine is sick
_LOW_LIMIT = 6  # in-flight limit of an ingress, so low that the crowd reaches it
_EXCHANGE_S = 3.0  # within this time ingresses exchange what tenants have used


class ProvokedCases:
    """The cases of one run, which require that all processes are back."""

    def __init__(self, checks: Checks) -> None:
        self._checks, self._world = checks, checks.world

    async def provoke_all(self) -> None:
        """Provoke each case in turn, and check that the service handles it."""
        await self._resume_while_prefill_fails()
        await self._cancel_arrives_late()
        await self._call_a_failing_engine()
        if self._world.has_keys:
            await self._check_fair_shares()
            await self._check_shared_limits()

    async def _resume_while_prefill_fails(self) -> None:
        """Check that a stream that loses its decode engine is resumed although all prefill engines fail."""
        world, process = self._world, self._world.live["ingress"][0]
        sick = [world.engines[name] for name in world.replicas["prefill"]]
        if not sick or len(world.replicas["decode"]) < 2:
            return
        script = ClientScript(0.0, "completions", "3 1 4 1 5", 20, stream=True, token_s=0.1)
        what = "a stream that loses its engine while prefill is sick"
        request = world.loop.create_task(self._checks.require_answer(script, process, what))
        leases = router_client_of(process).leases

        def decoding_workers() -> list[str]:
            return [lease.worker for lease in leases.values() if lease.generated_tokens]

        await self._checks.wait_until_none(
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
        await self._checks.wait_until_none(lambda: unready_processes(world), CALL_S, what)

    async def _cancel_arrives_late(self) -> None:
        """Disconnect a client whose request waits for decode blocks. The engine gets the cancel late."""
        world, process = self._world, self._world.live["ingress"][0]
        if world.has_whole_replicas:
            return
        memories = [world.engines[name].blocks for name in world.replicas["decode"]]
        all_free_blocks = [
            await blocks.take(BLOCK_TOKENS * (len(blocks.content) - blocks.in_use)) for blocks in memories
        ]
        script = ClientScript(0.0, "completions", "2 7 1 8 2 8 1 8 2", 4, stream=True, leaves_s=0.5)
        request = world.loop.create_task(ask(world, script, process))
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
        process, names = self._world.live["ingress"][0], list(self._world.replicas["decode"])
        if len(names) < 2 or not failed_replicas(process).isdisjoint(names):
            return
        failing = self._world.engines[names[0]]
        failing.sick = True
        for number in range(_SICK_REQUESTS):
            script = ClientScript(
                0.0, "completions", f"{number} 2 3 4 5 6", 2, stream=bool(number % 2), token_s=0.005
            )
            await self._checks.require_answer(script, process, "a request while an engine is sick")
        failing.sick = False
        if failing.failed > FAILURES:
            self._checks.run.violations.append(f"{failing.name} is sick and got {failing.failed} calls")

    async def _check_fair_shares(self) -> None:
        """Check that an idle tenant's request is admitted before those of a tenant that fills the limit."""
        process = self._world.live["ingress"][0]
        places = process.servable_object.gate.options.max_in_flight
        if places > _LOW_LIMIT:
            return
        loop = self._world.loop
        # A policy with a decode queue would let some requests overtake others.
        router_state(self._world).live_settings.set_policy("round-robin", {})

        def make_script(number: int, tenant: str) -> ClientScript:
            return ClientScript(
                0.0, "completions", f"{number} 7", 8, stream=True, token_s=0.05, tenant=tenant
            )

        busy, idle = TENANTS
        crowd = [loop.create_task(ask(self._world, make_script(n, busy), process)) for n in range(3 * places)]
        await asyncio.sleep(0.1)
        served = await ask(self._world, make_script(3 * places, idle), process)
        outcomes = await asyncio.gather(*crowd)
        before = sum(outcome.kind == "ok" and outcome.first_s < served.first_s for outcome in outcomes)
        if served.kind != "ok" or before > 2 * places:
            self._checks.run.violations.append(
                f"an idle tenant: {served.kind} {served.detail} after {before} of another's requests"
            )

    async def _check_shared_limits(self) -> None:
        """Check that ingresses share what a tenant has used of its limit."""
        first, *others = self._world.live["ingress"]
        script = ClientScript(0.0, "completions", "1 2", 1, stream=False, tenant=LIMITED)
        kinds = [(await ask(self._world, script, first)).kind for _ in range(LIMIT + 1)]
        await asyncio.sleep(_EXCHANGE_S)
        kinds += [(await ask(self._world, script, process)).kind for process in others]
        if kinds != LIMIT * ["ok"] + (1 + len(others)) * ["http 429"]:
            self._checks.run.violations.append(f"a tenant with a limit of {LIMIT}: {kinds}")
