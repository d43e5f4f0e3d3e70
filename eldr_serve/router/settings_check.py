"""Validation of the router's settings: policies, tables and predictors must fit the served model."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.errors import SwapRefusedError
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.router_protocol.messages import LiveSettings
from eldr_serve.scheduling import PlacementRequest, Policy, PolicyError, make_policy

MAX_SETTINGS_BYTES = 60 * 2**20  # table and predictor, which share one frame of the channel


class Policies(NamedTuple):
    """The policy and the shadow that settings name, and the table that both use."""

    policy: Policy
    shadow: Policy | None
    table: RoutingTable | None


class SettingsCheck:
    """Checks settings against the served model and the shape of expert counts.

    Attributes:
        model_id: id of the served model; tables and predictors of other models are refused.
        shape: (MoE layers, experts) as engines report it; None until known.
    """

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.shape: tuple[int, int] | None = None

    def build_policies(self, settings: LiveSettings) -> Policies:
        """Make the policies and the table of settings; raise SwapRefusedError if they do not fit."""
        size = len(settings.table or b"") + len(settings.predictor or b"")
        if size > MAX_SETTINGS_BYTES:
            raise SwapRefusedError(
                f"table and predictor have {size / 2**20:.0f} MiB together, but the maximum is "
                f"{MAX_SETTINGS_BYTES / 2**20:.0f}"
            )
        table = None if settings.table is None else self.read_table(settings.table)
        try:
            policy = make_policy(settings.policy, **settings.parameters).set_table(table)
            shadow = None
            if settings.shadow is not None:
                named = settings.shadow
                shadow = make_policy(named.name, **named.parameters).set_table(table)
        except PolicyError as error:
            raise SwapRefusedError(str(error)) from error
        return Policies(policy, shadow, table)

    def read_table(self, data: bytes) -> RoutingTable:
        """Parse a RoutingTable file's content; raise SwapRefusedError if it is invalid or does not fit."""
        try:
            table = RoutingTable.from_bytes(data)
        except ArtifactError as error:
            raise SwapRefusedError(str(error)) from error
        if table.model != self.model_id:
            raise SwapRefusedError(f"the table is for model {table.model!r}, but {self.model_id!r} is served")
        shape = (table.num_layers, table.num_experts)
        if self.shape not in (None, shape):
            raise SwapRefusedError(
                f"the table is for {shape[0]} MoE layers x {shape[1]} experts, but the prefill engines "
                f"report {self.shape[0]} x {self.shape[1]}"
            )
        return table

    def require_predictor_fits(self, predictor: bytes, tokenizer: str | None = None) -> None:
        """Raise SwapRefusedError if a SignaturePredictor file does not fit."""
        try:
            SignaturePredictor.from_bytes(predictor).require_fit(
                model=self.model_id, tokenizer=tokenizer, shape=self.shape
            )
        except ArtifactError as error:
            raise SwapRefusedError(str(error)) from error

    def remove_unusable_prediction(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request, without its predicted counts if their shape differs from the engines'."""
        counts = request.expert_counts
        if not request.predicted or counts is None or self.shape is None or counts.shape == self.shape:
            return request
        return replace(request, expert_counts=None, counts_missing=True, predicted=False)
