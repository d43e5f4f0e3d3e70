"""Traces that several tests of figures use."""

from pathlib import Path

import pytest

from tests.support.traces import favourites_trace, save_trace

DOMAINS = ("code", "math", "medical", "legal", "en", "fr")


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a trace with 60 requests of each domain, which has its own favourite experts and token ids."""
    shape = {"each": 60, "num_layers": 3, "num_experts": 32, "steps": 20, "others": 0.05}
    return save_trace(favourites_trace(DOMAINS, **shape), tmp_path_factory)
