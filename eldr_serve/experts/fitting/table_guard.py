"""A check on held-out requests that a table groups requests better than random placement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.clustering import balanced_assignment
from eldr_serve.experts.routing_table import RoutingTable

BATCH_SIZE = 8  # size of the decode batches that are compared
RANDOM_GROUPINGS = 39  # the table must beat all of them; chance achieves that once in 40 times


@dataclass(frozen=True)
class GroupingComparison:
    """Mean number of distinct experts in a decode batch, for different groupings of held-out requests.

    Attributes:
        requests: number of held-out requests.
        by_table: value for groups of equal size that follow the centroids.
        random_mean: mean over random groupings of the same sizes.
        random_best: lowest value of these random groupings.
    """

    requests: int
    by_table: float
    random_mean: float
    random_best: float

    @property
    def is_better(self) -> bool:
        """Return whether the table activates fewer experts than every random grouping."""
        return self.by_table < self.random_best

    def __str__(self) -> str:
        return (
            f"{self.by_table:.3f} distinct experts in a decode batch of {BATCH_SIZE} when {self.requests} "
            f"held-out requests follow the table; random groups have {self.random_mean:.3f} "
            f"(lowest {self.random_best:.3f})"
        )


def compare_with_random_groups(
    table: RoutingTable, held_out: CalibrationTrace, *, seed: int = 0
) -> GroupingComparison:
    """Compare the groups that the table makes with random groups of the same sizes.

    Batches are drawn from a group with replacement. If the requests of a group choose an expert in a share p
    of their decode steps, the expert is idle in a batch with probability (1 - p)^BATCH_SIZE.

    Raises:
        UserInputError: the counts do not have the table's shape.
    """
    workers = len(table.centroids)
    similarity = table.spec.encode(held_out.prefill_counts) @ table.centroids.T
    labels, _ = balanced_assignment(1 - similarity, -(-len(similarity) // workers))
    chosen = held_out.decode_probability.reshape(len(labels), -1)
    layers = held_out.prefill_counts.shape[1]
    rng = np.random.default_rng(seed)
    permutations = (rng.permutation(labels) for _ in range(RANDOM_GROUPINGS))
    random = [_expected_experts(chosen, permutation, workers) / layers for permutation in permutations]
    by_table = _expected_experts(chosen, labels, workers) / layers
    return GroupingComparison(len(labels), by_table, float(np.mean(random)), min(random))


def _expected_experts(chosen: NDArray[np.float32], labels: NDArray[np.int64], workers: int) -> float:
    """Return the expected distinct experts of a batch, over all layers, weighted by the groups' sizes."""
    membership = np.zeros((workers, len(labels)), np.float32)
    membership[labels, np.arange(len(labels))] = 1
    sizes = membership.sum(axis=1)
    share = np.minimum((membership @ chosen) / np.maximum(sizes, 1)[:, None], 1)
    active = 1 - (1 - share) ** BATCH_SIZE
    return float((active.sum(axis=1) * sizes).sum() / sizes.sum())
