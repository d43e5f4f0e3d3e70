"""The router's own rules: slots, leases, settings, restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tables import counts_for, unit_table

from eldr_serve.artifacts import RoutingTable
from eldr_serve.routing import Placement, PlacementRequest, State, StepCost, StepSums
from eldr_serve.serving import decode_router
from eldr_serve.serving.errors import SwapRefused
from eldr_serve.serving.messages import Exchange, Restore
from eldr_serve.serving.router_state import RouterState


def make(
    workers: int = 3, table: int | None = 3, policy: str = "locality-band", **options: Any
) -> RouterState:
    state = RouterState(
        model_id="m", policy=policy, table=unit_table(table).to_bytes() if table else None, **options
    )
    state.restore(Restore("c", tuple(f"r{w}" for w in range(workers)), None, ()))
    return state


def leased(request_id: str, replica: str, **fields: Any) -> Placement:
    """What a client that placed by itself tells."""
    request = PlacementRequest(request_id, None, 10, **({"max_new_tokens": 0} | fields))
    return Placement(request, State.LEASED, replica=replica)


def ask(state: RouterState, request_id: str, centroid: int | None = None, **fields: Any) -> Placement | None:
    similarity = None
    if centroid is not None:
        table = RoutingTable.from_bytes(state.settings.table or b"")
        similarity = table.similarity(counts_for(centroid))
    fields = {"table_version": state.settings.table_version} | fields
    asked = {"signature": None, "prompt_tokens": 10, "max_new_tokens": 20} | fields
    request = PlacementRequest(request_id, similarity=similarity, **asked)
    (answer,) = state.exchange(Exchange("c", (request,), known_epoch=state.epoch)).placements
    return answer if answer.state is State.LEASED else None


def release(state: RouterState, *request_ids: str) -> None:
    state.exchange(Exchange("c", released=request_ids, known_epoch=state.epoch))


def loads(state: RouterState) -> dict[str, tuple[int, int]]:
    return {w["replica"]: (w["in_flight"], w["kv_tokens"]) for w in state.status()["workers"]}


def test_a_request_goes_to_the_worker_of_its_centroid_and_counts_there_at_once() -> None:
    state = make()
    lease = ask(state, "a", 1)
    assert lease is not None
    assert (lease.replica, lease.slot, lease.band, lease.best) == ("r1", 1, 1, True)
    assert loads(state) == {"r0": (0, 0), "r1": (1, 10), "r2": (0, 0)}
    release(state, "a", "a", "unknown")
    assert loads(state)["r1"] == (0, 0)


def test_progress_adds_kv_tokens() -> None:
    state = make()
    ask(state, "a", 0)
    state.exchange(Exchange("c", progress={"a": 7, "unknown": 3}, known_epoch=state.epoch))
    assert loads(state)["r0"] == (1, 17)


def test_a_vacant_slot_keeps_the_others_centroids_and_a_newcomer_takes_it() -> None:
    state = make()
    state.update_workers(["r0", "r2"])
    lease = ask(state, "a", 2)
    assert lease is not None
    assert lease.replica == "r2"
    orphan = ask(state, "b", 1)  # its worker is gone: the others are equally far, load decides
    assert orphan is not None
    assert orphan.replica == "r0"
    state.update_workers(["r0", "r2", "new"])
    heir = ask(state, "c", 1)
    assert heir is not None
    assert (heir.replica, heir.slot) == ("new", 1)


def test_a_table_for_fewer_or_more_workers_still_places() -> None:
    for k in (1, 2, 5):
        state = make(workers=3, table=k)
        assert state.status()["table"]["refit_advised"]
        placed = [ask(state, str(n), n % k) for n in range(12)]
        assert all(lease is not None for lease in placed)
        assert sum(n for n, _ in loads(state).values()) == 12


def test_an_excluded_replica_is_taken_only_if_there_is_no_other() -> None:
    state = make()
    lease = ask(state, "a", 1, exclude=("r1",))
    assert lease is not None
    assert lease.replica != "r1"
    assert state.counters["rerouted"] == 1
    only = make(workers=1, table=None)
    lease = ask(only, "a", exclude=("r0",))
    assert lease is not None
    assert lease.replica == "r0"


def test_a_request_placed_again_leaves_its_first_worker() -> None:
    state = make()
    ask(state, "a", 1)
    ask(state, "a", 1, exclude=("r1",))
    assert sum(n for n, _ in loads(state).values()) == 1


def test_scores_of_another_table_are_sent_back() -> None:
    state = make()
    assert ask(state, "a", 1, table_version=99) is None
    assert not state.status()["leases"]


def test_without_workers_nothing_is_placed() -> None:
    assert ask(make(workers=0), "a", 1) is None


@pytest.mark.parametrize("bad", ["model", "layers", "experts", "garbage", "empty"])
def test_a_table_that_does_not_fit_is_refused_and_the_old_one_stays(bad: str) -> None:
    state = make()
    state.expect_signatures(2, 8)
    tables = {
        "model": unit_table(3, model="other").to_bytes(),
        "layers": unit_table(3, num_layers=3).to_bytes(),
        "experts": unit_table(3, num_experts=16).to_bytes(),
        "garbage": b"\x00" * 64,
        "empty": b"",
    }
    before = state.settings
    with pytest.raises(SwapRefused) as refusal:
        state.swap_table(tables[bad])
    assert "\n" not in str(refusal.value)
    assert state.settings is before
    assert ask(state, "a", 1) is not None


def test_an_unknown_policy_is_refused_and_the_old_one_stays() -> None:
    state = make()
    for name, parameters in (("nearest", {}), ("random", {"x": 1}), ("locality-band", {"band": -1})):
        with pytest.raises(SwapRefused):
            state.set_policy(name, parameters)
    assert state.status()["policy"] == "locality-band"


def test_a_new_incarnation_takes_settings_and_leases_back_from_its_clients() -> None:
    old = make()
    old.set_policy("locality-band", {"band": 0.0})
    old.swap_table(unit_table(2).to_bytes())
    lease = ask(old, "a", 1)
    assert lease is not None
    new = RouterState(model_id="m", policy="random", table=None)
    refused = new.exchange(Exchange("c", (PlacementRequest("b", None, 1, 1),), known_epoch=old.epoch))
    assert refused.refused == "unknown-client"
    new.restore(Restore("c", ("r0", "r1", "r2"), old.settings, (lease,)))
    new.restore(Restore("c", ("r0", "r1", "r2"), old.settings, (lease,)))  # a second client knows it too
    assert new.settings == old.settings
    assert loads(new) == loads(old)


def test_what_an_operator_says_after_a_restart_is_not_undone_by_a_late_client() -> None:
    old = make()
    old.set_policy("random", {})
    new = RouterState(model_id="m", policy="locality-band", table=None)
    new.set_policy("least-tokens", {})
    new.restore(Restore("late", (), old.settings, ()))
    assert new.status()["policy"] == "least-tokens"


def test_leases_of_a_client_that_is_gone_are_dropped_after_its_timeout() -> None:
    now = [0.0]
    state = make(client_timeout_s=30.0, clock=lambda: now[0])
    ask(state, "a", 1)
    now[0] = 29.0
    assert state.drop_silent_clients() == 0
    now[0] = 31.0
    assert state.drop_silent_clients() == 1
    assert set(loads(state).values()) == {(0, 0)}


def test_a_corrected_lease_moves_the_load() -> None:
    state = make()
    ask(state, "a", 1)
    state.exchange(Exchange("c", held=(leased("a", "r2"),), known_epoch=state.epoch))
    assert loads(state) == {"r0": (0, 0), "r1": (0, 0), "r2": (1, 10)}


class Accounting(RuleBasedStateMachine):
    """Whatever happens in whatever order, loads equal a recount of the leases and end at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.state = make()
        self.model: dict[str, tuple[str, int]] = {}  # request -> replica, tokens

    @rule(number=st.integers(0, 30), centroid=st.integers(0, 2) | st.none())
    def place(self, number: int, centroid: int | None) -> None:
        lease = ask(self.state, str(number), centroid)
        assert lease is not None
        self.model[str(number)] = (lease.replica, 10)

    @rule(number=st.integers(0, 30))
    def release(self, number: int) -> None:
        release(self.state, str(number))
        self.model.pop(str(number), None)

    @rule(number=st.integers(0, 30), tokens=st.integers(0, 50))
    def progress(self, number: int, tokens: int) -> None:
        self.state.exchange(Exchange("c", progress={str(number): tokens}, known_epoch=self.state.epoch))
        if str(number) in self.model:
            replica, held = self.model[str(number)]
            self.model[str(number)] = (replica, max(held, 10 + tokens))

    @rule(gone=st.sets(st.integers(0, 2), max_size=2))
    def workers(self, gone: set[int]) -> None:
        self.state.update_workers([f"r{w}" for w in range(3) if w not in gone])

    @invariant()
    def loads_equal_a_recount(self) -> None:
        for replica, load in loads(self.state).items():
            mine = [tokens for r, tokens in self.model.values() if r == replica]
            assert load == (len(mine), sum(mine))

    def teardown(self) -> None:
        release(self.state, *self.model)
        assert set(loads(self.state).values()) <= {(0, 0)}


