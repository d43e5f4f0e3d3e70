"""The cost of a decode step, fitted to real steps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.cost_file import FittedCost
from offline.simulation.requests import SimulationError

COLUMNS = ("requests", "kv_tokens", "experts", "seconds")


def fit_step_cost(path: Path) -> FittedCost:
    """Fit step records: JSON lines of {"requests", "kv_tokens", "experts", "seconds"}.

    `experts` are summed over MoE layers. Steps that the machine interrupted get little weight (StepSums).

    Raises:
        SimulationError: a line (named) is not a step, there are too few, or experts cost nothing.
    """
    content = path.read_bytes()
    rows = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            row = [float(record[name]) for name in COLUMNS]
            if not (np.isfinite(row).all() and row[3] > 0 and min(row) >= 0):
                raise ValueError("a value is out of range")
        except (ValueError, KeyError, TypeError) as error:
            raise SimulationError(f"{path}, line {number}: not a step ({error!r})") from error
        rows.append(row)
    steps = np.array(rows, np.float64).reshape(-1, len(COLUMNS))
    sums = StepSums.from_steps(*steps.T)
    fitted = sums.fit()
    if fitted is None:
        raise SimulationError(f"{path}: {len(steps)} steps do not determine the cost of an expert")
    relative = np.abs(fitted.seconds(*steps.T[:3]) / steps[:, 3] - 1)
    return FittedCost(
        cost=fitted,
        steps=len(steps),
        rms_relative_error=sums.relative_rms_error(fitted),
        median_relative_error=float(np.median(relative)),
        source=f"{path.name} {hashlib.sha256(content).hexdigest()[:16]}",
    )


def cost_from_status(status: dict[str, Any], where: str) -> FittedCost:
    """Return the cost that a running service has fitted to its decode engines' steps (`GET /eldr/status`).

    Raises:
        SimulationError: the service has not yet seen enough steps.
    """
    step_cost = dict(status.get("step_cost") or {})
    try:
        steps, error = int(step_cost.pop("steps")), float(step_cost.pop("relative_error"))
        return FittedCost(
            cost=StepCost(**step_cost),
            steps=max(1, steps),
            rms_relative_error=error,
            median_relative_error=None,
            source=where,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise SimulationError(f"{where} has fitted no step cost yet; send it some load first") from error
