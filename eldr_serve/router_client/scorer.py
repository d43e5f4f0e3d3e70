"""Scoring of requests in an ingress: similarities to a table, and predictions of expert counts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.artifact_metadata import ArtifactError
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.router_protocol.messages import LiveSettings
from eldr_serve.scheduling import PlacementRequest

logger = logging.getLogger(__name__)

_SAMPLE_EVERY = 16  # one in this many requests reports its counts even if the policy reads none


class Scorer:
    """Scores requests for the policy with the table and the predictor of the live settings.

    Args:
        on_predictor: called when a predictor is loaded, which needs prompts' token ids.

    Attributes:
        settings: the live settings; None until known.
        predictor: the live predictor, with what it has learnt in this process.
        tokenizer: fingerprint of the served tokenizer; None until known.
        shape: (MoE layers, experts) of expert counts as engines report it; None until known.
    """

    def __init__(self, on_predictor: Callable[[], None]) -> None:
        self._on_predictor = on_predictor
        self._numbers = itertools.count()
        self._table: RoutingTable | None = None
        self._has_warned = False  # whether it has warned of counts that do not fit the table
        self.settings: LiveSettings | None = None
        self.predictor: OnlinePredictor | None = None
        self.tokenizer: str | None = None
        self.shape: tuple[int, int] | None = None

    def apply_settings(self, settings: LiveSettings) -> None:
        """Score with other settings; keep the previous ones if the table or the predictor is unreadable.

        Raises:
            ArtifactError: a file is unreadable.
        """
        previous, table, predictor = self.settings, self._table, self.predictor
        has_new_table = settings.table != (previous and previous.table)
        has_new_predictor = settings.predictor != (previous and previous.predictor)
        if has_new_table:
            table = RoutingTable.from_bytes(settings.table) if settings.table is not None else None
        if has_new_predictor:
            predictor = self._load_predictor(settings.predictor)
        self.settings, self._table, self.predictor = settings, table, predictor
        self._has_warned = self._has_warned and not has_new_table
        if has_new_predictor and predictor is not None:
            self._on_predictor()

    def _load_predictor(self, predictor: bytes | None) -> OnlinePredictor | None:
        if predictor is None:
            return None
        artifact = SignaturePredictor.from_bytes(predictor)
        try:
            artifact.require_fit(model=artifact.model, tokenizer=self.tokenizer, shape=self.shape)
        except ArtifactError as error:
            logger.error("the predictor was discarded: %s", error)
            return None
        return OnlinePredictor(artifact)

    def set_tokenizer(self, fingerprint: str) -> None:
        """Set the fingerprint of the served tokenizer; a predictor for another tokenizer is discarded."""
        self.tokenizer = fingerprint
        if self.predictor is not None and self.predictor.predictor.tokenizer != fingerprint:
            self.predictor = self._load_predictor(self.settings.predictor if self.settings else None)

    def predict(self, token_ids: NDArray[np.uint32] | None) -> NDArray[Any] | None:
        """Return the predicted counts of a prompt, float[L, E], if they can be predicted."""
        if token_ids is None or self.predictor is None:
            return None
        return self.predictor.predict(token_ids)

    def train(self, token_ids: NDArray[np.uint32], counts: NDArray[Any], prompt_tokens: int) -> None:
        """Train the predictor with the true counts of a prompt; see RouterClient.set_measured_counts."""
        if self.predictor is None or not prompt_tokens:
            return
        try:
            self.predictor.observe(token_ids, counts * (len(token_ids) / prompt_tokens))
        except ValueError as error:
            logger.error("the signature predictor cannot be used, so nothing is predicted: %s", error)
            self.predictor = None

    def counts_for_policy(self, counts: NDArray[Any] | None) -> NDArray[Any] | None:
        """Return the packed counts to send with a placement; None if the policy reads none."""
        if counts is None or self.settings is None or not self.settings.reads_counts:
            return None
        return _pack(counts)

    def sample_counts(self, counts: NDArray[Any]) -> NDArray[Any] | None:
        """Return a measured prompt's packed counts if the policy reads counts or the prompt is sampled."""
        sampled = next(self._numbers) % _SAMPLE_EVERY == 0
        return _pack(counts) if sampled else self.counts_for_policy(counts)

    def score(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request as it is sent: what the live policy reads replaces its counts."""
        counts, settings = request.expert_counts, self.settings
        if counts is None:
            return replace(request, counts_missing=True)
        choose_counts = self.counts_for_policy if request.predicted else self.sample_counts
        fields: dict[str, Any] = {"expert_counts": choose_counts(counts)}
        if self._table is not None and settings is not None:
            try:
                fields["similarity"] = self._table.similarity(counts)
                fields["table_version"] = settings.table_version
            except ValueError as error:
                if not self._has_warned:  # else each request would add a line
                    logger.warning("the counts do not fit the live table: %s", error)
                self._has_warned = True
                fields["counts_missing"] = True
        return replace(request, **fields)


def _pack(counts: NDArray[Any]) -> NDArray[Any]:
    """Return the counts in the smallest dtype."""
    return counts.astype(np.min_scalar_type(counts.max(initial=0).item()))
