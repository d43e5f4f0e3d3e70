"""Options and output that all parts of the suite have in common."""

from __future__ import annotations

import os
import runpy

import cpu_features

_best = os.environ.get(cpu_features.VARIABLE)
# Here, since conftest files below import torch; workers of pytest-xdist have the variables from their start.
if _best is not None and str(cpu_features.MASK) not in os.environ.get("PYTHONPATH", ""):
    os.environ |= cpu_features.limited_to(_best, os.environ)
    runpy.run_path(str(cpu_features.MASK / "sitecustomize.py"))


def pytest_report_header() -> str:
    """Say which CPU features the tests run on."""
    return cpu_features.description()
