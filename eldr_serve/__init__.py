"""Expert-locality-aware serving of mixture-of-experts models.

Names are imported on first use; only `build_app` imports Ray and vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eldr_serve.app import build_app
    from eldr_serve.artifact_metadata import ArtifactError
    from eldr_serve.commands.client import OperatorClient, ServiceError
    from eldr_serve.errors import ConfigurationError
    from eldr_serve.experts.expert_placement import ExpertPlacement
    from eldr_serve.experts.routing_table import RoutingTable
    from eldr_serve.scheduling import (
        Decision,
        Loads,
        NoWorkerError,
        PlacementRequest,
        Policy,
        PolicyError,
        QueuedPolicy,
        check_policy,
        make_policy,
        policy_names,
    )

__all__ = [
    "ArtifactError",
    "ConfigurationError",
    "Decision",
    "ExpertPlacement",
    "Loads",
    "NoWorkerError",
    "OperatorClient",
    "PlacementRequest",
    "Policy",
    "PolicyError",
    "QueuedPolicy",
    "RoutingTable",
    "ServiceError",
    "build_app",
    "check_policy",
    "make_policy",
    "policy_names",
]

_MODULES = {
    "RoutingTable": "experts.routing_table",
    "OperatorClient": "commands.client",
    "ServiceError": "commands.client",
    "ExpertPlacement": "experts.expert_placement",
    "ArtifactError": "artifact_metadata",
    "build_app": "app",
    "ConfigurationError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'scheduling')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
