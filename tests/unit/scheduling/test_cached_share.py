"""The share of cached prompt tokens is that of the newest prompts."""

import numpy as np
import pytest

from eldr_serve.scheduling.cached_share import CachedShare


def test_only_the_newest_prompts_count() -> None:
    share, rng = CachedShare(prompts=5), np.random.default_rng(0)
    assert share.value == 0.0
    prompts = [(int(rng.integers(n + 1)), n) for n in rng.integers(0, 100, 40).tolist()]
    for number, prompt in enumerate(prompts):
        share.record(*prompt)
        newest = prompts[max(0, number - 4) : number + 1]
        expected = sum(cached for cached, _ in newest) / max(sum(tokens for _, tokens in newest), 1)
        assert share.value == pytest.approx(expected)
