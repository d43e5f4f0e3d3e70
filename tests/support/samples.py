"""Expert samples of synthetic requests, whose kinds favour different experts."""

from collections.abc import Sequence

import numpy as np

from eldr_serve.experts.sample import ExpertSample

LAYERS, EXPERTS, TOP_K = 2, 16, 2


def sample(
    name: str,
    kind: int | None = 0,
    *,
    seed: int = 0,
    shape: tuple[int, int] = (LAYERS, EXPERTS),
    prompt: int = 20,
) -> ExpertSample:
    """Return a sample whose tokens mostly choose two experts of its kind, or any experts without a kind."""
    rng = np.random.default_rng([seed, *name.encode()])
    layers, experts = shape
    logits = np.zeros(experts)
    if kind is not None:
        logits[[2 * kind % experts, (2 * kind + 1) % experts]] = 4.0

    def counts(tokens: int) -> np.ndarray:
        scores = logits + rng.gumbel(size=(tokens, layers, experts))
        chosen = np.argsort(-scores, axis=-1)[..., :TOP_K]
        return (chosen[..., None] == np.arange(experts)).sum(axis=(0, 2)).astype(np.uint32)

    ids = rng.integers(0, 50, prompt).astype(np.uint32)
    return ExpertSample(name, f"d{kind}", ids, counts(prompt), counts(8), 8)


def traffic(
    kinds: Sequence[int | None], requests: int, *, begin: int = 0, seed: int = 0
) -> list[ExpertSample]:
    """Return samples of these kinds in turn."""
    return [
        sample(f"r{number}", kinds[number % len(kinds)], seed=seed)
        for number in range(begin, begin + requests)
    ]
