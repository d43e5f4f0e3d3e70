"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib import tiny_model
from benchmarks.lib.exact import reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engine" in item.path.parts:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random MoE model."""
    return tiny_model.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def choices(model: Path) -> Callable[[list[int]], np.ndarray]:
    """Return a function from tokens to int[T,L,k], the choices of another implementation without KV cache."""
    return reference(model)
