"""Rounds of one measurement as one row: medians, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.statistics import median_ci


def medians(
    rows: Sequence[dict[str, Any]], *, about: Sequence[str], sure: Sequence[str], summed: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One row of each thing measured, in the order in which they come first.

    Args:
        about: columns that say what a row is of; the rest are figures, of which numbers alone are kept.
        sure: columns whose 95 % interval is given too, as `_low` and `_high`.
        summed: columns that are added up over the rounds.
    """
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in about) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in about) == key]
        row: dict[str, Any] = dict(zip(about, key, strict=True)) | {"rounds": len(mine)}
        for name, value in mine[0].items():
            if name in summed:
                row[name] = sum(one[name] for one in mine)
            elif isinstance(value, int | float) and name not in about:
                row[name] = float(np.median([one[name] for one in mine]))
        for name in sure:
            _, row[f"{name}_low"], row[f"{name}_high"] = median_ci([one[name] for one in mine])
        found.append(row)
    return found
