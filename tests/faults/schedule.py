"""The requests and the faults that a seed draws, and how each kind of fault acts on a world.

A fault occurs at a time, or a number of steps after it. A step is one callback of an event loop, so with
steps a fault can occur at every point at which the serving code yields, however short the work around it is.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.clients import ClientScript
from tests.faults.fake_ray import TENANTS, table
from tests.faults.virtual_network import End
from tests.faults.virtual_time import Process
from tests.faults.world import POLICIES, ROLES, World

DURATION_S = 6.0  # requests and faults begin within this time
DRAIN = "drain"
_STEPS = 600  # maximum steps of a process before a fault


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: one of _KINDS.
        role: role of the process that it hits.
        at_s: earliest time at which it occurs.
        steps: number of further steps of its process after which it occurs; 0: at `at_s`.
        choice: 0 to 1, selects among the possible targets or values.
        seconds: duration, of faults that have one.
    """

    kind: str
    role: str
    at_s: float
    steps: int
    choice: float
    seconds: float

    def __str__(self) -> str:
        when = f"{self.at_s:.3f} s" + (f" + {self.steps} steps" if self.steps else "")
        return f"{when}: {self.kind} {self.role} ({self.choice:.2f}, {self.seconds:.2f} s)"


def draw_scripts(rng: random.Random) -> list[ClientScript]:
    """Draw the requests of one run. Some share a prefix, disconnect early or read slowly."""
    shared_prefixes = [_words(rng, 8) for _ in range(2)]
    scripts = []
    for _ in range(rng.randint(6, 16)):
        prompt = " ".join([rng.choice([*shared_prefixes, _words(rng, 1)]), _words(rng, rng.randint(1, 12))])
        slow = rng.random() < 0.1
        script = ClientScript(
            at_s=rng.uniform(0.8, DURATION_S),
            method=rng.choice(["chat", "completions"]),
            prompt=prompt,
            max_tokens=320 if slow else rng.choice([1, 2, 5, 12, 30, 60]),
            stream=slow or rng.random() < 0.6,
            n=2 if rng.random() < 0.08 else 1,
            leaves_s=rng.choice([rng.uniform(0, 0.04), rng.uniform(0, 1)]) if rng.random() < 0.3 else None,
            reads_s=rng.choice([0.3, 8.0]) if slow else 0.0,
            token_s=0.02 if slow else rng.choice([0.005, 0.02, 0.1]),
            tenant=rng.choice(TENANTS),
        )
        scripts.append(script)
        if rng.random() < 0.1:
            scripts.append(script)  # the client sends it twice
    return sorted(scripts, key=lambda script: script.at_s)


def _words(rng: random.Random, number: int) -> str:
    return " ".join(str(rng.randrange(1, 9973)) for _ in range(number))


def draw_faults(rng: random.Random) -> list[Fault]:
    """Draw zero to eight faults. In some runs all are of one role, and in a few all are drains."""
    faults = []
    roles = rng.choice([ROLES, ROLES, ROLES, ("router",), ("decode",), ("ingress",), ("prefill",)])
    kinds = [DRAIN] if rng.random() < 0.05 else list(_KINDS)
    roles = ROLES if kinds == [DRAIN] else roles
    possible = [(kind, role) for kind in kinds for role in _KINDS[kind][0] if role in roles]
    for _ in range(rng.choice([0, 1, 2, 3, 4, 5, 6, 8])):
        kind, role = rng.choice(possible)
        at_s = rng.uniform(0.5, DURATION_S)
        steps = rng.randrange(1, _STEPS) if rng.random() < 0.5 else 0
        choice, seconds = rng.random(), rng.choice([rng.uniform(0.05, 1.0), rng.uniform(1.0, 4.0)])
        faults.append(Fault(kind, role, at_s, steps, choice, seconds))
    return faults


def schedule_fault(world: World, fault: Fault, report: Callable[[str], None]) -> None:
    """Let the fault occur in the world when it is due.

    It does not occur if its role has no live process then, or if its steps end after DURATION_S.

    Args:
        report: called with a line about the fault when it occurs.
    """

    def choose_process() -> None:
        live = world.live[fault.role]
        if not live:
            return
        process = live[int(fault.choice * len(live))]

        def inject() -> None:
            if process.alive and world.loop.time() <= DURATION_S:
                report(f"{world.loop.time():.4f} s: {fault.kind} {process.name} ({fault.seconds:.2f} s)")
                _KINDS[fault.kind][1](world, process, fault)

        if fault.steps:
            process.trap(fault.steps, inject)
        else:
            inject()

    world.loop.call_later(fault.at_s, choose_process)


# -- kinds ---------------------------------------------------------------------------------------


def _on_connection(act: Callable[[World, End, Fault], None]) -> Callable[[World, Process, Fault], None]:
    """Return a fault that acts on one of the process's connections, if it has any."""

    def act_on_one(world: World, process: Process, fault: Fault) -> None:
        ends = world.network.ends_of(process)
        if ends:
            act(world, ends[int(fault.choice * 997) % len(ends)], fault)

    return act_on_one


def _stop_gcs(world: World, process: Process, fault: Fault) -> None:
    world.gcs_until_s = world.loop.time() + 2 * fault.seconds


def _state(process: Process) -> Any:
    return process.servable_object._state


def _change_policy(world: World, process: Process, fault: Fault) -> None:
    name = POLICIES[int(fault.choice * len(POLICIES))]
    process.soon(lambda: _state(process).live_settings.set_policy(name, world.parameters(name)))


def _swap_table(world: World, process: Process, fault: Fault) -> None:
    file = table(2 + int(fault.choice * 3)).to_bytes()
    process.soon(lambda: _state(process).live_settings.swap_table(file))


def _redeploy(world: World, process: Process, fault: Fault) -> None:
    """Redeploy the router with other options: its actor resets its state and keeps its connections."""
    settings = world.settings.model_copy(update={"seed": int(1000 * fault.choice)})
    process.soon(lambda: world.loop.create_task(process.servable_object.configure(settings)))


_ENGINES = ("prefill", "decode")
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[World, Process, Fault], None]]] = {
    "kill": (ROLES, lambda world, process, fault: world.kill(process)),
    "lose the machine of": (_ENGINES, lambda world, process, fault: world.kill(process, silently=True)),
    "stop": (ROLES, lambda world, process, fault: world.stop(process, fault.seconds)),
    "stall a connection of": (ROLES, _on_connection(lambda world, end, fault: end.stall(fault.seconds))),
    "cut a connection of": (ROLES, _on_connection(lambda world, end, _: world.network.cut(end, half=False))),
    "cut one side of a connection of": (
        ROLES,
        _on_connection(lambda world, end, _: world.network.cut(end, half=True)),
    ),
    DRAIN: (_ENGINES, lambda world, process, fault: world.drain(process)),
    "stop GCS for": (("router",), _stop_gcs),
    "another policy in": (("router",), _change_policy),
    "another table in": (("router",), _swap_table),
    "other options of": (("router",), _redeploy),
}
