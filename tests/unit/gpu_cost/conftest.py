"""Fixtures: a package in place of aiconfigurator-core, or none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eldr_serve.gpu_cost import kernel_times
from tests.unit.gpu_cost.fake_kernels import write_package


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the fake package for one test."""
    folder = tmp_path / "site"
    write_package(folder)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        del sys.modules[name]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide aiconfigurator-core if it is installed."""
    monkeypatch.setattr(kernel_times, "find_spec", lambda name: None)
