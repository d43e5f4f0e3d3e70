"""Registry of policies by name or import path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from eldr_serve.import_path import import_object
from eldr_serve.scheduling.policies.balance_route.balance import BalanceRoute, BalanceRouteHorizon
from eldr_serve.scheduling.policies.balance_route.balance_band import BalanceBand
from eldr_serve.scheduling.policies.base import Policy
from eldr_serve.scheduling.policies.baselines import (
    LeastTokens,
    PowerOfTwo,
    Random,
    RoundRobin,
    ShortestQueue,
)
from eldr_serve.scheduling.policies.domain import Domain
from eldr_serve.scheduling.policies.locality_band import LocalityBand
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from eldr_serve.scheduling.types import PolicyError
from eldr_serve.validation import unknown_name

DEFAULT_POLICY = MarginalCost.name  # it needs neither calibration nor a table
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        BalanceBand,
        BalanceRoute,
        BalanceRouteHorizon,
        Domain,
        LocalityBand,
        MarginalCost,
        Random,
        RoundRobin,
        ShortestQueue,
        PowerOfTwo,
        LeastTokens,
    )
}


def policy_class(name: str) -> type[Policy]:
    """Return the policy class of that name or of the import path `my_package.module:MyPolicy`.

    Raises:
        PolicyError: there is no such policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise PolicyError(unknown_name("", name, (*policy_names(), "module:Class of your own"), "policy"))
    return _import_policy(name)


@lru_cache
def _import_policy(path: str) -> type[Policy]:
    policy = import_object(path, "policy", PolicyError)
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PolicyError(f"policy {path!r} is not a subclass of eldr_serve.scheduling.Policy")
    return policy


def make_policy(name: str, /, **parameters: Any) -> Policy:
    """Create the policy of that name or import path.

    Raises:
        PolicyError: the name, a parameter or a value is invalid; the message lists valid ones.
    """
    cls = policy_class(name)
    try:
        return cls(**parameters)
    except PolicyError:
        raise
    except Exception as error:  # another package's constructor may raise anything
        raise PolicyError(f"policy {name!r} cannot be created: {error!r}") from error


def reads_counts(name: str) -> bool:
    """Return whether the policy uses a request's expert counts; False if there is no such policy."""
    try:
        return policy_class(name).reads_counts
    except PolicyError:
        return False


def policy_names() -> list[str]:
    """Return the names of the built-in policies, sorted."""
    return sorted(POLICIES)


def balancer_names() -> tuple[str, ...]:
    """Return the names of the built-in policies that place by load or chance alone."""
    return tuple(name for name, policy in POLICIES.items() if policy.is_balancer)
