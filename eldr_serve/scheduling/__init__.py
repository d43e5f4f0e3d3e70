"""Placement policies and the placer. They depend on NumPy, SciPy and pydantic, not on Ray or vLLM."""

from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.cost import StepAnswer, StepCost, StepSums
from eldr_serve.scheduling.decode_loads import DecodeLoads, StepTimeModel, WorkerLoads
from eldr_serve.scheduling.guarded_policy import GuardedPolicy
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.policies.balance_route.balance import BalanceRoute, BalanceRouteHorizon
from eldr_serve.scheduling.policies.balance_route.balance_band import BalanceBand
from eldr_serve.scheduling.policies.base import (
    CentroidTable,
    Policy,
    QueuedPolicy,
    available_workers,
    worker_similarity,
)
from eldr_serve.scheduling.policies.checks import check_policy
from eldr_serve.scheduling.policies.length_predictors import (
    BoostedTrees,
    LengthPredictor,
    Oracle,
    PromptKeyed,
    Survival,
)
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from eldr_serve.scheduling.policies.registry import (
    DEFAULT_POLICY,
    balancer_names,
    make_policy,
    policy_names,
    reads_counts,
)
from eldr_serve.scheduling.prefixes import (
    BlockChanges,
    PrefixCache,
    PrefixCacheSize,
    PrefixMap,
    PromptBlocks,
    TrackedBlocks,
    prompt_blocks,
)
from eldr_serve.scheduling.shadow import PolicyComparison, Shadow
from eldr_serve.scheduling.types import (
    Decision,
    Lease,
    LeaseState,
    Loads,
    NoWorkerError,
    PlacementRequest,
    PolicyError,
)

__all__ = [
    "DEFAULT_POLICY",
    "BalanceBand",
    "BalanceRoute",
    "BalanceRouteHorizon",
    "BlockChanges",
    "BoostedTrees",
    "CentroidTable",
    "Decision",
    "DecodeLoads",
    "GuardedPolicy",
    "Lease",
    "LeaseState",
    "LengthPredictor",
    "LoadLedger",
    "LoadedAdapters",
    "Loads",
    "MarginalCost",
    "NoWorkerError",
    "Oracle",
    "PlacementRequest",
    "Placer",
    "Policy",
    "PolicyComparison",
    "PolicyError",
    "PrefixCache",
    "PrefixCacheSize",
    "PrefixMap",
    "PromptBlocks",
    "PromptKeyed",
    "QueuedPolicy",
    "Shadow",
    "StepAnswer",
    "StepCost",
    "StepSums",
    "StepTimeModel",
    "Survival",
    "TrackedBlocks",
    "WorkerLoads",
    "available_workers",
    "balancer_names",
    "check_policy",
    "make_policy",
    "policy_names",
    "prompt_blocks",
    "reads_counts",
    "worker_similarity",
]
