"""ELDR's rule: expert locality selects the candidates, and load decides between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.scheduling.policies.base import Policy, available_workers, choose_shortest, worker_similarity
from eldr_serve.scheduling.types import Decision, Loads, PlacementRequest


class LocalityBand(Policy):
    """Chooses the least loaded worker within the band of the best match (ELDR, section 4.3.2).

    If the load bound excludes the whole band, the worker with the shortest queue is chosen.
    """

    name = "locality-band"

    class Parameters(Policy.Parameters):
        band: float | None = Field(
            default=None,
            ge=0,
            le=2,
            description="width of the band, cosine similarity: 0 is the nearest centroid only, 2 is "
            "shortest queue; null: the table's",
        )
        max_load_ratio: float | None = Field(
            default=None,
            ge=1,
            le=1e6,
            description="workers above this multiple of the mean load leave the band; null: no bound, as "
            "in the paper",
        )

    parameters: Parameters

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        positions = available_workers(loads)
        if self.table is None:
            return choose_shortest(positions, loads, "no-table")
        centroid_similarity, why_not = self._score(request)
        if centroid_similarity is None:
            return choose_shortest(positions, loads, why_not)
        similarity = worker_similarity(centroid_similarity, len(loads)).astype(np.float64)
        width = self.table.band if self.parameters.band is None else self.parameters.band
        band = positions[similarity[positions] >= similarity[positions].max() - width]
        if (bound := self.parameters.max_load_ratio) is not None:
            mean = (loads.in_flight[positions].sum() + 1) / len(positions)
            below_cap = band[loads.in_flight[band] + 1 <= bound * mean]
            if not len(below_cap):
                return choose_shortest(positions, loads, "load-cap")
            band = below_cap
        in_flight = loads.in_flight[band]
        lightest = band[in_flight == in_flight.min()]
        position = int(lightest[similarity[lightest].argmax()])
        return Decision(
            position, num_candidates=len(band), similarity=float(similarity[position]), reason=self.name
        )

    def _score(self, request: PlacementRequest) -> tuple[NDArray[np.float32] | None, str]:
        assert self.table is not None
        similarity = request.similarity
        if similarity is None:
            if request.expert_counts is None:
                return None, "no-counts"
            try:
                similarity = self.table.similarity(request.expert_counts)
            except ValueError:
                return None, "bad-counts"
        if len(similarity) != len(self.table.centroids) or not np.isfinite(similarity).all():
            return None, "bad-counts"
        # A signature of zeros (only common experts, or no counts) is equally far from all centroids.
        return (similarity, "") if np.any(similarity) else (None, "no-counts")
