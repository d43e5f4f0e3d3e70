"""The decode queue: order, leases, and that no request is lost or served twice."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import Restore
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.clock import Clock
from tests.support.fake_router import SLOTS, SlotPolicy, ingress_lease, loads, place, release, router_state
from tests.support.tables import counts_for, request, unit_table


def router(workers: int = 2, **options: Any) -> RouterState:
    """Return a router with SlotPolicy that collects its leases for `new_leases`."""
    state = router_state(workers=workers, table=2, policy=SLOTS, **options)
    state.granted = []
    state.set_callbacks(on_granted=state.granted.extend)
    return state


def new_leases(state: RouterState) -> dict[str, Lease]:
    """Return the leases since the last call, by request."""
    leases = {lease.request_id: lease for lease in state.granted}
    state.granted.clear()
    return leases


def queued_names(leases: list[Lease]) -> set[str]:
    return {lease.request_id for lease in leases if lease.state is LeaseState.QUEUED}


def policy(state: RouterState) -> SlotPolicy:
    return state.placer.policy


def test_a_restarted_router_restores_the_fields_that_policies_read() -> None:
    old = router()
    (lease,) = place(old, request("a", prompt_key="k", may_wait=True))
    new = router(ingresses="")
    new.restore_from_ingress(Restore("c", ("r0", "r1"), ("a",), old.settings))
    new.leases.adopt_lease(replace(lease))
    for state in (old, new):
        assigned = policy(state).assigned["a"]
        assert (assigned.prompt_tokens, assigned.max_new_tokens, assigned.prompt_key) == (10, 20, "k")


def test_requests_do_not_wait_while_slots_are_free() -> None:
    state = router()
    assert [lease.worker for lease in place(state, "a", "b")] == ["r0", "r1"]
    release(state, "a")
    assert place(state, "c")[0].worker == "r0"
    assert new_leases(state).keys() == {"a", "b", "c"}
    assert state.counters["queued"] == 0


def test_requests_of_all_ingresses_wait_in_order_of_arrival() -> None:
    clock = Clock()
    state = router(ingresses="cd", clock=clock)
    assert queued_names(place(state, "a", "b", "x")) == {"x"}
    clock.now = 2.0
    assert queued_names(place(state, "y", ingress="d")) == {"y"}
    assert queued_names(place(state, "z")) == {"z"}
    assert router_status(state)["decode_queue"] == {"size": 3, "oldest_wait_s": 2.0}
    clock.now = 3.0
    new_leases(state)
    release(state, "a", "b")
    leases = new_leases(state)
    assert leases.keys() == {"x", "y"}
    assert (leases["x"].worker, leases["x"].waited_s, leases["x"].reason) == ("r0", 3.0, "slot")
    assert (leases["y"].worker, leases["y"].ingress) == ("r1", "d")
    assert state.counters["queued"] == 3
    assert state.counters["placed"] == 4


def test_requests_that_must_not_wait_are_placed_at_once() -> None:
    state = router(workers=1)
    place(state, "a", "b")
    must_not_wait = [request("c"), request("d", may_wait=True, worker_failed=True)]
    assert [lease.reason for lease in place(state, *must_not_wait)] == ["at-once"] * 2
    assert not queued_names(place(router(workers=1, parameters={"queue": False}), "a", "b", "c"))


def test_a_request_waits_for_a_worker_that_its_ingress_has_not_ejected() -> None:
    state = router()
    place(state, "a", "b")
    waits = [request("c", may_wait=True, exclude=("r0",)), request("d", may_wait=True)]
    assert queued_names(place(state, *waits)) == {"c", "d"}
    new_leases(state)
    release(state, "a")  # r0, which only the second one may use
    assert {name: lease.worker for name, lease in new_leases(state).items()} == {"d": "r0"}
    release(state, "b")
    assert {name: lease.worker for name, lease in new_leases(state).items()} == {"c": "r1"}


def test_a_repeated_request_keeps_its_turn() -> None:
    state = router(workers=1)
    place(state, "a", "b", "c")
    assert queued_names(place(state, "b")) == {"b"}
    new_leases(state)
    release(state, "a")
    assert new_leases(state).keys() == {"b"}
    assert state.counters["queued"] == 2


def test_a_table_swap_invalidates_the_scores_of_queued_requests() -> None:
    state = router(workers=1)
    place(state, "a")
    score = unit_table(2).similarity(counts_for(1))
    assert queued_names(place(state, request("b", similarity=score, table_version=1, may_wait=True))) == {"b"}
    assert policy(state).waiting[0].similarity is not None
    state.live_settings.swap_table(unit_table(3).to_bytes())
    assert policy(state).waiting[0].similarity is None
    release(state, "a")
    assert not new_leases(state)["b"].is_most_similar


def test_an_operators_policy_places_queued_requests_after_its_settings_are_sent() -> None:
    state, events = router(workers=1), []
    place(state, "a", "b")
    state.set_callbacks(
        on_granted=lambda leases: events.extend(lease.request_id for lease in leases),
        on_settings=lambda settings: events.append(settings.parameters),
    )
    state.live_settings.set_policy(SLOTS, {"slots": 2})
    assert events == [{"slots": 2}, "b"]


def test_restored_settings_place_no_request_that_has_ended() -> None:
    state = router(workers=1)
    place(state, "a", "b")
    new_leases(state)
    newer = replace(state.settings, version=state.settings.version + 1, parameters={"slots": 2})
    state.restore_from_ingress(Restore("c", ("r0",), ("a",), newer))
    assert state.settings.parameters == {"slots": 2}
    assert not new_leases(state)
    assert (state.placer.running.keys(), state.leases.queue_size) == ({"a"}, 0)


def test_requests_of_a_lost_ingress_are_dropped_and_counted() -> None:
    state = router(workers=1, ingresses="cd")
    place(state, "a", "b")
    place(state, "x", ingress="d")
    state.ingresses.drop_ingress("c")
    assert state.counters["leases_of_lost_ingresses"] == state.counters["queued_of_lost_ingresses"] == 1
    assert state.ingresses.ids == {"d"}
    assert state.placer.running.keys() == {"x"}
    assert not state.leases.queue_size
    assert policy(state).aborted == ["a"]


def test_the_policy_gets_all_progress_before_the_end() -> None:
    state = router()
    place(state, "a")
    state.leases.set_generated_tokens({"a": 3, "unknown": 9})
    assert policy(state).generated == {"a": 3}
    state.leases.set_generated_tokens({"a": 7})
    release(state, "a")
    assert policy(state).lengths == [7]


def test_running_requests_survive_a_change_of_workers_and_of_policy() -> None:
    state = router()
    place(state, "a", "b")
    state.leases.set_generated_tokens({"b": 4})
    state.ingresses.set_reachable_workers("c", ["r1", "r2"])
    assert policy(state).running == {"b": 1}  # r2 has the position of r0
    assert policy(state).lengths == [0]  # length of "a", whose worker is gone
    assert policy(state).aborted == ["a"]
    state.live_settings.set_policy(SLOTS, {"slots": 3})
    assert policy(state).running == {"b": 1}
    assert policy(state).generated == {"b": 4}
    assert policy(state).lengths == []


def test_a_queued_request_gets_a_worker_that_its_ingress_can_reach() -> None:
    state = router(ingresses="cd")
    place(state, "a", "b")
    place(state, "c")
    place(state, "d", ingress="d")
    new_leases(state)
    state.ingresses.set_reachable_workers("c", ["r1"])
    release(state, "a", "b")
    assert {name: lease.worker for name, lease in new_leases(state).items()} == {"c": "r1", "d": "r0"}


_INGRESSES = st.sampled_from("cd")
_NUMBERS = st.integers(0, 20)
_POLICIES = [(SLOTS, {"slots": 2}), (SLOTS, {"slots": 5}), (SLOTS, {"queue": False}), ("locality-band", {})]


class Conservation(RuleBasedStateMachine):
    """In any order of events, each request waits or has one lease, and loads end at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.live = {ingress: {"r0", "r1", "r2"} for ingress in "cd"}
        self.state = router(workers=3, ingresses="cd", clock=lambda: self.now, parameters={"slots": 2})
        self.waits: dict[str, str] = {}  # request -> ingress, in the ingresses' view
        self.leases: dict[str, tuple[str, str]] = {}  # request -> ingress, worker
        self.tokens: dict[str, int] = {}  # generated tokens of requests with a lease
        self.state.set_callbacks(on_granted=self.take_grants)

    def take_grants(self, leases: list[Lease]) -> None:
        for lease in leases:
            assert self.waits.pop(lease.request_id, lease.ingress) == lease.ingress
            assert lease.worker in self.reachable(lease.ingress)
            assert lease.request_id not in self.leases  # each lease is granted once
            self.leases[lease.request_id] = (lease.ingress, lease.worker)

    @property
    def workers(self) -> set[str]:
        return set(filter(None, self.state.positions.workers))

    def reachable(self, ingress: str) -> set[str]:
        """Return the workers that an ingress's requests may get: all, if it has reported none."""
        return self.live.get(ingress) or self.workers

    @rule(numbers=st.lists(_NUMBERS, max_size=5, unique=True), ingress=_INGRESSES)
    def place(self, numbers: list[int], ingress: str) -> None:
        names = [f"{ingress}{number}" for number in numbers]
        names = [name for name in names if name not in self.leases]
        for name, lease in zip(names, place(self.state, *names, ingress=ingress), strict=True):
            waited = self.waits.pop(name, None)
            if lease.state is LeaseState.GRANTED:
                self.leases[name] = (ingress, lease.worker)
            elif lease.state is LeaseState.QUEUED or waited is not None:  # it keeps its turn
                self.waits[name] = ingress
            if lease.state is LeaseState.SENT:
                assert not self.workers

    @rule(number=_NUMBERS, ingress=_INGRESSES)
    def end(self, number: int, ingress: str) -> None:
        """Finish, cancel or expire a request: the router does not distinguish them."""
        name = f"{ingress}{number}"
        for known in (self.waits, self.leases, self.tokens):
            known.pop(name, None)
        release(self.state, name)

    @rule(number=_NUMBERS, ingress=_INGRESSES, worker=st.sampled_from(["r0", "r1"]))
    def hold(self, number: int, ingress: str, worker: str) -> None:
        """Report a lease that the ingress has given by local fallback."""
        name = f"{ingress}{number}"
        lease, known = ingress_lease(name, worker, ingress), self.state.placer.running.get(name)
        self.waits.pop(name, None)
        if known is None or (known.worker, known.policy) != (lease.worker, lease.policy):
            self.tokens.pop(name, None)  # otherwise the lease is restored with its known tokens
        self.leases[name] = (ingress, worker)
        self.state.leases.adopt_lease(lease)
        self.state.leases.place([])  # the router does so at the end of an iteration

    @rule(number=_NUMBERS, ingress=_INGRESSES, tokens=st.integers(0, 50))
    def progress(self, number: int, ingress: str, tokens: int) -> None:
        name = f"{ingress}{number}"
        if name in self.state.placer.running:
            self.tokens[name] = max(self.tokens.get(name, 0), tokens)
        self.state.leases.set_generated_tokens({name: tokens})

    @rule(ingress=_INGRESSES, live=st.sets(st.sampled_from(["r0", "r1", "r2", "r3"])))
    def change_workers(self, ingress: str, live: set[str]) -> None:
        self.live[ingress] = live
        self.state.ingresses.set_reachable_workers(ingress, live)

    @rule(change=st.sampled_from(_POLICIES))
    def change_policy(self, change: tuple[str, dict[str, Any]]) -> None:
        self.state.live_settings.set_policy(*change)

    @rule(k=st.integers(1, 3))
    def swap(self, k: int) -> None:
        self.state.live_settings.swap_table(unit_table(k).to_bytes())

    @rule(ingress=_INGRESSES)
    def lose(self, ingress: str) -> None:
        """Lose the ingress for too long. It returns without leases and workers."""
        self.live.pop(ingress, None)
        self.state.ingresses.drop_ingress(ingress)
        self.waits = {name: owner for name, owner in self.waits.items() if owner != ingress}
        self.tokens = {name: tokens for name, tokens in self.tokens.items() if name[0] != ingress}
        self.leases = {name: lease for name, lease in self.leases.items() if lease[0] != ingress}
        self.state.restore_from_ingress(Restore(ingress))

    @invariant()
    def each_request_waits_or_runs(self) -> None:
        running, queue = set(self.state.placer.running), set(self.state.placer.queue.leases)
        assert not running & queue
        assert running | queue == self.leases.keys() | self.waits.keys()
        assert self.leases.keys() <= running
        assert queue <= self.waits.keys()

    @invariant()
    def loads_equal_a_recount(self) -> None:
        running = self.state.placer.running
        for worker, load in loads(self.state).items():
            tokens = [10 + lease.generated_tokens for lease in running.values() if lease.worker == worker]
            assert load == (len(tokens), sum(tokens))
        for name, (_, worker) in self.leases.items():
            lease = running[name]
            assert (lease.worker, lease.generated_tokens) == (worker, self.tokens.get(name, 0))

    @invariant()
    def no_slot_is_free_while_a_request_waits(self) -> None:
        status = router_status(self.state)
        assert not self.state.leases.queue_size or not self.workers or status["policy"] == SLOTS
        for ingress in {lease.ingress for lease in self.state.placer.queue.leases.values()}:
            for worker in status["workers"]:
                if worker["worker"] in self.reachable(ingress):
                    assert worker["in_flight"] >= status["parameters"]["slots"]

    @invariant()
    def a_worker_is_lost_when_no_ingress_reaches_it(self) -> None:
        if self.live:
            assert self.workers == set().union(*self.live.values())

    def teardown(self) -> None:
        release(self.state, *self.waits, *self.leases)
        status = router_status(self.state)
        assert status["decode_queue"] == {"size": 0, "oldest_wait_s": 0.0}
        assert set(loads(self.state).values()) <= {(0, 0)}
        assert not self.state.placer.running


