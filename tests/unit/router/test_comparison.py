"""A router with a shadow policy: its status, and placements that never depend on it."""

from typing import Any

import numpy as np
import pytest

from eldr_serve.errors import SwapRefusedError
from eldr_serve.router.signature_plane import CentroidPlane, CountsPlane
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import NamedPolicy, Restore
from eldr_serve.scheduling import Decision, Policy
from eldr_serve.scheduling.types import LeaseState
from tests.support.fake_router import place, place_one, router_and_client, router_state
from tests.support.tables import counts_for, request, unit_table


class Broken(Policy):
    def select(self, *_: Any) -> Decision:
        raise KeyError("broken")


def tokens_of(state: RouterState) -> int | None:
    state.comparison.catch_up()
    now = router_status(state)["comparison"]["now"]
    return now and now.get("tokens")


def run(state: RouterState, name: str) -> None:
    """Place a request that generates nine tokens."""
    place(state, request(name, expert_counts=counts_for(0)))
    state.leases.set_generated_tokens({name: 9})


def test_a_shadow_that_fails_is_disabled_and_counted() -> None:
    state = router_state(policy="shortest-queue", shadow=NamedPolicy("test_comparison:Broken"))
    assert place_one(state, "a", 1).state is LeaseState.GRANTED
    assert state.comparison.catch_up() is False
    status = router_status(state)
    assert status["counters"]["shadow_errors"] == 1
    assert status["comparison"]["now"] is None
    assert "broken" in status["comparison"]["failed"]
    assert place_one(state, "b", 1).state is LeaseState.GRANTED
    assert "policy_errors" not in router_status(state)["counters"]


@pytest.mark.parametrize("bad", [NamedPolicy("nosuch"), NamedPolicy("random", {"x": 1})])
def test_an_invalid_shadow_is_refused_and_the_old_one_stays(bad: NamedPolicy) -> None:
    state = router_state(shadow=NamedPolicy("random"))
    before = state.settings
    with pytest.raises(SwapRefusedError, match=r"\A.+\Z"):
        state.live_settings.set_shadow(bad)
    assert state.settings is before


def test_each_change_begins_a_comparison_and_the_status_keeps_the_last_one() -> None:
    state = router_state(policy="shortest-queue")
    state.live_settings.set_shadow(NamedPolicy("locality-band", {"band": 0.3}))
    run(state, "a")
    assert tokens_of(state) == 9
    state.live_settings.set_policy("locality-band", {"band": 0.3})
    # This comparison is not kept, since no token is generated during it.
    state.live_settings.set_shadow(NamedPolicy("shortest-queue"))
    run(state, "b")
    assert tokens_of(state) == 9  # those of "b": the earlier ones of "a" do not count
    state.live_settings.set_shadow(None)
    assert tokens_of(state) is None
    past = router_status(state)["comparison"]["past"]
    assert (past[0]["live"]["name"], past[0]["shadow"]["name"]) == ("shortest-queue", "locality-band")
    assert past[-1]["live"] == {"name": "locality-band", "parameters": {"band": 0.3}}


def test_a_comparison_of_a_policy_with_itself_is_not_kept() -> None:
    state = router_state(policy="shortest-queue", shadow=NamedPolicy("locality-band", {"band": 0.3}))
    turns = [("locality-band", {"band": 0.3, "max_load_ratio": None}), ("locality-band", {}), ("random", {})]
    for number, (policy, parameters) in enumerate(turns):  # the first equals the shadow
        run(state, f"request{number}")
        assert tokens_of(state)
        state.live_settings.set_policy(policy, parameters)
    past = [entry["live"] for entry in router_status(state)["comparison"]["past"]]
    assert past == [{"name": "shortest-queue", "parameters": {}}, {"name": "locality-band", "parameters": {}}]


def test_a_new_shadow_keeps_the_state_of_the_live_policy() -> None:
    state = router_state(policy="marginal-cost", table=None)
    run(state, "a")
    policy = state.placer.policy
    state.live_settings.set_shadow(NamedPolicy("random"))
    assert state.placer.policy is policy


def test_a_restarted_router_restores_the_shadow_from_a_client() -> None:
    old = router_state(policy="random")
    old.live_settings.set_shadow(NamedPolicy("least-tokens"))
    new = router_state(policy="random", ingresses="")
    new.restore_from_ingress(Restore("c", ("r0",), settings=old.settings))
    assert new.settings.shadow == NamedPolicy("least-tokens")
    assert router_status(new)["comparison"]["now"]["shadow"]["name"] == "least-tokens"


async def test_expert_counts_are_sent_if_only_the_shadow_reads_them() -> None:
    async with router_and_client("r0", "r1", policy="shortest-queue") as (actor, client):
        await client.place(request("sampled"), counts_for(0))  # the first one is always sampled
        for shadow in (None, NamedPolicy("random")):
            await client.operator.set_shadow(shadow)
            name = f"r{shadow}"
            await client.place(request(name), counts_for(0))
            (sent,) = [known for known in actor.requests if known.request_id == name]
            assert (sent.expert_counts is not None) == (shadow is not None)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_points_in_the_plane_of_centroids_are_projections_on_principal_axes(k: int) -> None:
    rng = np.random.default_rng(k)
    table = unit_table(k)
    rows = rng.normal(size=(k, table.spec.dim)).astype(np.float32)
    table.centroids[:] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    plane = CentroidPlane(table, version=3)
    counts = rng.integers(0, 9, (5, 2, 8)).astype(np.uint32)
    signatures = table.spec.encode(counts)
    points = [
        plane.point_of(request(str(i), similarity=table.similarity(c), table_version=3))
        for i, c in enumerate(counts)
    ]
    centred = table.centroids - (table.centroids.mean(axis=0) if k > 2 else 0)
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:2] * (values[:2, None] > 1e-6)
    expected = np.pad(signatures @ axes.T, ((0, 0), (0, 2 - min(k, 2))))
    assert np.abs(np.array(points)) == pytest.approx(np.abs(expected), abs=2e-4)
    assert len(plane.centroids) == k
    assert plane.point_of(request("old", similarity=table.similarity(counts[0]), table_version=2)) is None


def test_points_in_the_plane_of_first_signatures_keep_kinds_apart() -> None:
    rng = np.random.default_rng(0)
    kinds = [np.eye(4, dtype=np.uint32)[kind] * 50 for kind in (0, 1, 2)]
    counts = [
        np.stack([kinds[i % 3], kinds[i % 3]]) + rng.integers(0, 3, (2, 4)).astype(np.uint32)
        for i in range(12)
    ]
    plane = CountsPlane(counts)
    points = np.array([plane.point_of(request(str(i), expert_counts=c)) for i, c in enumerate(counts)])
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    same = np.arange(12)[:, None] % 3 == np.arange(12) % 3
    assert apart[same].max() < apart[~same].min()
    assert plane.point_of(request("none")) is None
    assert plane.point_of(request("other", expert_counts=np.ones((3, 4), np.uint32))) is None
