"""Settings of all unit tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Hypothesis fails an example that takes 200 ms; on busy cores any may, and time is not what is tested.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def service() -> Iterator[Any]:
    """Run a FakeService."""
    from tests.support.fake_service import fake_service

    with fake_service() as running:
        yield running
