"""Rows that combine the rounds of a measurement: medians with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.statistics import median_ci, put_interval


def medians(
    rows: Sequence[dict[str, Any]],
    *,
    keys: Sequence[str],
    with_interval: Sequence[str],
    summed: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return one row for each measured case, in order of first appearance.

    Args:
        keys: columns that identify a case; of the other columns, only numbers are kept.
        with_interval: columns with a 95 % interval, in `_low` and `_high`.
    """
    summaries = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        of_case = [row for row in rows if tuple(row[name] for name in keys) == key]
        row: dict[str, Any] = dict(zip(keys, key, strict=True)) | {"rounds": len(of_case)}
        for name, value in of_case[0].items():
            if name in summed:
                row[name] = sum(measured[name] for measured in of_case)
            elif isinstance(value, int | float) and name not in keys:
                row[name] = float(np.median([measured[name] for measured in of_case]))
        for name in with_interval:
            put_interval(row, name, median_ci([measured[name] for measured in of_case]))
        summaries.append(row)
    return summaries
