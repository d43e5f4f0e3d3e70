"""Forecast of the experts that a pending batch will use (DIRECTOR, section V-A), from prefill signatures.

With separate prefill and decode engines the forecast costs nothing, since prefill has counted the experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from eldr_serve.arrays import Floats
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.evaluate import home_ranks


def expected_workload(counts: ArrayLike, tokens: ArrayLike, steps: ArrayLike) -> Floats:
    """Return float[L, E], the tokens that each expert is expected to get while N requests decode.

    A request is assumed to use its experts as often per token in decode as in its prompt.

    Args:
        counts: [N, L, E] prompt tokens of each expert, counted or predicted.
        tokens: [N] prompt tokens, 1 or more.
        steps: [N] expected decode steps, or one number.

    Raises:
        UserInputError: the shapes do not match, or a prompt has no tokens.
    """
    seen, length = _parse_prompts(counts, tokens)
    weight = np.divide(steps, length, dtype=np.float64)
    expected: Floats = np.tensordot(weight, seen, axes=1)
    return expected


def workload_by_rank(counts: ArrayLike, tokens: ArrayLike, steps: ArrayLike, topology: Topology) -> Floats:
    """Return float[L, G, E], the paper's workload matrix: `expected_workload` of each rank's own requests.

    Request n of N decodes on rank n * G // N, since engines assign a batch to the ranks in equal blocks.

    Args:
        counts, tokens, steps: as for `expected_workload`, in the order of the batch.
        topology: topology of the G ranks.

    Raises:
        UserInputError: as `expected_workload`.
    """
    seen, length = _parse_prompts(counts, tokens)
    steps_of_request = np.broadcast_to(np.asarray(steps, np.float64), length.shape)
    home = home_ranks(len(seen), topology)
    return np.stack(
        [
            expected_workload(seen[home == rank], length[home == rank], steps_of_request[home == rank])
            for rank in range(topology.ranks)
        ],
        axis=1,
    )


def _parse_prompts(counts: ArrayLike, tokens: ArrayLike) -> tuple[Floats, Floats]:
    """Return the counts [N, L, E] and lengths [N] of prompts. Raise UserInputError if they are unusable."""
    seen, length = np.asarray(counts, np.float64), np.asarray(tokens, np.float64)
    if seen.ndim != 3 or length.shape != seen.shape[:1]:
        raise UserInputError(f"counts of shape {seen.shape} do not match {length.shape} prompt lengths")
    if not (length > 0).all():
        raise UserInputError(f"prompt {(length > 0).argmin()} of {len(length)} has no tokens")
    return seen, length


def decode_correction(
    prefill_counts: ArrayLike, prompt_tokens: ArrayLike, decode_counts: ArrayLike, decode_steps: ArrayLike
) -> Floats:
    """Return float[L, E], an expert's use per decode step over its use per prompt token, in past requests.

    Prompts have tokens that answers lack (the first one, the chat template's), so their counts have the same
    bias for every request; `counts * decode_correction(...)` does not have this bias. A tenth of a mean
    expert's use is added to both sides, so that rare experts are unchanged.

    Args:
        prefill_counts, decode_counts: [N, L, E] of past requests.
        prompt_tokens, decode_steps: [N], 1 or more.
    """
    use = [
        expected_workload(counts, tokens, 1) / np.size(tokens)
        for counts, tokens in ((prefill_counts, prompt_tokens), (decode_counts, decode_steps))
    ]
    prior = 0.1 * use[1].mean(axis=-1, keepdims=True)
    correction: Floats = (use[1] + prior) / (use[0] + prior)
    return correction
