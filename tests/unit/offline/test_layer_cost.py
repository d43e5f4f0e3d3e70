"""The cost of a layer: its slowest rank, the fit, and the file."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline.expert_placement.cost import LayerCost, LayerFit, LayerWork

COST = LayerCost(fixed_s=1e-4, per_expert_s=6e-5, per_token_s=8e-6, near_byte_s=1e-9, far_byte_s=1e-8)
seconds = st.floats(1e-7, 1e-3)


@given(seconds, seconds, st.one_of(st.just(0.0), seconds), st.integers(0, 999))
def test_a_fit_recovers_the_cost_and_is_never_negative(
    fixed: float, per_expert: float, per_token: float, seed: int
) -> None:
    activated, tokens = (a.ravel() for a in np.meshgrid([1, 2, 5, 9], [10, 20, 50]))
    times = fixed + per_expert * activated + per_token * tokens
    fit = LayerCost.fit_ranks(activated, tokens, times)
    fitted = fit.fixed_s + fit.per_expert_s * activated + fit.per_token_s * tokens
    np.testing.assert_allclose(fitted, times, rtol=1e-6)
    assert fit.per_expert_s == pytest.approx(per_expert, rel=1e-4, abs=1e-9)
    fit = LayerCost.fit_ranks(activated, tokens, np.random.default_rng(seed).uniform(1e-4, 1e-3, 12))
    assert min(fit.fixed_s, fit.per_expert_s, fit.per_token_s) >= 0


def test_a_layer_takes_as_long_as_its_slowest_rank() -> None:
    work = LayerWork(*(np.array(row, float) for row in ([4, 1], [10, 90], [0, 1000], [0, 2000])))
    ranks = [4 * 6e-5 + 10 * 8e-6, 6e-5 + 90 * 8e-6 + 1000e-9 + 2000e-8]
    assert COST.rank_s(work) == pytest.approx(ranks)
    assert float(COST.layer_s(work)) == pytest.approx(1e-4 + max(ranks))


def test_a_saved_cost_can_be_loaded_and_other_files_are_refused(tmp_path: Path) -> None:
    errors = {"held_out_median_relative_error": 0.03, "held_out_mean_relative_error": -0.01}
    cost = COST.model_copy(update={"fit": LayerFit(measurements=40, source="here", **errors)})
    cost.save(tmp_path / "cost.json")
    assert LayerCost.load(tmp_path / "cost.json") == cost
    for content, word in (("{}", "fixed_s"), ("[", "Invalid JSON"), ('{"fixed_s": -1}', "fixed_s")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=f"bad.json is not a layer cost: {word}"):
            LayerCost.load(tmp_path / "bad.json")
