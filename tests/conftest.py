"""Options and output shared by all parts of the test suite."""

import os
import runpy

from tests.support import cpu_features

_best = os.environ.get(cpu_features.CPU_ENV)
# Set here because conftest files below import torch; pytest-xdist workers inherit the variables.
if _best is not None and str(cpu_features.MASK) not in os.environ.get("PYTHONPATH", ""):
    os.environ |= cpu_features.limited_to(_best, os.environ)
    runpy.run_path(str(cpu_features.MASK / "sitecustomize.py"))


def pytest_report_header() -> str:
    """Report the CPU features that the tests see."""
    return cpu_features.description()
