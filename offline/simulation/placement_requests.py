"""The requests for placement that a policy gets in a simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling import PlacementRequest, Policy
from eldr_serve.scheduling.prefixes import PromptBlocks
from offline.simulation.cluster import Whole
from offline.simulation.requests import Experts, Requests


class PlacementRequestFactory:
    """Makes the placement requests of simulated requests, by their numbers.

    Args:
        policy: the policy whose table gives similarities.
        whole: configuration of workers that also prefill; None: prompts arrive prefilled.
        reads_counts: whether the requests contain expert counts.
    """

    def __init__(
        self,
        requests: Requests,
        experts: Experts | None,
        policy: Policy,
        whole: Whole | None,
        *,
        reads_counts: bool,
    ) -> None:
        self._requests, self._experts, self._policy, self._whole = requests, experts, policy, whole
        self._reads_counts = reads_counts
        self._prompt, self._kind = requests.prompt_tokens.tolist(), requests.kind.tolist()
        # 0: no limit, as in the service. The true length of an answer must not reach the policy.
        self._limits = requests.max_new_tokens.tolist() or [0] * len(requests)
        # Similarities of each kind, by predicted or by measured counts.
        self._similarity: dict[tuple[int, bool], NDArray[np.float32]] = {}

    def discard_similarities(self) -> None:
        """Discard similarities to the previous table."""
        self._similarity.clear()

    def make_request(self, index: int, blocks: tuple[int, ...]) -> PlacementRequest:
        """Make the placement request of a simulated request.

        Args:
            index: number of the simulated request.
            blocks: the prompt's blocks that a whole replica can cache.
        """
        prompt, requests = self._prompt[index], self._requests
        key = str(requests.blocks[index]) if requests.blocks else None
        if requests.keys:
            key = requests.keys[index]
        prefix = None
        if self._whole is not None:
            prefix = PromptBlocks(np.array(blocks, np.uint64), self._whole.block_tokens)
        request = PlacementRequest(
            str(index), prompt, self._limits[index], prompt_key=key, blocks=prefix, may_wait=True
        )
        if self._experts is None:
            return request
        kind = self._kind[index]
        predicted = self._whole is not None and self._experts.predicted is not None
        counts_of = self._experts.predicted_counts if predicted else self._experts.expert_counts
        counts = counts_of(kind, prompt) if self._reads_counts else None
        return replace(
            request,
            expert_counts=counts,
            domain=self._experts.domains[kind],
            similarity=self._find_similarity(self._experts, kind, predicted),
            predicted=predicted,
        )

    def replace_predicted_counts(self, index: int, request: PlacementRequest) -> PlacementRequest | None:
        """Return the request with its prefill's counts and their similarity.

        Return None if the request has no predicted counts.
        """
        if self._experts is None or not request.predicted or request.expert_counts is None:
            return None
        kind = self._kind[index]
        counts = self._experts.expert_counts(kind, self._prompt[index])
        similarity = self._find_similarity(self._experts, kind, predicted=False)
        return replace(request, expert_counts=counts, similarity=similarity, predicted=False)

    def _find_similarity(self, experts: Experts, kind: int, predicted: bool) -> NDArray[np.float32] | None:
        """Return the similarity of a kind's counts to the policy's table; None without a table."""
        table = self._policy.table
        if table is not None and (kind, predicted) not in self._similarity:
            counts = experts.predicted if predicted else experts.counts
            assert counts is not None
            self._similarity[kind, predicted] = table.similarity(counts[kind])
        return self._similarity.get((kind, predicted))
