"""What must hold in a world once its faults are over: functions that return a text for each violation."""

from typing import Any

from eldr_serve.scheduling import State
from tests.faults.fake_engines import DecodeEngine, PrefillEngine
from tests.faults.virtual_time import Process
from tests.faults.world import ROLES, World


def client_of(ingress: Process) -> Any:
    return ingress.servable_object._client


def router_state(world: World) -> Any:
    router = world.router()
    assert router is not None
    return router.servable_object._state


def leases_of_router(world: World) -> dict[str, str]:
    """Return the worker of each request by the router."""
    return {name: lease.worker for name, lease in router_state(world).placer.running.items()}


def leases_of_clients(world: World) -> dict[str, str]:
    """Return the worker of each request by the ingresses."""
    return {
        name: lease.worker
        for process in world.live["ingress"]
        for name, lease in client_of(process).leases.items()
        if lease.state is State.LEASED
    }


def not_back(world: World) -> list[str]:
    """Return processes that are missing, stopped, or not connected to all others."""
    found = []
    for role, wanted in world.wanted.items():
        number = len(world.known[role] if role in world.known else world.live[role])
        if number < wanted:
            found.append(f"{number} of {wanted} {role}")
    for process in world.live["ingress"]:
        if process.stopped:
            found.append(f"{process} is stopped")
            continue
        ingress = process.servable_object
        if ingress._client.router_unreachable:
            found.append(f"{process} places by local fallback")
        if set(ingress._prefill.live) != set(world.known["prefill"]):
            found.append(f"{process} does not know all prefill replicas")
        if set(ingress._decode.live) != set(world.known["decode"]):
            found.append(f"{process} does not know all decode replicas")
    return found


def left_behind(world: World) -> list[str]:
    """Return what an idle world still holds."""
    held: dict[str, Any] = {}
    for process in world.live["ingress"]:
        ingress = process.servable_object
        path = ingress.openai._path
        held |= {
            f"{process} in flight": ingress.gate.in_flight,
            f"{process} waiting": ingress.gate.limiter.waiting,
            f"{process} places of tenants": dict(ingress.gate.limiter._held),
            f"{process} retries": world.retries_at_once - path._services.retries._permits._value,
            f"{process} moves": set(path._services.moves._moving),
            f"{process} placements": dict(ingress._client.leases),
            f"{process} requests that wait for the router": list(ingress._client._waiting),
            f"{process} open calls to the router": ingress._client._calls,
            f"{process} progress to report": ingress._client._progress,
            f"{process} ended streams to report": len(ingress._client._ended_streams),
            f"{process} local fallback": len(ingress._client._fallback._ledger),
            f"{process} background": path.kv_release.num_pending,
            f"{process} prompts that wait for prefill": path.admission.queues.outstanding,
            f"{process} open calls": sum(ingress._prefill.in_flight.values())
            + sum(ingress._decode.in_flight.values()),
        }
    state = router_state(world)
    sessions = world.router().servable_object._sessions  # type: ignore[union-attr]
    cached = state.placer.prefixes._caches.keys() | state.placer.prefixes._capacity.keys()
    held |= {
        "router leases": dict(state.placer.running),
        "router queue": dict(state.placer.queue),
        "router calls": dict(sessions.open),
        "router progress": sessions.progress,
        "router clients too many": len(sessions.by_ingress) - world.wanted["ingress"],
        "router ledger": len(state.placer._ledger),
        "router prompt tokens to compute": int(abs(state.placer._ledger._prefill_tokens).sum()),
        "prefixes of workers that have gone": cached - set(state.positions.workers),
    }
    for name, engine in world.engines.items():
        if engine.process.alive:
            held[f"{name} blocks in use"] = engine.blocks.in_use
            held[f"{name} running"] = engine.running
            held[f"{name} calls"] = world.servers[name]._channel.in_flight
            if isinstance(engine, PrefillEngine):
                held[f"{name} prompts held"] = engine.held
    return [f"{what}: {number}" for what, number in held.items() if number]


def num_tasks(world: World) -> dict[Process, int]:
    return {process: len(process.pending) for role in ROLES for process in world.live[role]}


def more_tasks(world: World, before: dict[Process, int]) -> list[str]:
    """Return the processes that have more tasks than `before`."""
    return [
        f"{process} tasks: {number}, before {before[process]}"
        for process, number in num_tasks(world).items()
        if number > before.get(process, number)
    ]


def engine_violations(world: World, *, engines_well: bool) -> list[str]:
    """Return wrong cached blocks and, if no fault has hit an engine, KV leases that have expired."""
    found = []
    for name, engine in world.engines.items():
        if isinstance(engine, PrefillEngine):
            if engines_well and engine.expired:
                found.append(f"{name}: {engine.expired} prompts were neither read nor released")
        elif isinstance(engine, DecodeEngine):
            found += [
                f"{name} keeps {block} as the end of {prefix}"
                for prefix, block in engine.prefixes.items()
                if prefix[-len(block) :] != block
            ]
    return found
