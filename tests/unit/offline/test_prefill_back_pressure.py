"""Simulated prefill workers whose KV is full: which prompts wait, which requests are refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_serve.scheduling import StepCost, make_policy
from offline.simulation.cluster import Cluster, Decode, Prefill
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Requests, SimulationError
from offline.simulation.run import simulate

COST = StepCost(fixed_s=1.0, per_request_s=0, per_expert_s=0)


def three_at_once(queue_timeout_s: float | None = None, **prefill: Any) -> Outcome:
    """Simulate three prompts of 40 tokens and 0.4 s for one slot, which each answer has for 2 s."""
    cluster = Cluster(
        decode=Decode(workers=1, max_batch=1, cost=COST),
        prefill=Prefill(workers=1, per_token_s=0.01, **prefill),
        queue_timeout_s=queue_timeout_s,
    )
    requests = Requests(np.zeros(3), np.full(3, 40), np.full(3, 2))
    return simulate(requests, make_policy("balance-route", slots=1), cluster)


@pytest.mark.parametrize(
    ("prefill", "prefilled_s", "held_back", "largest"),
    [
        ({}, [0.4, 0.8, 1.2], 0, 120),
        ({"kv_tokens": 120, "max_kv_usage": 1.0}, [0.4, 0.8, 1.2], 0, 120),
        # The second prompt of 40 tokens fits, the third waits until the first has been handed over.
        ({"kv_tokens": 100, "max_kv_usage": 0.5}, [0.4, 0.8, 1.2], 1, 80),
        # Each prompt waits for the hand-over of the one before it, the third as long as the slot is taken.
        ({"kv_tokens": 100, "max_kv_usage": 0.3}, [0.4, 0.8, 2.8], 2, 40),
        # Usage is low enough, but a second prompt does not fit.
        ({"kv_tokens": 79, "max_kv_usage": 1.0}, [0.4, 0.8, 2.8], 2, 40),
    ],
)
def test_a_prefill_worker_takes_prompts_while_its_kv_has_room(
    prefill: dict[str, float], prefilled_s: list[float], held_back: int, largest: int
) -> None:
    outcome = three_at_once(**prefill)
    assert outcome.prefilled_s == pytest.approx(prefilled_s)
    assert outcome.last_s == pytest.approx([2.4, 4.4, 6.4])
    assert (outcome.held_back, outcome.largest_prefill_kv_tokens) == (held_back, largest)
    assert outcome.summary()["expired"] == outcome.refused == 0


def test_a_request_is_refused_after_its_longest_wait_for_a_prefill_worker() -> None:
    patient = three_at_once(kv_tokens=100, max_kv_usage=0.3, max_wait_s=2.5)
    assert patient.finished.all()
    outcome = three_at_once(kv_tokens=100, max_kv_usage=0.3, max_wait_s=2.0)
    assert outcome.finished.tolist() == [True, True, False]
    summary = outcome.summary()
    assert [summary[key] for key in ("held_back", "refused", "expired")] == [2, 1, 0]


def test_a_request_that_expires_in_the_decode_queue_frees_its_prompts_kv() -> None:
    outcome = three_at_once(queue_timeout_s=1.0, kv_tokens=100, max_kv_usage=0.3)
    assert outcome.finished.tolist() == [True, False, True]
    assert outcome.prefilled_s == pytest.approx([0.4, 0.8, 2.8])
    summary = outcome.summary()
    assert [summary[key] for key in ("held_back", "refused", "expired")] == [2, 0, 1]
    assert summary["largest_kv_tokens"] == 41  # a prompt and the first of two tokens


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 40),
    workers=st.integers(1, 3),
    kv_tokens=st.sampled_from([50, 120, None]),
    usage=st.sampled_from([0.3, 1.0]),
    wait_s=st.sampled_from([None, 0.5]),
    ttl=st.sampled_from([None, 2.0]),
    handover_s=st.sampled_from([0.0, 0.3]),
    in_flight=st.sampled_from([None, 5]),
)
def test_every_request_is_answered_refused_or_expires(
    seed: int,
    n: int,
    workers: int,
    kv_tokens: int | None,
    usage: float,
    wait_s: float | None,
    ttl: float | None,
    handover_s: float,
    in_flight: int | None,
) -> None:
    rng = np.random.default_rng(seed)
    requests = Requests(np.cumsum(rng.exponential(0.2, n)), rng.integers(10, 51, n), rng.integers(1, 6, n))
    cluster = Cluster(
        decode=Decode(workers=2, max_batch=2, cost=COST),
        prefill=Prefill(
            workers=workers, per_token_s=0.01, kv_tokens=kv_tokens, max_kv_usage=usage, max_wait_s=wait_s
        ),
        handover_fixed_s=handover_s,
        queue_timeout_s=ttl,
    )
    ended: list[int] = []
    policy = make_policy("balance-route", slots=2)
    outcome = simulate(requests, policy, cluster, in_flight=in_flight, on_finished=ended.append)
    done, begun = outcome.finished, ~np.isnan(outcome.prefilled_s)
    assert sum(ended) == n
    assert n - begun.sum() == outcome.refused
    assert (begun & ~done).sum() == outcome.summary()["expired"]
    assert outcome.refused <= outcome.held_back
    assert wait_s is not None or not outcome.refused
    assert ttl is not None or done[begun].all()
    assert kv_tokens is None or outcome.largest_prefill_kv_tokens <= kv_tokens
    if workers == 1:
        assert (np.diff(outcome.prefilled_s[begun]) > 0).all()  # in order of arrival
    if kv_tokens is None:
        assert outcome.held_back == 0


def test_a_prompt_that_fits_on_no_prefill_worker_is_refused_before_the_run() -> None:
    with pytest.raises(SimulationError, match="a prompt of 40 tokens needs more than the 39 KV tokens"):
        three_at_once(kv_tokens=39)
