"""The router's state: positions, leases, settings, restarts."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from eldr_serve.errors import SwapRefusedError
from eldr_serve.router import state as state_module
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import NamedPolicy, Restore
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.cost_file import FittedCost
from eldr_serve.scheduling.types import LeaseState
from eldr_serve.validation import first_problem
from tests.support.clock import Clock
from tests.support.fake_router import SLOTS, ingress_lease, loads, place, place_one, release, router_state
from tests.support.tables import request, unit_table


def test_a_request_goes_to_the_worker_of_its_centroid_and_adds_to_its_load() -> None:
    state = router_state()
    lease = place_one(state, "a", 1)
    assert (lease.worker, lease.position, lease.num_candidates, lease.is_most_similar) == ("r1", 1, 1, True)
    assert loads(state) == {"r0": (0, 0), "r1": (1, 10), "r2": (0, 0)}
    state.leases.set_generated_tokens({"a": 7, "unknown": 3})
    assert loads(state)["r1"] == (1, 17)
    state.leases.adopt_lease(ingress_lease("a", "r2"))  # it was served elsewhere
    assert loads(state)["r2"][0] == 1
    release(state, "a", "a", "unknown")
    assert set(loads(state).values()) == {(0, 0)}


def test_a_new_replica_takes_a_vacant_position_and_others_keep_theirs() -> None:
    state = router_state()
    state.ingresses.set_reachable_workers("c", ["r0", "r2"])
    assert place_one(state, "a", 2).worker == "r2"
    # Its worker is lost: the others are equally similar, so load decides.
    assert place_one(state, "b", 1).worker == "r0"
    state.ingresses.set_reachable_workers("c", ["r0", "r2", "new"])
    lease = place_one(state, "c", 1)
    assert (lease.worker, lease.position) == ("new", 1)


def test_an_ingress_that_loses_one_channel_removes_the_worker_only_for_itself() -> None:
    state = router_state(ingresses="cd")
    state.ingresses.set_reachable_workers("c", ["r0", "r2"])
    assert state.positions.workers == ["r0", "r1", "r2"]
    assert place_one(state, "a", 1).worker != "r1"
    similarity, version = np.eye(3)[1], state.settings.table_version
    (lease,) = place(state, request("b", similarity=similarity, table_version=version), ingress="d")
    assert (lease.worker, lease.position) == ("r1", 1)
    state.ingresses.set_reachable_workers("d", ["r0", "r2"])
    assert state.positions.workers == ["r0", None, "r2"]


def test_an_ingress_that_connects_with_some_channels_removes_no_worker() -> None:
    state = router_state()
    state.restore_from_ingress(Restore("new", ("r2",)))
    assert state.positions.workers == ["r0", "r1", "r2"]
    leases = place(state, "a", "b", ingress="new") + place(state, "c", "d", "e")
    assert {lease.worker for lease in leases[:2]} == {"r2"}
    assert {lease.worker for lease in leases[2:]} == {"r0", "r1"}


def test_an_ingress_without_workers_of_its_own_gets_those_of_others() -> None:
    state = router_state(ingresses="cd")
    state.ingresses.set_reachable_workers("c", ["r1"])
    assert place_one(state, "a", exclude=("r1",)).worker == "r1"  # the others cannot be reached
    state.ingresses.set_reachable_workers("c", [])
    assert place_one(state, "b", 0).worker == "r0"


def test_an_ingress_that_returns_replaces_its_report_unless_it_knows_no_worker_yet() -> None:
    state = router_state(ingresses="c")
    state.restore_from_ingress(Restore("c"))
    assert state.positions.num_live == 3
    state.restore_from_ingress(Restore("c", ()))
    assert state.positions.num_live == 0


def test_workers_of_a_lost_ingress_stay_until_it_is_dropped() -> None:
    state = router_state(ingresses="c")
    state.restore_from_ingress(Restore("d", ("r0", "own")))
    assert state.positions.workers == ["r0", "r1", "r2", "own"]
    state.ingresses.drop_ingress("d")
    assert state.positions.workers == ["r0", "r1", "r2"]
    state.ingresses.drop_ingress("c")
    assert state.positions.workers == ["r0", "r1", "r2"]  # a router without ingresses keeps its workers


def test_the_steps_of_lost_replicas_are_not_kept() -> None:
    state = router_state()
    steps = StepSums.from_steps([1], [1], [4], [0.1])
    for replica in ("r0", "r1"):
        state.observe_steps(steps, replica)
    state.ingresses.set_reachable_workers("c", ["r1"])
    state.observe_steps(steps, "r0")  # a late report
    state.observe_steps(StepSums.from_prompts([2], [90], [500], [0.1]), "r1")
    assert {name: len(reports) for name, reports in state.view._reports.items()} == {"r1": 1}


def test_the_steps_of_a_repeated_report_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = router_state()
    state.expect_counts(2, 8)
    steps = StepSums.from_steps([1], [1], [4], [0.1])
    for worker, number in (("r0", 1), ("r0", 1), ("r1", 1), ("r0", 2), ("r0", 1), ("r1", 1)):
        state.observe_steps(steps, worker, number=number)
    assert router_status(state)["decode_totals"]["steps"] == 3
    monkeypatch.setattr(state_module, "_MAX_REPORTERS", 2)
    for worker in ("r2", "r2", "r1", "r0"):  # r2 replaces r0, which has not reported for longest
        state.observe_steps(steps, worker, number=1)
    assert router_status(state)["decode_totals"]["steps"] == 5


def test_a_table_for_fewer_or_more_workers_can_be_used() -> None:
    for k in (1, 2, 5):
        state = router_state(workers=3, table=k)
        assert router_status(state)["table"]["refit_advised"]
        assert {place_one(state, str(n), n % k).state for n in range(12)} == {LeaseState.GRANTED}
        assert sum(n for n, _ in loads(state).values()) == 12


def test_an_excluded_replica_is_used_only_if_there_is_no_other() -> None:
    state = router_state()
    place_one(state, "a", 1)
    assert place_one(state, "a", 1, exclude=("r1",), worker_failed=True).worker != "r1"
    assert sum(n for n, _ in loads(state).values()) == 1  # it left its first worker
    assert place_one(state, "b", 1, exclude=("r1",)).worker != "r1"  # an ejected one
    assert state.counters["rerouted"] == 1
    assert place_one(router_state(workers=1, table=None), "a", exclude=("r0",)).worker == "r0"


def test_a_request_is_not_placed_without_workers_or_with_old_scores() -> None:
    for state, version in ((router_state(), 99), (router_state(workers=0), 1)):
        assert place_one(state, "a", 1, table_version=version).state is LeaseState.SENT
        assert not router_status(state)["leases"]


@pytest.mark.parametrize(
    "bad", [{"model": "other"}, {"num_layers": 3}, {"num_experts": 16}, b"\x00" * 64, b""], ids=repr
)
def test_a_table_that_does_not_fit_is_refused_and_the_old_one_stays(bad: Any) -> None:
    state = router_state()
    state.expect_counts(2, 8)
    before = state.settings
    with pytest.raises(SwapRefusedError, match=r"\A.+\Z"):  # one line
        state.live_settings.swap_table(bad if isinstance(bad, bytes) else unit_table(3, **bad).to_bytes())
    assert state.settings is before
    assert place_one(state, "a", 1).state is LeaseState.GRANTED


def test_a_restarted_router_restores_settings_and_leases_from_its_ingresses() -> None:
    old = router_state()
    old.live_settings.set_policy("locality-band", {"band": 0.0})
    old.live_settings.swap_table(unit_table(2).to_bytes())
    lease = place_one(old, "a", 1)
    new = RouterState(model_id="m", policy="random", table=None)
    for _ in range(2):  # a second time, after another loss of the channel
        new.restore_from_ingress(Restore("c", ("r0", "r1", "r2"), ("a",), old.settings))
        new.leases.adopt_lease(replace(lease, ingress="c"))
    assert new.settings == old.settings
    assert new.counters["leases_restored"] == 1
    assert loads(new) == loads(old)


def test_a_restarted_router_restores_positions_from_the_first_ingress_that_knows_them() -> None:
    old = router_state()
    sent: list[tuple[str | None, ...]] = []
    old.set_callbacks(on_positions=sent.append)
    old.ingresses.set_reachable_workers("c", ["r1", "r2"])
    old.ingresses.set_reachable_workers("c", ["r1", "r2", "z"])
    old.ingresses.set_reachable_workers("c", ["r1", "r2", "z"])  # no change
    old.ingresses.set_reachable_workers("c", ["a", "r1", "r2", "z"])
    assert sent == [(None, "r1", "r2"), ("z", "r1", "r2"), ("z", "r1", "r2", "a")]
    new = router_state(workers=0, ingresses="")
    new.restore_from_ingress(Restore("late", positions=("x",)))  # it reaches no worker yet
    new.restore_from_ingress(Restore("c", ("a", "r1", "z"), positions=sent[-1]))  # r2 was lost meanwhile
    assert new.positions.workers == ["z", "r1", None, "a"]
    new.restore_from_ingress(Restore("d", ("a", "b", "r1", "z"), positions=("r1", "z", "b")))
    assert new.positions.workers == ["z", "r1", "b", "a"]
    assert [place_one(new, str(n), n).worker for n in range(2)] == ["z", "r1"]


def test_the_deployed_policy_replaces_a_restored_one_that_cannot_be_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = router_state()
    live = replace(old.settings, version=7, policy="missing_module:Policy", shadow=NamedPolicy("random"))
    new = router_state(policy="least-tokens")
    new.restore_from_ingress(Restore("c", ("r0", "r1", "r2"), settings=live))
    assert (new.settings.policy, new.settings.shadow) == ("least-tokens", NamedPolicy("random"))
    assert new.settings.version > live.version  # then ingresses do not restore the policy again
    live = replace(new.settings, version=new.settings.version + 1, policy="random")
    new.restore_from_ingress(Restore("d", settings=replace(live, shadow=NamedPolicy("random", {"gone": 1}))))
    assert (new.settings.policy, new.settings.shadow) == ("random", None)
    assert new.counters["policies_discarded"] == 2
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the deployed policy replaces the restored one",
        "the deployed shadow replaces the restored one",
    ]
    assert place_one(new, "a").state is LeaseState.GRANTED


def test_a_restored_table_of_another_shape_is_discarded_and_the_rest_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = router_state()
    old.live_settings.set_policy("locality-band", {"band": 0.0})
    old.live_settings.swap_table(unit_table(3, num_layers=5).to_bytes())  # the engines' shape is unknown
    lease = place_one(old, "a")
    new = router_state(policy="random", ingresses="d")
    new.expect_counts(2, 8)
    new.restore_from_ingress(Restore("c", ("r0", "r1", "r2"), ("a",), old.settings))
    new.leases.adopt_lease(replace(lease, ingress="c"))
    assert caplog.messages == [
        "requests are placed without a table: the table is for 5 MoE layers x 8 experts, but the prefill "
        "engines report 2 x 8"
    ]
    tableless = replace(old.settings, table=None, table_version=old.settings.table_version + 1)
    assert new.settings == replace(tableless, version=new.settings.version)
    assert new.settings.version > old.settings.version  # then ingresses do not restore the table again
    assert (new.live_settings.table, loads(new)) == (None, loads(old))


def test_a_late_ingress_does_not_undo_an_operators_change_after_a_restart() -> None:
    old = router_state()
    old.live_settings.set_policy("random", {})
    new = RouterState(model_id="m", policy="locality-band", table=None)
    new.live_settings.set_policy("least-tokens", {})
    new.restore_from_ingress(Restore("late", settings=old.settings))
    assert router_status(new)["policy"] == "least-tokens"


def test_the_totals_include_steps_of_any_age() -> None:
    clock = Clock()
    state = router_state(clock=clock)
    state.observe_steps(StepSums.from_steps([2, 4], [9, 9], [30, 50], [0.01, 0.02]))
    assert router_status(state)["decode_totals"] is None  # the number of layers is unknown
    state.expect_counts(5, 64)
    clock.now += 36_000
    state.observe_steps(StepSums.from_steps([6], [9], [20], [0.03]))
    totals = {"steps": 3, "requests": 12, "active_experts": 20, "seconds": 0.06}
    totals["token_seconds"] = 2 * 0.01 + 4 * 0.02 + 6 * 0.03
    assert router_status(state)["decode_totals"] == pytest.approx(totals)


def test_the_policy_uses_the_measured_step_cost() -> None:
    clock = Clock()
    state = router_state(policy="marginal-cost", clock=clock)
    assert router_status(state)["step_cost"] == {"steps": 0.0}
    rng = np.random.default_rng(0)
    batch, experts = rng.integers(1, 30, 300), rng.integers(10, 200, 300)
    for step_cost in (StepCost(1e-3, 1e-5, 0.0, 9e-5), StepCost(1e-3, 1e-5, 0.0, 2e-5)):
        state.observe_steps(
            StepSums.from_steps(batch, 100 * batch, experts, step_cost.seconds(batch, 0, experts))
        )
        clock.now += 36_000
    cost = router_status(state)["step_cost"]
    assert cost["per_expert_s"] == pytest.approx(2e-5, rel=0.01)
    assert cost["relative_error"] < 0.05
    assert state.placer.policy.cost.per_expert_s == cost["per_expert_s"]
    state.live_settings.set_policy("marginal-cost", {"affinity": 0.0})
    assert state.placer.policy.cost.per_expert_s == cost["per_expert_s"]


def test_measured_steps_replace_the_prior_cost() -> None:
    prior = StepCost(3e-3, 2e-5, 0.0, 3e-6, batch_s={1: 0.0, 8: 1e-4, 32: 9e-4})
    measured = StepCost(1e-3, 1e-5, 0.0, 9e-5)
    state = router_state(policy="marginal-cost", cost=prior)
    assert state.placer.policy.cost == prior
    assert router_status(state)["step_cost"] == {"steps": 0.0} | prior.as_dict()
    state.live_settings.set_policy("marginal-cost", {"affinity": 0.0})
    assert state.placer.policy.cost == prior
    rng = np.random.default_rng(0)
    batch, experts = rng.integers(1, 30, 300), rng.integers(10, 200, 300)
    state.observe_steps(StepSums.from_steps(batch, 100 * batch, experts, measured.seconds(batch, 0, experts)))
    assert state.placer.policy.cost.per_expert_s == pytest.approx(9e-5, rel=0.01)
    assert state.placer.policy.cost.batch_s == {}
    assert router_status(state)["step_cost"]["relative_error"] < 0.05


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"per_expert_s": -1}, "cost.per_expert_s must be at least 0, got -1"),
        ({"per_expert": 1}, "did you mean 'per_expert_s'"),
        ({"batch_s": {1: 0, 8: -1}}, "cost.batch_s.8 must be at least 0, got -1"),
        ({"batch_s": {0: 0, 8: 1}}, "cost.batch_s.0"),
        ({"batch_s": {"few": 0, 8: 1}}, "cost.batch_s.few"),
        ({"batch_s": {2: 0.5, 8: 0.25}}, "must not fall, but is 0.5 s for 2 requests and 0.25 s for 8"),
        ({"batch_s": {2: 0.5}}, "cost.batch_s must list two batches or more"),
        (3, "cost must be a mapping of names to values, got 3"),
        ("none.json", "cost is 'none.json': it cannot be read"),
        ("short.json", "short.json is not a fitted step cost"),
        ("negative.json", "negative.json is not a fitted step cost: cost.per_expert_s must be at least 0"),
    ],
)
def test_a_prior_cost_that_cannot_be_used_is_refused_in_one_sentence(
    cost: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = FittedCost(
        cost=StepCost(), steps=9, rms_relative_error=0.1, median_relative_error=None, source="a test"
    )
    file.save(Path("good.json"))
    assert RouterSettings(cost="good.json").cost == StepCost()
    content = Path("good.json").read_text()
    Path("short.json").write_text(content[:-20])
    Path("negative.json").write_text(re.sub(r'("per_expert_s"): [^,\n]*', r"\1: -1", content))
    with pytest.raises(ValidationError) as refused:
        RouterSettings(cost=cost)
    assert words in first_problem(refused.value, {"cost": cost}, model=RouterSettings)


def test_failures_of_the_length_predictor_are_in_the_status() -> None:
    state = router_state(policy="balance-route-horizon")
    assert router_status(state)["counters"]["predictor_failures"] == 0
    state.placer.policy.length_predictor = None  # every call of it fails
    for name in "ab":  # the second placement needs the length of the first
        place_one(state, name)
    failures = router_status(state)["counters"]["predictor_failures"]
    assert failures > 0
    state.live_settings.set_policy("shortest-queue", {})
    assert router_status(state)["counters"]["predictor_failures"] == failures


def test_only_recent_expert_counts_are_kept_for_a_refit() -> None:
    state = router_state()
    for number in range(1100):
        place(state, request(f"r{number}", expert_counts=np.full((2, 8), number, np.uint16)))
        release(state, f"r{number}")
    place(state, request("bare"))
    assert [int(counts[0, 0]) for counts in state.leases.recent_counts] == list(range(76, 1100))


def test_the_counts_of_a_stale_request_are_kept_when_it_is_scored_again() -> None:
    state = router_state()
    version = state.settings.table_version
    fields: dict[str, Any] = {"similarity": np.eye(3)[1], "expert_counts": np.ones((2, 8), np.uint16)}
    (stale,) = place(state, request("a", table_version=version + 1, **fields))
    assert stale.state is LeaseState.SENT
    assert not state.leases.recent_counts
    place(state, request("a", table_version=version, **fields))
    assert len(state.leases.recent_counts) == 1


def test_counts_are_kept_once_when_a_request_is_placed() -> None:
    """A request may be sent again while it waits, or while no worker is available."""
    state = router_state(policy=SLOTS)  # a slot on each of three workers
    requests = [
        request(f"r{number}", expert_counts=np.ones((2, 8), np.uint16), may_wait=True) for number in range(6)
    ]
    state.ingresses.set_reachable_workers("c", [])
    place(state, requests[0])
    assert not state.leases.recent_counts
    state.ingresses.set_reachable_workers("c", ["r0", "r1", "r2"])
    place(state, *requests)
    waiting = [one for one in requests if one.request_id in state.placer.queue.leases]
    place(state, *waiting)
    assert (len(waiting), len(state.leases.recent_counts)) == (3, 3)
    release(state, *list(state.placer.running))
    assert (state.leases.queue_size, len(state.leases.recent_counts)) == (0, 6)


def test_pending_counts_are_of_the_requests_that_decode_or_wait() -> None:
    state = router_state(policy="balance-route", parameters={"slots": 1})
    for number in range(6):
        counts = None if number == 1 else np.full((2, 8), number, np.uint16)
        place(state, request(f"r{number}", expert_counts=counts, may_wait=True))
    placer = state.placer
    assert placer.queue.leases
    order = [*placer.running, *placer.queue.leases]
    known = [int(name[1:]) for name in order if name != "r1"]
    assert [int(counts[0, 0]) for counts in placer.pending_counts()] == known
    ended = next(name for name in placer.running if name != "r1")
    release(state, ended)
    assert int(ended[1:]) not in [int(counts[0, 0]) for counts in placer.pending_counts()]


@pytest.mark.parametrize("policy", ["shortest-queue", "least-tokens", "marginal-cost", "locality-band"])
@pytest.mark.parametrize("fitted", [2, 3, 4])
def test_a_new_worker_gets_requests_at_once(policy: str, fitted: int) -> None:
    """The table may lack a centroid for it."""
    state = router_state(workers=3, table=fitted, policy=policy)
    for number in range(12):
        place_one(state, f"before{number}", number % fitted)
    state.ingresses.set_reachable_workers("c", ["r0", "r1", "r2", "new"])
    workers = {place_one(state, f"after{number}", number % fitted).worker for number in range(4)}
    assert "new" in workers
