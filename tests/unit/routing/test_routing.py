"""Policies, the band at its edges, and the ledger."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from shipped import ROOT
from tables import counts_for, request, unit_table

from eldr_serve.routing import (
    Decision,
    Loads,
    make_policy,
    policy_names,
    worker_similarity,
)

RNG = np.random.default_rng(0)


def loads(*in_flight: int) -> Loads:
    return Loads.of(in_flight, [100 * n for n in in_flight])


def choose(policy: Any, similarity: list[float], *in_flight: int) -> Decision:
    asked = request(similarity=np.array(similarity, np.float32))
    decision: Decision = policy.select(asked, loads(*in_flight), np.random.default_rng(0))
    return decision


def band(width: float, k: int = 3, **parameters: Any) -> Any:
    return make_policy("locality-band", band=width, **parameters).with_table(unit_table(k))


def test_load_policies() -> None:
    state = loads(3, 1, 2)
    assert make_policy("shortest-queue").select(request(), state, RNG).worker == 1
    tokens = Loads.of([1, 9, 1], [500, 20, 300])
    assert make_policy("least-tokens").select(request(), tokens, RNG).worker == 1
    robin = make_policy("round-robin")
    assert [robin.select(request(), state, RNG).worker for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    drawn = Counter(make_policy("random").select(request(), state, RNG).worker for _ in range(600))
    assert min(drawn.values()) > 140
    two = Counter(
        make_policy("power-of-two").select(request(), loads(9, 1, 5), RNG).worker for _ in range(300)
    )
    assert two[0] == 0  # of any two, the fullest is never the emptier
    assert two[1] > two[2] > 0


def test_domain_goes_to_the_clusters_of_its_name() -> None:
    policy = make_policy("domain").with_table(unit_table(3))
    assert policy.select(request(domain="domain2"), loads(0, 0, 5), RNG).worker == 2
    assert policy.select(request(), loads(4, 0, 5), RNG).reason == "no-domain"
    unknown = [policy.select(request(domain="other"), loads(0, 0, 0), RNG) for _ in range(5)]
    assert len({d.worker for d in unknown}) == 1
    without = make_policy("domain")
    assert len({without.select(request(domain="x"), loads(n, 1, 1), RNG).worker for n in range(5)}) == 1


@pytest.mark.parametrize(
    ("width", "similarity", "in_flight", "worker", "inside"),
    [
        (0.0, [0.5, 0.9, 0.8], [0, 99, 0], 1, 1),  # the nearest centroid, whatever its load
        (2.0, [-1.0, 1.0, 0.0], [0, 1, 1], 0, 3),  # the widest band is shortest-queue
        # A worker on the edge is inside; 0.75 and 0.5 are exact in binary.
        (0.25, [0.5, 0.75, 0.25], [0, 1, 0], 0, 2),
        (0.2499, [0.5, 0.75, 0.25], [0, 1, 0], 1, 1),
        # Ties break by load, then similarity, then number.
        (0.5, [0.75, 0.5, 0.75], [2, 1, 2], 1, 3),
        (0.5, [0.5, 0.75, 0.5], [1, 1, 1], 1, 3),
        (0.5, [0.75, 0.75, 0.75], [1, 1, 1], 0, 3),
        (None, [0.5, 0.75, 0.0], [0, 1, 0], 0, 2),  # the table's own, 0.5
    ],
)
def test_of_the_workers_within_the_band_the_least_loaded_is_taken(
    width: float | None, similarity: list[float], in_flight: list[int], worker: int, inside: int
) -> None:
    policy = make_policy("locality-band", band=width).with_table(unit_table(3, band=0.5))
    decision = choose(policy, similarity, *in_flight)
    expected = np.float32(similarity[worker])
    assert decision == Decision(worker, inside, pytest.approx(expected), "locality-band")


def test_a_load_cap_takes_full_workers_out_of_the_band() -> None:
    capped = band(0.1, max_load_ratio=1.5)
    assert choose(capped, [1.0, 0.95, 0.0], 8, 2, 2).worker == 1
    decision = choose(capped, [1.0, 0.0, 0.0], 8, 3, 2)
    assert (decision.worker, decision.reason) == (2, "load-cap")
    assert choose(capped, [1.0, 0.0, 0.0], 2, 2, 2).worker == 0


@given(
    arrays(np.float32, 5, elements=st.floats(-1, 1, width=32)),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
    st.floats(0, 2),
)
def test_the_band_rule_equals_its_definition(
    similarity: np.ndarray, in_flight: list[int], tau: float
) -> None:
    decision = choose(band(tau, 5), similarity.tolist(), *in_flight)
    if not similarity.any():
        assert decision.reason == "no-signature"
        return
    values = [float(s) for s in similarity]
    inside = [w for w in range(5) if values[w] >= max(values) - tau]
    assert decision.band == len(inside)
    assert decision.worker == min(inside, key=lambda w: (in_flight[w], -values[w], w))


@pytest.mark.parametrize(
    ("fields", "table", "reason"),
    [
        ({}, True, "no-signature"),
        ({"signature": counts_for(1)}, False, "no-table"),
        ({"signature": np.zeros((2, 8), np.uint32)}, True, "no-signature"),
        ({"signature": np.ones((5, 8), np.uint32)}, True, "bad-signature"),
        ({"signature": np.ones(3, np.float32)}, True, "bad-signature"),
        ({"similarity": np.ones(9, np.float32)}, True, "bad-signature"),
        ({"similarity": np.full(3, np.nan, np.float32)}, True, "bad-signature"),
    ],
)
def test_without_a_usable_signature_load_decides(fields: dict[str, Any], table: bool, reason: str) -> None:
    policy = make_policy("locality-band").with_table(unit_table(3) if table else None)
    decision = policy.select(request(**fields), loads(2, 1, 0), RNG)
    assert (decision.worker, decision.reason, decision.similarity) == (2, reason, None)


def test_counts_and_their_encoding_are_placed_alike() -> None:
    table = unit_table(3)
    policy = make_policy("locality-band").with_table(table)
    for signature in (counts_for(2), table.spec.encode(counts_for(2))):
        assert policy.select(request(signature=signature), loads(0, 0, 0), RNG).worker == 2


@given(arrays(np.float32, st.integers(1, 12), elements=st.floats(-1, 1, width=32)), st.integers(1, 12))
def test_centroids_are_shared_out_whatever_the_numbers(similarity: np.ndarray, workers: int) -> None:
    found = worker_similarity(similarity, workers)
    k = len(similarity)
    for worker in range(workers):
        served = [c for c in range(k) if c % workers == worker] if k >= workers else [worker % k]
        assert found[worker] == max(similarity[c] for c in served)


def test_the_names_are_those_that_are_documented() -> None:
    assert policy_names() == [
        "balance-band", "balance-route", "balance-route-horizon", "domain", "least-tokens", "locality-band",
        "marginal-cost", "power-of-two", "random", "round-robin", "shortest-queue",
    ]  # fmt: skip


def test_routing_needs_neither_ray_nor_vllm_nor_torch_nor_sklearn() -> None:
    code = (
        "import sys\n"
        "for name in ('ray', 'vllm', 'torch', 'sklearn'):\n"
        "    sys.modules[name] = None\n"
        "import eldr_serve.routing as r\n"
        "print(r.make_policy('locality-band').name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "locality-band", done.stderr
