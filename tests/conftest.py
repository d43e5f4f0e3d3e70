"""Options and output that all parts of the suite have in common."""

from __future__ import annotations

import os
import runpy
import sys

import cpu_features
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Limit this process and its children to the CPU features that the environment names."""
    best = os.environ.get(cpu_features.VARIABLE)
    if best is not None and not hasattr(config, "workerinput"):
        assert "torch" not in sys.modules
        os.environ |= cpu_features.limited_to(best, os.environ)
        runpy.run_path(str(cpu_features.MASK / "sitecustomize.py"))


def pytest_report_header() -> str:
    """Say which CPU features the tests run on."""
    return cpu_features.description()
