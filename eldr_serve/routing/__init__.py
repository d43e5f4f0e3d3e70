"""Placement policies over a signature and worker loads. Needs numpy and scipy alone: no Ray, no vLLM."""

from eldr_serve.routing.balance import BalanceRoute, BalanceRouteHorizon, LocalityBalance
from eldr_serve.routing.balance_band import BalanceBand
from eldr_serve.routing.cost import StepCost, StepSums
from eldr_serve.routing.guard import GuardedPolicy
from eldr_serve.routing.ledger import LoadLedger
from eldr_serve.routing.marginal import MarginalCost
from eldr_serve.routing.placer import Placer
from eldr_serve.routing.policies import (
    CentroidTable,
    Policy,
    PooledPolicy,
    make_policy,
    policy_names,
    reads_counts,
    worker_similarity,
)
from eldr_serve.routing.predictors import BoostedTrees, Oracle, Predictor, PromptKeyed, Survival
from eldr_serve.routing.types import (
    Decision,
    Loads,
    NoWorkerError,
    Placement,
    PlacementRequest,
    PolicyError,
    State,
    WorkerLoad,
)

__all__ = [
    "BalanceBand",
    "BalanceRoute",
    "BalanceRouteHorizon",
    "BoostedTrees",
    "CentroidTable",
    "Decision",
    "GuardedPolicy",
    "LoadLedger",
    "Loads",
    "LocalityBalance",
    "MarginalCost",
    "NoWorkerError",
    "Oracle",
    "Placement",
    "PlacementRequest",
    "Placer",
    "Policy",
    "PolicyError",
    "PooledPolicy",
    "Predictor",
    "PromptKeyed",
    "State",
    "StepCost",
    "StepSums",
    "Survival",
    "WorkerLoad",
    "make_policy",
    "policy_names",
    "reads_counts",
    "worker_similarity",
]
