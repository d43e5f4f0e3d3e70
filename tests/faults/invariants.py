"""Checks of what must hold in a world when its faults are over.

Each check returns a sentence for each violation. All reads of private fields of the serving code are here,
since only those fields show what a process still holds.
"""

from typing import Any

from eldr_serve.scheduling.types import LeaseState
from tests.faults.fake_engines import DecodeEngine, PrefillEngine
from tests.faults.virtual_time import Process
from tests.faults.world import ROLES, World


def router_client_of(ingress: Process) -> Any:
    """Return the ingress's router client."""
    return ingress.servable_object._router


def longest_wait_for_router_s(ingress: Process, now_s: float) -> float:
    """Return the longest wait of the ingress's requests for an answer of the router, in seconds."""
    waits_s = [
        now_s - request.unanswered_since_s
        for request in router_client_of(ingress)._waiting._waiting.values()
        if request.lease.state in (LeaseState.UNSENT, LeaseState.SENT)
    ]
    return max(waits_s, default=0.0)


def has_router_channel(ingress: Process) -> bool:
    """Return whether the ingress has a channel to the router."""
    return router_client_of(ingress)._subscription._channel is not None


def has_subscribed(ingress: Process) -> bool:
    """Return whether the router has answered the ingress's subscription."""
    return bool(router_client_of(ingress)._subscription.connected)


def failed_replicas(ingress: Process) -> set[str]:
    """Return the replicas for which the ingress remembers failed calls."""
    return set(ingress.servable_object._services.outliers._records)


def router_state(world: World) -> Any:
    """Return the state of the router, which must live."""
    router = world.router()
    assert router is not None
    return router.servable_object._state


def leases_of_router(world: World) -> dict[str, str]:
    """Return the worker of each request, as the router has recorded it."""
    return {name: lease.worker for name, lease in router_state(world).placer.running.items()}


def leases_of_ingresses(world: World) -> dict[str, str]:
    """Return the worker of each request, as the ingresses have recorded it."""
    return {
        name: lease.worker
        for process in world.live["ingress"]
        for name, lease in router_client_of(process).leases.items()
        if lease.state is LeaseState.GRANTED
    }


def unready_processes(world: World) -> list[str]:
    """Return processes that are missing, stopped, or not connected to all others."""
    problems = []
    for role, target in world.target_numbers.items():
        number = len(world.replicas[role] if role in world.replicas else world.live[role])
        if number < target:
            problems.append(f"{number} of {target} {role}")
    for process in world.live["ingress"]:
        if process.stopped:
            problems.append(f"{process} is stopped")
            continue
        ingress = process.servable_object
        if ingress._router.router_unreachable:
            problems.append(f"{process} places by local fallback")
        if set(ingress._fleets.prefill.live_workers) != set(world.replicas["prefill"]):
            problems.append(f"{process} does not know all prefill replicas")
        if set(ingress._fleets.decode.live_workers) != set(world.replicas["decode"]):
            problems.append(f"{process} does not know all decode replicas")
    return problems


def find_leftovers(world: World) -> list[str]:
    """Return what an idle world still holds, although no request is under way."""
    held_items: dict[str, Any] = {}
    for process in world.live["ingress"]:
        ingress = process.servable_object
        services = ingress._services
        held_items |= {
            f"{process} in flight": ingress.gate.in_flight,
            f"{process} waiting": ingress.gate.limiter.num_waiting,
            f"{process} places of tenants": dict(ingress.gate.limiter._permits),
            f"{process} retries": world.retries_at_once - services.retries._permits._value,
            f"{process} moves": set(services.moves._moving),
            f"{process} placements": dict(ingress._router.leases),
            f"{process} requests that wait for the router": list(ingress._router._waiting),
            f"{process} open calls to the router": ingress._router._place_calls,
            f"{process} progress to report": ingress._router._unreported,
            f"{process} ended streams to report": len(ingress._router._ended_streams),
            f"{process} local fallback": len(ingress._router._fallback),
            f"{process} background": services.kv_release.num_pending,
            f"{process} prompts that wait for prefill": services.prefill_admission.queues.outstanding_tokens,
            f"{process} open calls": sum(ingress._fleets.prefill.open_calls.values())
            + sum(ingress._fleets.decode.open_calls.values()),
        }
    state = router_state(world)
    ingress_calls = world.router().servable_object._ingress_calls  # type: ignore[union-attr]
    cached = state.placer.workers.prefixes._caches.keys() | state.placer.workers.prefixes._capacity.keys()
    held_items |= {
        "router leases": dict(state.placer.running),
        "router queue": dict(state.placer.queue.leases),
        "router calls": dict(ingress_calls.place_calls),
        "router progress": ingress_calls._generated_tokens,
        "router clients too many": len(ingress_calls.subscriptions) - world.target_numbers["ingress"],
        "router ledger": len(state.placer._ledger),
        "router prompt tokens to compute": int(abs(state.placer._ledger._prefill_tokens).sum()),
        "prefixes of workers that have gone": cached - set(state.positions.workers),
    }
    for name, engine in world.engines.items():
        if engine.process.alive:
            held_items[f"{name} blocks in use"] = engine.blocks.in_use
            held_items[f"{name} running"] = engine.running
            held_items[f"{name} calls"] = world.servers[name]._channel_server.in_flight
            if isinstance(engine, PrefillEngine):
                held_items[f"{name} prompts held"] = engine.held_blocks
    return [f"{what}: {number}" for what, number in held_items.items() if number]


def count_tasks(world: World) -> dict[Process, int]:
    """Return the number of unfinished tasks of each live process."""
    return {process: len(process.pending) for role in ROLES for process in world.live[role]}


def find_added_tasks(world: World, before: dict[Process, int]) -> list[str]:
    """Return the processes that have more tasks than `before`."""
    return [
        f"{process} tasks: {number}, before {before[process]}"
        for process, number in count_tasks(world).items()
        if number > before.get(process, number)
    ]


def engine_violations(world: World, *, no_engine_faults: bool) -> list[str]:
    """Return wrong blocks in prefix caches, and KV leases that have expired.

    Args:
        no_engine_faults: whether no fault has hit an engine; otherwise leases may expire.
    """
    violations = []
    for name, engine in world.engines.items():
        if isinstance(engine, PrefillEngine):
            if no_engine_faults and engine.expired:
                violations.append(f"{name}: {engine.expired} prompts were neither read nor released")
        elif isinstance(engine, DecodeEngine):
            violations += [
                f"{name} keeps {block} as the end of {prefix}"
                for prefix, block in engine.prefixes.items()
                if prefix[-len(block) :] != block
            ]
    return violations
