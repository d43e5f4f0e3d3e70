"""Settings of all unit tests."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Otherwise the first call of Ray would start a cluster in this process, which ends if that cluster does.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Hypothesis fails an example that takes 200 ms; on busy cores any may, and time is not what is tested.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def service() -> Iterator[Any]:
    """Run a FakeService."""
    from tests.support.fake_service import fake_service

    with fake_service() as running:
        yield running
