"""Experts under expert parallelism: which rank holds which, and which replica serves. No Ray, no vLLM."""

from eldr_serve.expert_placement import hosts_of
from eldr_serve.experts.affinity import co_activation, expert_load
from eldr_serve.experts.grace import grace_placement
from eldr_serve.experts.locality import polling_weights, route_local, route_weighted
from eldr_serve.experts.placement import activation_placement, eplb_placement
from eldr_serve.experts.replica_routing import MetroPlan, route_even, route_metro, route_optimal

__all__ = [
    "MetroPlan",
    "activation_placement",
    "co_activation",
    "eplb_placement",
    "expert_load",
    "grace_placement",
    "hosts_of",
    "polling_weights",
    "route_even",
    "route_local",
    "route_metro",
    "route_optimal",
    "route_weighted",
]
