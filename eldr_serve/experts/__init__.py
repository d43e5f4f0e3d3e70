"""Experts under expert parallelism: which rank holds which, and which replica serves. No Ray, no vLLM."""

from eldr_serve.experts.placement import activation_placement, eplb_placement, hosts_of
from eldr_serve.experts.replica_routing import MetroPlan, route_even, route_metro, route_optimal

__all__ = [
    "MetroPlan",
    "activation_placement",
    "eplb_placement",
    "hosts_of",
    "route_even",
    "route_metro",
    "route_optimal",
]
