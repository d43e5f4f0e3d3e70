"""The live settings of a router: their versions, and their changes by operators and ingresses."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from eldr_serve.errors import SwapRefusedError
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.metrics import RouterEvent
from eldr_serve.router.settings_check import Policies, SettingsCheck
from eldr_serve.router_protocol.messages import LiveSettings, NamedPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SettingsChange:
    """The settings before and after a change, and what the change replaces.

    Attributes:
        before, now: the settings before and after the change.
        policies: the policies of the new settings.
        replaces_policy: whether the live policy is replaced; otherwise it stays, with its state.
        restarts_comparison: whether the comparison with the shadow begins again.
        places_queue: whether the new policy places the queued requests at once.
    """

    before: LiveSettings
    now: LiveSettings
    policies: Policies
    replaces_policy: bool = False
    restarts_comparison: bool = False
    places_queue: bool = False


class LiveSettingsStore:
    """The live settings and the table that they contain.

    A method that gets settings which do not fit raises SwapRefusedError, and changes nothing.

    Args:
        first: the settings to start with, which `check` has accepted.
        table: the table of these settings.
        check: validation of further settings.
        counters: counters of the status, in which changes are counted.
        on_change: called with each change, to apply it.

    Attributes:
        current: the live settings.
        table: the live table; None: requests are placed without one.
    """

    def __init__(
        self,
        first: LiveSettings,
        table: RoutingTable | None,
        *,
        check: SettingsCheck,
        counters: Counter[str],
        on_change: Callable[[SettingsChange], None],
    ) -> None:
        self.current = first
        self.table = table
        self._deployed = first
        self._deployed_version = first.version  # `current` has it until the deployed settings are changed
        self._check = check
        self._counters = counters
        self._on_change = on_change

    # -- changes by operators ----------------------------------------------------------------------

    def set_policy(self, policy: str, parameters: dict[str, Any]) -> LiveSettings:
        """Change the policy, and return the new settings."""
        settings = replace(self._next_version(), policy=policy, parameters=dict(parameters))
        self._replace_policy(settings, places_queue=True)
        self._counters[RouterEvent.POLICY_CHANGES] += 1
        return self.current

    def set_shadow(self, shadow: NamedPolicy | None) -> LiveSettings:
        """Compare the live policy with another one or with none, and return the new settings."""
        settings = replace(self._next_version(), shadow=shadow)
        self._change(settings, self._check.build_policies(settings), restarts_comparison=True)
        return settings

    def swap_table(self, table: bytes) -> LiveSettings:
        """Make a RoutingTable file live, and return the new settings."""
        version = self.current.table_version + 1
        settings = replace(self._next_version(), table=table, table_version=version)
        self._replace_policy(settings, places_queue=True)
        self._counters[RouterEvent.TABLE_SWAPS] += 1
        return self.current

    def swap_predictor(self, predictor: bytes, tokenizer: str) -> LiveSettings:
        """Make a SignaturePredictor file live, keep the policy, and return the new settings.

        Args:
            tokenizer: fingerprint of the served tokenizer.
        """
        self._check.require_predictor_fits(predictor, tokenizer)
        version = self.current.predictor_version + 1
        settings = replace(self._next_version(), predictor=predictor, predictor_version=version)
        self._change(settings, self._check.build_policies(settings))
        self._counters[RouterEvent.PREDICTOR_SWAPS] += 1
        return settings

    # -- other changes ---------------------------------------------------------------------------

    def set_deployed_fingerprint(self, fingerprint: str, *, overrides: LiveSettings | None) -> None:
        """Mark the settings as the settings of the deployment with this fingerprint.

        Args:
            overrides: older settings. If an ingress restores them, the marked settings stay. None: the
                settings of any ingress replace the marked settings.
        """
        version = 0 if overrides is None else _version_after(overrides)
        self.current = replace(self.current, deployed_fingerprint=fingerprint, version=version)
        self._deployed_version = version

    def restore(self, settings: LiveSettings) -> None:
        """Adopt an ingress's settings if they are newer, without a table or predictor that does not fit.

        If a policy cannot be made, for example because its module is missing on this node, the deployed one
        replaces it.

        Changes of a deployment count as newer than the deployment itself. In a restarted router, an ingress
        that has just started may deploy it again before another ingress restores the changes.
        """
        current = self.current
        is_of_deployment = settings.deployed_fingerprint == current.deployed_fingerprint
        if settings.version < current.version == self._deployed_version and is_of_deployment:
            if replace(settings, version=current.version) == current:
                return
            settings = replace(settings, version=_version_after(current))
        if settings.version > self.current.version:
            self._replace_policy(self._replace_unfit_policies(self._remove_unfit_artifacts(settings)))
            self._counters[RouterEvent.SETTINGS_RESTORED] += 1

    def discard_unfit_artifacts(self) -> None:
        """Discard a live table or predictor that does not fit, and make the policy again without it."""
        settings = self._remove_unfit_artifacts(self.current)
        if settings is not self.current:
            self._replace_policy(settings)

    def _remove_unfit_artifacts(self, settings: LiveSettings) -> LiveSettings:
        """Return the settings, or newer ones without a table or predictor that does not fit."""
        fitting = settings
        try:
            if fitting.table is not None:
                self._check.read_table(fitting.table)
        except SwapRefusedError as error:
            logger.error("requests are placed without a table: %s", error)
            fitting = replace(fitting, table=None, table_version=fitting.table_version + 1)
            self._counters[RouterEvent.TABLES_DISCARDED] += 1
        try:
            if fitting.predictor is not None:
                self._check.require_predictor_fits(fitting.predictor)
        except SwapRefusedError as error:
            logger.error("the predictor was discarded: %s", error)
            fitting = replace(fitting, predictor=None, predictor_version=fitting.predictor_version + 1)
        return fitting if fitting is settings else replace(fitting, version=_version_after(settings))

    def _replace_unfit_policies(self, settings: LiveSettings) -> LiveSettings:
        """Return the settings, or newer ones with the deployed policy or shadow for one that does not fit."""
        fitting = settings
        try:
            self._check.build_policies(replace(fitting, shadow=None))
        except SwapRefusedError as error:
            logger.error("the deployed policy replaces the restored one: %s", error)
            fitting = replace(fitting, policy=self._deployed.policy, parameters=self._deployed.parameters)
            self._counters[RouterEvent.POLICIES_DISCARDED] += 1
        try:
            self._check.build_policies(fitting)
        except SwapRefusedError as error:
            logger.error("the deployed shadow replaces the restored one: %s", error)
            fitting = replace(fitting, shadow=self._deployed.shadow)
            self._counters[RouterEvent.POLICIES_DISCARDED] += 1
        return fitting if fitting is settings else replace(fitting, version=_version_after(settings))

    def _next_version(self) -> LiveSettings:
        return replace(self.current, version=_version_after(self.current))

    def _replace_policy(self, settings: LiveSettings, *, places_queue: bool = False) -> None:
        policies = self._check.build_policies(settings)
        self._change(
            settings, policies, replaces_policy=True, restarts_comparison=True, places_queue=places_queue
        )

    def _change(self, settings: LiveSettings, policies: Policies, **effects: bool) -> None:
        before, self.current = self.current, settings
        self.table = policies.table
        self._on_change(SettingsChange(before, settings, policies, **effects))


def _version_after(settings: LiveSettings) -> int:
    # The version is a time in milliseconds, so that settings made after a restart are newer than restored
    # settings.
    return max(settings.version + 1, time.time_ns() // 1_000_000)
