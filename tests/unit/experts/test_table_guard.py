"""A table must group held-out requests better than chance."""

from dataclasses import replace

import numpy as np

from eldr_serve.experts.fitting.refit import keep_positions, split_halves
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.fitting.table_guard import compare_with_random_groups
from tests.support.traces import synthetic_trace


def test_a_table_fitted_to_the_traffic_is_better_than_load() -> None:
    trace = synthetic_trace(120)
    seen, unseen = split_halves(120)
    comparison = compare_with_random_groups(
        fit_table(trace.subset_without_routes(seen), 3)[0], trace.subset_without_routes(unseen)
    )
    assert comparison.is_better
    assert comparison.by_table < comparison.random_best < comparison.random_mean


def test_a_table_of_noise_is_not_better_than_load() -> None:
    """The prefill counts belong to other requests, so they predict nothing."""
    refused = 0
    for seed in range(10):
        trace = synthetic_trace(120, seed=seed)
        shuffled = np.random.default_rng(seed).permutation(120)
        trace = replace(
            trace,
            prefill_counts=trace.prefill_counts[shuffled],
            prompt_tokens=trace.prompt_tokens[shuffled],
            token_ids=None,
            tokenizer="",
            vocabulary=0,
        )
        seen, unseen = split_halves(120)
        refused += not compare_with_random_groups(
            fit_table(trace.subset_without_routes(seen), 3)[0], trace.subset_without_routes(unseen)
        ).is_better
    assert refused >= 8


def test_a_table_with_one_centroid_is_not_better() -> None:
    trace = synthetic_trace(60)
    assert not compare_with_random_groups(fit_table(trace, 1)[0], trace).is_better


def test_a_full_fit_keeps_the_worker_order_of_the_live_table() -> None:
    trace = synthetic_trace(120)
    live = fit_table(trace, 3)[0]
    order = [2, 0, 1]
    fitted = replace(
        live,
        centroids=live.centroids[order],
        cluster_sizes=live.cluster_sizes[order],
        domains=[live.domains[slot] for slot in order],
    )
    table = keep_positions(fitted, live, trace.prefill_counts)
    np.testing.assert_array_equal(table.centroids, live.centroids)
    assert table.domains == live.domains
    assert table.version == live.version + 1
