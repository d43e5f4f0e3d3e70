"""Parts of the benchmark of admission by predicted latency, against a service without engines."""

import itertools

import pytest

from benchmarks.lib.client import Answer
from benchmarks.serving import objectives
from benchmarks.serving.objectives import (
    COUNT,
    PREDICTION,
    _Load,
    largest_fitting_load,
    row,
    send_arrivals,
)
from loadgen.sse import StreamTiming
from loadgen.statistics import LatencyObjective
from tests.support.fake_service import fake_service

OBJECTIVE = LatencyObjective(ttft_ms=200.0, tpot_ms=20.0)


def answered(ttft_s: float, tpot_s: float) -> Answer:
    times = [ttft_s, ttft_s + tpot_s, ttft_s + 2 * tpot_s]
    return Answer(0.0, times[-1], StreamTiming(times, completion_tokens=3))


def test_the_load_that_fits_is_the_largest_whose_requests_meet_the_objective() -> None:
    small, middle, large = _Load(2, 1.0, 1.0), _Load(4, 2.0, 0.95), _Load(8, 3.0, 0.5)
    assert largest_fitting_load([small, large, middle]) is middle
    assert largest_fitting_load([large, _Load(16, 3.0, 0.1)]) is large


def test_a_row_separates_refused_late_and_failed_requests() -> None:
    answers = [
        answered(0.1, 0.01),
        answered(0.1, 0.03),  # slow tokens
        answered(0.3, 0.01),  # a late first token
        Answer(5.0, 5.1, error="HTTP 503: no"),
        Answer(5.0, 5.3, error="HTTP 429: no"),
        Answer(5.0, 6.0, error="HTTP 500: no"),
    ]
    figures = row(PREDICTION, answers, OBJECTIVE, 10.0)
    assert (figures["requests"], figures["failures"]) == (6, 1)
    assert figures["refused_pct"] == pytest.approx(100 / 3)
    assert figures["refusal_p50_s"] == pytest.approx(0.2)
    assert figures["slowest_refusal_s"] == pytest.approx(0.3)
    assert figures["within_pct"] == pytest.approx(25.0)
    assert figures["goodput_per_s"] == pytest.approx(0.1)
    assert figures["answers_per_s"] == pytest.approx(0.3)
    assert set(row(COUNT, [], OBJECTIVE, 1.0)) == set(figures)


async def test_arrivals_name_the_objective_and_do_not_wait_for_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers_sent: list[dict[str, str] | None] = []
    request_completion = objectives.request_completion

    async def record_headers(*args: object, headers: dict[str, str] | None) -> Answer:
        headers_sent.append(headers)
        return await request_completion(*args, headers=headers)

    monkeypatch.setattr(objectives, "request_completion", record_headers)
    body = {"max_tokens": 2, "ignore_eos": True}
    with fake_service() as service:
        service.first_s = 1.0
        answers = await send_arrivals(
            service.url, itertools.repeat(body), {"x": "y"}, per_s=40.0, seconds=0.3, seed=0
        )
    assert len(answers) > 3
    assert all(answer.error is None for answer in answers)
    assert max(answer.started_at_s for answer in answers) < min(answer.ended_at_s for answer in answers)
    assert headers_sent == [{"x": "y"}] * len(answers)