TestAccounting = Accounting.TestCase
TestAccounting.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)


def held(state: RouterState) -> dict[str, int]:
    return {name: worker for name, (worker, _) in state._placer.policy.active.held.items()}  # type: ignore[attr-defined]


def test_marginal_cost_knows_who_is_where_through_changes_of_policy_table_and_workers() -> None:
    state = make(policy="marginal-cost")
    for n in range(6):
        assert ask(state, str(n), signature=counts_for(n % 3)) is not None
    placed = {name: running.slot for name, running in state._placer.running.items()}
    assert held(state) == placed
    assert len({placed[n] for n in "03"}) == len({placed[n] for n in "14"}) == 1  # like with like
    state.set_policy("shortest-queue", {})
    release(state, "0")
    state.set_policy("marginal-cost", {})
    state.swap_table(unit_table(3).to_bytes())
    del placed["0"]
    assert held(state) == placed
    state.update_workers(["r0", "r2"])
    assert held(state) == {name: worker for name, worker in placed.items() if worker != 1}
    state.update_workers(["r0", "r2", "r9"])  # a newcomer in the vacant slot holds nothing
    assert held(state) == {name: worker for name, worker in placed.items() if worker != 1}
    release(state, *placed)
    assert held(state) == {}


def test_all_steps_are_in_the_totals_however_old() -> None:
    now = [0.0]
    state = make(clock=lambda: now[0])
    state.observe_steps(StepSums.of([2, 4], [9, 9], [30, 50], [0.01, 0.02]))
    assert state.status()["decode_totals"] is None  # of how many layers is not known
    state.expect_signatures(5, 64)
    now[0] += 36_000
    state.observe_steps(StepSums.of([6], [9], [20], [0.03]))
    totals = {"steps": 3, "requests": 12, "active_experts": 20, "seconds": 0.06}
    assert state.status()["decode_totals"] == pytest.approx(totals)