TestConservation = Conservation.TestCase
TestConservation.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)


def test_requests_take_their_turn_by_deadline() -> None:
    clock = Clock()
    state = router(workers=1, clock=clock)
    place(state, "a", request("plain", may_wait=True))
    clock.now = 1.0
    place(
        state,
        request("late", may_wait=True, first_token_due_in_s=3.0),
        request("soon", may_wait=True, first_token_due_in_s=0.5),
    )
    # This one waits no longer than without an objective.
    place(state, request("lax", may_wait=True, first_token_due_in_s=60.0))
    place(state, "plain2")
    order = []
    for ended in ("a", "soon", "late", "plain", "lax"):
        new_leases(state)
        release(state, ended)
        order += new_leases(state)
    assert order == ["soon", "late", "plain", "lax", "plain2"]


def test_a_repeated_request_keeps_its_deadline() -> None:
    clock = Clock()
    state = router(workers=1, clock=clock)
    place(state, "a")
    place(state, request("x", may_wait=True, first_token_due_in_s=2.0))
    clock.now = 1.0
    place(
        state,
        request("y", may_wait=True, first_token_due_in_s=1.5),
        request("x", may_wait=True, first_token_due_in_s=2.0),
    )
    new_leases(state)
    release(state, "a")
    assert new_leases(state).keys() == {"x"}


