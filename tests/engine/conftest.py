"""Fixtures of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engine" in item.path.parts:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random MoE model."""
    return tiny_model.make(tmp_path_factory.mktemp("model"))
