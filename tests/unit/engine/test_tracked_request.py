"""Decode counts of one request are complete and exact, or not reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eldr_serve.engine.routes import unpack_routes
from eldr_serve.engine.vllm.kv.tracked_request import RouteCounts, TrackedRequest
from eldr_serve.experts.signature import unpack_counts

PROMPT, STEPS, LAYERS, EXPERTS, K = 5, 100, 3, 8, 2
ROUTES = np.argsort(np.random.default_rng(0).random((STEPS, LAYERS, EXPERTS)), axis=-1)[..., :K].astype(
    np.int16
)
COUNTS = (ROUTES[..., None] == np.arange(EXPERTS)).sum(axis=(0, 2))


def tracked_request(*, routes: bool = False) -> TrackedRequest:
    """Return a finished request with STEPS decode steps."""
    request: Any = SimpleNamespace(num_tokens=PROMPT + STEPS + 1)
    prompt_counts = np.ones((LAYERS, EXPERTS), np.int32)
    return TrackedRequest(request, routes, RouteCounts(PROMPT, keep=routes), prompt_counts)


def add(tracked: TrackedRequest, first: int, end: int) -> None:
    """Add the routes of steps `first` to `end`, which ran together."""
    tracked.decode.add(PROMPT + first, ROUTES[first:end], EXPERTS)


@pytest.mark.parametrize("routes", [False, True])
def test_a_span_of_steps_equals_their_sum(routes: bool) -> None:
    tracked = tracked_request(routes=routes)
    for step in range(STEPS):
        add(tracked, step, step + 1)
    fields = tracked.describe_decode(prefilled_here=True)
    np.testing.assert_array_equal(unpack_counts(fields["eldr_decode"]), COUNTS)
    np.testing.assert_array_equal(unpack_counts(fields["eldr_prefill"]), np.ones((LAYERS, EXPERTS)))
    assert fields["eldr_decode_steps"] == STEPS
    if routes:
        np.testing.assert_array_equal(unpack_routes(fields["eldr_routes"]), ROUTES)
    else:
        assert fields["eldr_routes"] is None


@pytest.mark.parametrize("again", [0, 7, 30])
def test_steps_that_a_preempted_request_computes_again_count_once(again: int) -> None:
    tracked = tracked_request()
    for step in range(30):
        add(tracked, step, step + 1)
    add(tracked, again, 40)  # one chunk has repeated and new tokens
    for step in range(40, STEPS):
        add(tracked, step, step + 1)
    fields = tracked.describe_decode(prefilled_here=False)
    np.testing.assert_array_equal(unpack_counts(fields["eldr_decode"]), COUNTS)


def test_incomplete_counts_are_not_reported() -> None:
    cut, gap = tracked_request(), tracked_request()
    add(cut, 0, STEPS - 1)
    add(gap, 0, 10)
    add(gap, 11, STEPS)
    without_prompt = tracked_request()
    without_prompt.prompt_counts = None
    add(without_prompt, 0, STEPS)
    assert cut.describe_decode(prefilled_here=True) == {}
    assert gap.describe_decode(prefilled_here=True) == {}
    assert without_prompt.describe_decode(prefilled_here=True) == {}
    assert without_prompt.describe_decode(prefilled_here=False)["eldr_decode_steps"] == STEPS


def test_counts_beyond_the_answer_are_not_reported() -> None:
    tracked = tracked_request()
    add(tracked, 0, STEPS)
    tracked.request.num_tokens -= 1
    assert tracked.describe_decode(prefilled_here=True) == {}


def test_an_answer_of_one_token_has_no_decode_steps() -> None:
    tracked = tracked_request(routes=True)
    tracked.request.num_tokens = PROMPT + 1
    fields = tracked.describe_decode(prefilled_here=True)
    assert fields["eldr_decode_steps"] == 0
    assert not unpack_counts(fields["eldr_decode"]).any()
    assert unpack_routes(fields["eldr_routes"]).shape[:2] == (0, LAYERS)
