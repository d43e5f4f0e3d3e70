"""Placement policies and the placer. Depends on NumPy, SciPy and pydantic, not on Ray or vLLM."""

from eldr_serve.routing.balance import BalanceRoute, BalanceRouteHorizon
from eldr_serve.routing.balance_band import BalanceBand
from eldr_serve.routing.checks import check_policy
from eldr_serve.routing.cost import StepCost, StepSums
from eldr_serve.routing.guard import GuardedPolicy
from eldr_serve.routing.ledger import LoadLedger
from eldr_serve.routing.marginal import MarginalCost
from eldr_serve.routing.placer import Placer
from eldr_serve.routing.policies import CentroidTable, Policy, QueuedPolicy, worker_similarity
from eldr_serve.routing.predictors import BoostedTrees, Oracle, Predictor, PromptKeyed, Survival
from eldr_serve.routing.prefixes import PrefixCache, PrefixMap, PromptBlocks, prompt_blocks
from eldr_serve.routing.registry import DEFAULT_POLICY, make_policy, policy_names, reads_counts
from eldr_serve.routing.shadow import Saving, Shadow
from eldr_serve.routing.types import (
    Decision,
    Loads,
    NoWorkerError,
    Placement,
    PlacementRequest,
    PolicyError,
    State,
)

__all__ = [
    "DEFAULT_POLICY",
    "BalanceBand",
    "BalanceRoute",
    "BalanceRouteHorizon",
    "BoostedTrees",
    "CentroidTable",
    "Decision",
    "GuardedPolicy",
    "LoadLedger",
    "Loads",
    "MarginalCost",
    "NoWorkerError",
    "Oracle",
    "Placement",
    "PlacementRequest",
    "Placer",
    "Policy",
    "PolicyError",
    "Predictor",
    "PrefixCache",
    "PrefixMap",
    "PromptBlocks",
    "PromptKeyed",
    "QueuedPolicy",
    "Saving",
    "Shadow",
    "State",
    "StepCost",
    "StepSums",
    "Survival",
    "check_policy",
    "make_policy",
    "policy_names",
    "prompt_blocks",
    "reads_counts",
    "worker_similarity",
]
