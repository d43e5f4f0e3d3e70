"""Placement policies over a signature and worker loads. Needs numpy alone: no Ray, no vLLM."""

from eldr_serve.routing.ledger import LoadLedger
from eldr_serve.routing.policies import CentroidTable, Policy, make_policy, policy_names, worker_similarity
from eldr_serve.routing.types import Decision, Handoff, NoWorkerError, PolicyError, WorkerLoad

__all__ = [
    "CentroidTable",
    "Decision",
    "Handoff",
    "LoadLedger",
    "NoWorkerError",
    "Policy",
    "PolicyError",
    "WorkerLoad",
    "make_policy",
    "policy_names",
    "worker_similarity",
]
