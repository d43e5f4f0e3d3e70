"""The record of a simulated run, and the checks that add violations to it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from eldr_serve.pipeline.path_options import PathOptions
from tests.faults.clients import ClientScript, RequestOutcome, ask
from tests.faults.schedule import Fault
from tests.faults.virtual_time import Process
from tests.faults.world import QUEUE_S, WAIT_S, World

ALLOWED = ("ok", "left", "http 503", "http 429")  # outcomes that a client may always see
# A request is refused because it may have killed engines only after this number of faults.
REFUSED_AFTER = PathOptions().max_lost_engines
# A stream may be lost only after this number of faults, since the service resumes an answer once.
LOST_AFTER = 2


@dataclass
class SimulatedRun:
    """The results of a seed.

    Attributes:
        outcomes: what the client of each request saw.
        faults: the faults of the seed.
        events: a line for each fault that was injected. Some faults find no process to act on.
        violations: a sentence for each property that did not hold.
        virtual_s: length of the run in virtual time.
        trace: a hash of all steps, equal for equal runs.
    """

    seed: int
    outcomes: list[RequestOutcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    trace: int = 0

    @property
    def kinds(self) -> Counter[str]:
        """Return the number of requests by outcome."""
        return Counter(outcome.kind for outcome in self.outcomes)


class Checks:
    """Checks of one run. Each adds what does not hold to the violations of `run`."""

    def __init__(self, run: SimulatedRun, world: World) -> None:
        self.run, self.world = run, world

    @property
    def has_only_router_faults(self) -> bool:
        """Return whether this run injects faults into the router alone."""
        return all(fault.role == "router" for fault in self.run.faults)

    async def wait_until_none(
        self, find_problems: Callable[[], list[str]], seconds: float, what: str
    ) -> None:
        """Wait until `find_problems` returns none. Record a violation if that takes too long."""
        until = self.world.loop.time() + seconds
        while problems := find_problems():
            if self.world.loop.time() > until:
                self.run.violations.append(f"{what}: {'; '.join(problems)}")
                return
            await asyncio.sleep(0.25)

    def check_outcome(self, outcome: RequestOutcome) -> None:
        """Check that a client saw one complete and correct answer, or an error that the faults explain."""
        script, report = outcome.script, self.run.violations.append
        what = f"{'stream' if script.stream else 'answer'} of {script.prompt!r}"
        is_allowed = outcome.kind in ALLOWED
        if outcome.kind == "engine lost":
            is_allowed = script.n > 1 or len(self.run.events) >= LOST_AFTER
        if outcome.kind == "http 500":
            is_allowed = "engines were lost" in outcome.detail and len(self.run.events) >= REFUSED_AFTER
        if outcome.kind == "connection lost":
            is_allowed = outcome.ingress in self.world.killed or bool(script.reads_s)
        if not is_allowed:
            report(f"{what}: {outcome.kind} after {outcome.seconds:.1f} s {outcome.detail}")
        late_s = 1.5 * script.max_tokens * script.token_s + QUEUE_S + WAIT_S + 4.0
        if self.has_only_router_faults and not script.reads_s and outcome.seconds > late_s:
            report(f"{what}: it took {outcome.seconds:.1f} s, though only the router had faults")
        if outcome.starts > 1 or outcome.ends > 1:
            report(f"{what}: {outcome.starts} starts, {outcome.ends} ends")
        if outcome.kind == "ok" and outcome.text != script.reference:
            report(f"{what}: {outcome.text!r} in place of {script.reference!r}")
        elif not script.reference.startswith(outcome.text):
            report(f"{what}: {outcome.text!r} is no prefix of {script.reference!r}")

    async def require_answer(self, script: ClientScript, process: Process, what: str) -> RequestOutcome:
        """Send a request, which must get the right answer."""
        outcome = await ask(self.world, script, process)
        if outcome.kind != "ok" or outcome.text != script.reference:
            self.run.violations.append(f"{what}: {outcome.kind} {outcome.detail}")
        return outcome
