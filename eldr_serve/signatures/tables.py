"""Fits of routing tables to sampled traffic, with refusal of tables that do not help held-out requests.

This module imports scikit-learn, so import it only where tables are fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.refit import keep_positions, refit_centroids, refit_reason, split_halves
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.fitting.table_guard import GroupingComparison, compare_with_random_groups
from eldr_serve.experts.routing_table import RoutingTable


class RefusedTableError(UserInputError):
    """A fitted table must not be used; the message is one sentence."""


@dataclass(frozen=True)
class FittedTable:
    """A table to swap in.

    Attributes:
        file: content of the RoutingTable file.
        why: the reason for the fit, for the log and the status.
        comparison: evaluation on the held-out half, before the table was fitted to all samples.
    """

    file: bytes
    why: str
    comparison: GroupingComparison


def fit_new_table(live: bytes | None, trace: CalibrationTrace, workers: int, why: str) -> FittedTable:
    """Fit IDF, layer mask and centroids, and keep the positions of a live table.

    Raises:
        RefusedTableError: the table groups held-out requests no better than load does.
        UserInputError: the trace cannot be fitted.
    """
    fitting, held_out = split_halves(len(trace.ids))
    trial, _ = fit_table(trace.subset_without_routes(fitting), workers)
    comparison = _require_better_than_load(trial, trace.subset_without_routes(held_out))
    table, _ = fit_table(trace, workers)
    if live is not None:
        live_table = RoutingTable.from_bytes(live)
        table = replace(table, band=live_table.band)
        if live_table.spec.weights.shape == trace.prefill_counts.shape[1:]:
            table = keep_positions(table, live_table, trace.prefill_counts)
    return FittedTable(table.to_bytes(), why, comparison)


def refit_if_due(live: bytes, trace: CalibrationTrace, workers: int, min_gain: float) -> FittedTable | None:
    """Refit the live table's centroids if traffic has drifted or the number of replicas has changed.

    Raises:
        RefusedTableError: the table groups held-out requests no better than load does.
        UserInputError: the samples do not fit the table.
    """
    table, counts = RoutingTable.from_bytes(live), trace.prefill_counts
    if table.spec.weights.shape != counts.shape[1:]:
        raise RefusedTableError(
            f"the live table is for {table.num_layers} layers x {table.num_experts} experts, but the "
            f"samples have {counts.shape[1]} x {counts.shape[2]}"
        )
    why = refit_reason(table, counts, workers, min_gain)
    if why is None:
        return None
    fitting, held_out = split_halves(len(trace.ids))
    comparison = _require_better_than_load(
        refit_centroids(table, counts[fitting], workers), trace.subset_without_routes(held_out)
    )
    return FittedTable(refit_centroids(table, counts, workers).to_bytes(), why, comparison)


def _require_better_than_load(table: RoutingTable, held_out: CalibrationTrace) -> GroupingComparison:
    comparison = compare_with_random_groups(table, held_out)
    if not comparison.is_better:
        raise RefusedTableError(f"a fitted table is no better than load: {comparison}")
    return comparison
