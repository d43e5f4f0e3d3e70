"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_model
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engine" in item.path.parts:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random MoE model."""
    return tiny_model.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def choices(model: Path) -> Callable[[list[int]], np.ndarray]:
    """tokens -> int[T,L,k], by another implementation, cold, with no cache of keys and values."""
    from transformers import Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @cache
    @torch.no_grad()
    def route(tokens: tuple[int, ...]) -> np.ndarray:
        logits = reference(torch.tensor([tokens]), output_router_logits=True, use_cache=False).router_logits
        return torch.stack(
            [x.reshape(len(tokens), -1).topk(tiny_model.TOP_K).indices for x in logits], 1
        ).numpy()

    return lambda tokens: route(tuple(tokens))
