"""The store of expert samples: bounds, refused samples, and the resulting trace."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.signatures.sample_share import SampleShare
from eldr_serve.signatures.window import SampleWindow, trace_of_samples
from tests.support.clock import Clock
from tests.support.samples import EXPERTS, LAYERS, TOP_K, sample, traffic


def names(window: SampleWindow) -> list[str]:
    return [entry.sample.request_id for entry in window.samples]


def test_the_newest_samples_are_kept_within_both_bounds() -> None:
    window = SampleWindow(3)
    assert window.add(traffic([0], 5)) == 5
    assert names(window) == ["r2", "r3", "r4"]
    window.resize(10, 2 * window.samples[0].size, True)
    assert names(window) == ["r3", "r4"]
    assert window.bytes <= 2 * window.samples[0].size
    window.resize(10, 1, True)
    assert names(window) == ["r4"]  # the newest one is kept at any size


def test_a_repeated_request_id_is_kept_once() -> None:
    window = SampleWindow(8)
    window.add([sample("a", prompt=20), sample("b"), sample("a", prompt=30)])
    assert names(window) == ["b", "a"]
    assert window.samples[1].prompt_tokens == 30
    assert window.bytes == sum(entry.size for entry in window.samples)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"shape": (LAYERS, 8)},
            "other_model: 2 layers x 8 experts, but the samples in the pool have 2 x 16",
        ),
        ({"decode_steps": 0}, "odd_total: decode counts"),
        ({"decode_steps": 7}, "odd_total: decode counts"),
        ({"token_ids": np.zeros(5, np.uint32)}, "incomplete_prompt: not include all tokens"),
        ({"decode_counts": np.zeros((3, 4), np.uint32)}, "shape: both must be"),
    ],
)
def test_an_invalid_sample_is_refused_and_counted(
    changed: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason, details = expected.split(": ")
    window = SampleWindow(8)
    window.add([sample("a")])
    shape = changed.pop("shape", None)
    wrong = sample("b", shape=shape) if shape else replace(sample("b"), **changed)
    assert window.add([wrong, replace(wrong, request_id="c")]) == 0
    assert window.refused == {reason: 2}
    assert details in caplog.text
    assert names(window) == ["a"]


def test_counts_that_differ_between_layers_are_refused() -> None:
    window, odd = SampleWindow(8), sample("a")
    odd.prefill_counts[0, 0] += TOP_K
    assert window.add([odd]) == 0
    assert window.refused == {"layers_differ": 1}


def test_refused_samples_of_different_totals_share_a_reason_and_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    window = SampleWindow(8)
    window.add(replace(sample(f"r{steps}"), decode_steps=steps) for steps in (7, 11, 13))
    odd_samples = [sample("a", prompt=21), sample("b", prompt=23)]
    for odd_sample in odd_samples:
        odd_sample.decode_counts[:, 0] += 1
    window.add(odd_samples)
    assert window.refused == {"odd_total": 5}
    assert len(caplog.records) == 1


def test_samples_become_a_trace_that_can_be_saved() -> None:
    window = SampleWindow(8)
    cut = sample("cut")
    cut = replace(cut, token_ids=np.append(cut.token_ids, np.uint32(7)))  # the last token was decoded
    window.add([sample("a"), cut])
    trace = trace_of_samples(window.samples, "m", tokenizer="t", vocabulary=50)
    again = CalibrationTrace.from_bytes(trace.to_bytes())
    assert again.ids == ["a", "cut"]
    assert (again.top_k, again.prefill_counts.shape) == (TOP_K, (2, LAYERS, EXPERTS))
    assert [len(prompt) for prompt in again.prompts] == again.prompt_tokens.tolist() == [20, 20]
    np.testing.assert_array_equal(again.decode_counts[0], sample("a").decode_counts)
    assert again.routes is None


def test_a_request_without_a_decode_step_is_kept() -> None:
    window, complete = SampleWindow(8), sample("a")
    window.add([replace(complete, decode_steps=0, decode_counts=np.zeros_like(complete.decode_counts))])
    assert [entry.top_k for entry in window.samples] == [TOP_K]


def test_token_ids_can_be_left_out() -> None:
    window = SampleWindow(8, keep_token_ids=False)
    window.add(traffic([0], 2))
    trace = trace_of_samples(window.samples, "m", tokenizer="t", vocabulary=50)
    assert trace.token_ids is None
    assert trace.prompt_tokens.tolist() == [20, 20]


def test_an_empty_window_makes_no_trace() -> None:
    with pytest.raises(ValueError, match="has no sample"):
        trace_of_samples([], "m")


def test_the_share_follows_the_rate_of_requests() -> None:
    clock = Clock()
    share = SampleShare(2.0, clock=clock)

    def serve(requests_per_s: float) -> None:
        for _ in range(10):
            clock.now += 1.0
            share.count(round(requests_per_s * share.current))

    serve(100)
    assert share.current == 1.0  # all are sampled until the first table
    share.sample_all = False
    serve(100)
    assert share.current == pytest.approx(0.02, rel=0.3)
    serve(0)
    assert share.current == 1.0
