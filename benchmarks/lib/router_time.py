"""The time that a router needs for a placement: its placer's time plus its channel's."""

from __future__ import annotations

import time

import numpy as np

from eldr_serve.scheduling import Policy
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.types import Lease, LeaseState
from loadgen.results import read_rows
from offline.simulation.placement_requests import PlacementRequestFactory
from offline.simulation.requests import Experts, Requests

_TIMED = 200  # placements


def placement_cpu_s(
    policy: Policy, requests: Requests, experts: Experts | None, workers: int, in_flight: int
) -> float:
    """Return the median CPU time of the placer for a placement and its release, in seconds.

    Args:
        policy: a new policy, with its table and cost.
        in_flight: requests that run meanwhile, at most half of all.
    """
    factory = PlacementRequestFactory(requests, experts, policy, None, reads_counts=policy.reads_counts)
    placer = Placer(policy, on_policy_error=_fail)
    placer.set_workers([str(worker) for worker in range(workers)])
    in_flight = min(in_flight, len(requests) // 2)
    calls = min(_TIMED, len(requests) - in_flight)
    seconds = []
    for number in range(in_flight + calls):
        lease = Lease(factory.make_request(number, ()), LeaseState.SENT)
        start = time.thread_time()
        placer.submit([lease])
        if number >= in_flight:
            placer.finish(str(number - in_flight))
            seconds.append(time.thread_time() - start)
    return float(np.median(seconds))


def channel_s() -> float:
    """Return the time of a placement through the router actor, in seconds, from the committed result."""
    return 1 / max(float(row["placements_per_s"]) for row in read_rows("router_actor"))


def _fail(error: Exception) -> None:
    raise error