def test_requests_that_are_late_already_go_after_those_that_are_not() -> None:
    clock = Clock()
    state = router(workers=1, clock=clock)
    place(state, "a")
    place(state, request("late", may_wait=True, first_token_due_in_s=0.5))
    clock.now = 1.0
    place(state, request("soon", may_wait=True, first_token_due_in_s=1.0))
    new_leases(state)
    release(state, "a")
    assert new_leases(state).keys() == {"soon"}


@pytest.mark.parametrize("patience_s", [2.0, 5.0])
def test_urgent_requests_starve_no_other(patience_s: float) -> None:
    """A request without an objective is served within `patience_s` and the turns that were due before."""
    clock = Clock()
    state = router(workers=1, clock=clock)
    state.placer.queue.patience_s = patience_s
    place(state, "first", "plain")
    running, number = "first", 0
    while running != "plain":
        clock.now += 0.5  # more urgent requests arrive than are served
        for _ in range(2):
            number += 1
            place(state, request(f"urgent{number}", may_wait=True, first_token_due_in_s=1.0))
        new_leases(state)
        release(state, running)
        (running,) = new_leases(state)
    assert clock.now <= patience_s + 1.0


def test_deadlines_order_the_requests_within_a_tenant_alone() -> None:
    state = router(workers=2)
    place(state, request("a0", tenant="a", may_wait=True), request("c0", tenant="c", may_wait=True))
    place(state, request("a1", tenant="a", may_wait=True, first_token_due_in_s=0.1))
    place(state, request("b1", tenant="b", may_wait=True))
    place(state, request("b2", tenant="b", may_wait=True, first_token_due_in_s=1.0))
    new_leases(state)
    release(state, "c0")  # tenant a still holds a worker
    assert new_leases(state).keys() == {"b2"}
