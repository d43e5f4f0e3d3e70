"""Options and output shared by all parts of the test suite."""

import os
import runpy

import pytest

from tests.support import cpu_features

_best = os.environ.get(cpu_features.CPU_ENV)
# Set here because conftest files below import torch; pytest-xdist workers inherit the variables.
if _best is not None and str(cpu_features.MASK) not in os.environ.get("PYTHONPATH", ""):
    os.environ |= cpu_features.limited_to(_best, os.environ)
    runpy.run_path(str(cpu_features.MASK / "sitecustomize.py"))


def pytest_report_header() -> str:
    """Report the CPU features that the tests see."""
    return cpu_features.description()


class ImmediateFailures:
    """Print each failure when it happens, so that a run that is stopped early has named it."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the report of a failure in the set-up, the call or the tear-down of a test."""
        if report.failed:
            self._terminal.write_line(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)  # the terminal must be there before
def pytest_configure(config: pytest.Config) -> None:
    """Register the output of failures in the process that prints; a worker of pytest-xdist does not."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(ImmediateFailures(terminal))
