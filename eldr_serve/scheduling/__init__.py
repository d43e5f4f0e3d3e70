"""Placement policies and the placer. They depend on NumPy, SciPy and pydantic, not on Ray or vLLM.

This package exports the names that authors of policies need; `docs/extend.md` explains them.
"""

from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.policies.base import CentroidTable, Policy, QueuedPolicy, available_workers
from eldr_serve.scheduling.policies.checks import check_policy
from eldr_serve.scheduling.policies.length_predictors import LengthPredictor
from eldr_serve.scheduling.policies.registry import make_policy, policy_names
from eldr_serve.scheduling.types import Decision, Loads, NoWorkerError, PlacementRequest, PolicyError

__all__ = [
    "CentroidTable",
    "Decision",
    "LengthPredictor",
    "Loads",
    "NoWorkerError",
    "PlacementRequest",
    "Policy",
    "PolicyError",
    "QueuedPolicy",
    "StepCost",
    "available_workers",
    "check_policy",
    "make_policy",
    "policy_names",
]