def test_the_policy_follows_what_steps_cost() -> None:
    now = [0.0]
    state = make(policy="marginal-cost", clock=lambda: now[0])
    assert state.status()["step_cost"] == {"steps": 0.0}
    rng = np.random.default_rng(0)
    batch, experts = rng.integers(1, 30, 300), rng.integers(10, 200, 300)
    for cost in (StepCost(1e-3, 1e-5, 0.0, 9e-5), StepCost(1e-3, 1e-5, 0.0, 2e-5)):
        state.observe_steps(StepSums.of(batch, 100 * batch, experts, cost.seconds(batch, 0, experts)))
        now[0] += 36_000
    shown = state.status()["step_cost"]
    assert shown["per_expert_s"] == pytest.approx(2e-5, rel=0.01)
    assert shown["relative_error"] < 0.05
    assert state._placer.policy.cost.per_expert_s == shown["per_expert_s"]  # type: ignore[attr-defined]
    state.set_policy("marginal-cost", {"prior_tokens": 1.0})
    assert state._placer.policy.cost.per_expert_s == shown["per_expert_s"]  # type: ignore[attr-defined]


class _Failing:
    """A predictor that never has an answer."""

    def predict(self, *_: Any) -> Any:
        raise RuntimeError("no")

    def learn(self, *_: Any) -> None: ...


class _Metric:
    """Stands in for those of ray.util.metrics."""

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.name, self.total = name, 0

    def inc(self, value: int, tags: dict[str, str]) -> None:
        self.total += value

    def observe(self, value: float, tags: dict[str, str]) -> None: ...

    def set(self, value: float, tags: dict[str, str]) -> None: ...


def test_failures_of_the_predictor_are_in_the_status_and_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(decode_router, kind, _Metric)
    state, metrics = make(policy="balance-route-horizon"), decode_router._Metrics()
    assert state.status()["counters"]["predictor_failures"] == 0
    state._placer.policy.predictor = _Failing()  # type: ignore[attr-defined]
    for request in ("a", "b"):  # it is asked about those that run when the next is placed
        ask(state, request)
    failures = state.status()["counters"]["predictor_failures"]
    assert failures > 0
    state.set_policy("shortest-queue", {})
    assert state.status()["counters"]["predictor_failures"] == failures
    for _ in range(2):
        metrics.load(state)
    assert metrics._failures.name == "eldr_predictor_failures_total"  # type: ignore[attr-defined]
    assert metrics._failures.total == failures  # type: ignore[attr-defined]
