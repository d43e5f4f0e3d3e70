"""Expert counts and tables of random prompts at the shape of Qwen3-30B-A3B."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eldr_serve.artifacts import RoutingTable
from eldr_serve.signature import SignatureSpec

L, E, TOP_K = 48, 128, 8
_PROMPT_TOKENS = 300


def prompt_counts(number: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """uint32[number, L, E] of prompts, each with tastes of its own."""
    return np.stack(
        [
            rng.multinomial(_PROMPT_TOKENS * TOP_K, rng.dirichlet(np.full(E, 0.1)), size=L).astype(np.uint32)
            for _ in range(number)
        ]
    )


def random_spec(rng: np.random.Generator) -> SignatureSpec:
    """Random weights of experts, all layers."""
    return SignatureSpec(rng.uniform(0.1, 2, (L, E)).astype(np.float32), np.arange(L))


def table_near(
    prompts: NDArray[np.uint32],
    workers: int,
    rng: np.random.Generator,
    *,
    spec: SignatureSpec,
    noise: int = 3,
) -> RoutingTable:
    """A table whose centroids are those prompts in turn, each count raised by less than `noise`."""
    near = prompts[np.arange(workers) % len(prompts)] + rng.integers(
        0, noise, (workers, L, E), dtype=np.uint32
    )
    return RoutingTable("m", spec, spec.encode(near), np.ones(workers, np.int64), [""] * workers)
