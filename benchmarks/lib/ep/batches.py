"""Batches of requests for an EP engine, their home ranks, and their figures."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from benchmarks.lib.ep.engine import DecodedBatch
from eldr_serve.arrays import Ints

SKIPPED_STEPS = 2  # first decode steps, which the times and counts of a batch leave out


def draw_disjoint_batches(requests: Ints, size: int, number: int, rng: np.random.Generator) -> list[Ints]:
    """Return `number` batches of `size`, which share no request while enough requests are left."""
    batches: list[Ints] = []
    unused = requests[:0]
    for _ in range(number):
        if len(unused) < size:
            unused = rng.permutation(requests)
        batches.append(unused[:size])
        unused = unused[size:]
    return batches


def choose_homes(counts: ArrayLike, placement: Ints, ranks: int) -> Ints:
    """Return a rank for each prompt, int[N], that holds many of its experts; ranks get equal numbers.

    Args:
        counts: int[N, L, E], tokens per expert of each prompt.
        placement: int[L, P], experts in the slots of all ranks; -1: an empty slot.
        ranks: G, number of ranks.
    """
    tokens = np.asarray(counts, np.float64)
    _, layers, experts = tokens.shape
    holds = (placement.reshape(layers, ranks, -1, 1) == np.arange(experts)).any(axis=2)  # [L, G, E]
    share_at_home = np.einsum("nle,lge->ng", tokens / tokens.sum(axis=(1, 2), keepdims=True), holds)
    places = np.arange(len(tokens)) % ranks
    return places[linear_sum_assignment(share_at_home[:, places], maximize=True)[1]]


def summarise_batch(decoded: DecodedBatch) -> dict[str, Any]:
    """Return a batch's figures: medians over steps for times, otherwise means over steps and layers."""
    columns = np.moveaxis(decoded.log[:, SKIPPED_STEPS:], -1, 0)
    tokens, activated, pairs, served_at_home, moved_tokens = columns
    return {
        "step_ms": 1e3 * float(np.median(decoded.seconds[SKIPPED_STEPS:])),
        "worst_rank_experts": float(activated.max(axis=0).mean()),
        "experts_all_ranks": float(activated.sum(axis=0).mean()),
        "worst_rank_pairs": float(pairs.max(axis=0).mean()),
        "pairs_off_home_pct": 100 * (1 - float(served_at_home.sum() / pairs.sum())),
        "other_ranks_per_token": float(moved_tokens.sum() / tokens[0].sum()),
        "answers": [hashlib.sha256(answer.tobytes()).hexdigest()[:16] for answer in decoded.answers],
    }
